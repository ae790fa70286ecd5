"""tool_choice in every dialect's words."""
import pytest

from qwentin.errors import RequestError
from qwentin.server.responses_input import read_tools
from qwentin.server.toolchoice import AUTO, NONE, REQUIRED, ToolChoice, anthropic_choice, openai_choice

NAMED = ToolChoice(REQUIRED, frozenset({"f"}), False)


@pytest.mark.parametrize("value, parallel, choice", [
    (None, True, ToolChoice()), ("auto", True, ToolChoice()), ("none", True, ToolChoice(NONE)),
    ("required", True, ToolChoice(REQUIRED)), ("required", False, ToolChoice(REQUIRED, None, False)),
    ({"type": "function", "function": {"name": "f"}}, True, NAMED), ({"type": "function", "name": "f"}, True, NAMED),
    ({"type": "custom", "custom": {"name": "f"}}, True, NAMED), ({"type": "custom", "name": "f"}, True, NAMED),
    ({"type": "allowed_tools",
      "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}}, True,
     ToolChoice(AUTO, frozenset({"f"}))),
    ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}, {"name": "g"}]}, False,
     ToolChoice(REQUIRED, frozenset({"f", "g"}), False)),
])
def test_openais_words(value, parallel, choice):
    assert openai_choice(value, parallel) == choice


@pytest.mark.parametrize("value, choice", [
    (None, ToolChoice()), ({"type": "auto"}, ToolChoice()), ({"type": "none"}, ToolChoice(NONE)),
    ({"type": "any"}, ToolChoice(REQUIRED)), ({"type": "tool", "name": "f"}, ToolChoice(REQUIRED, frozenset({"f"}))),
    ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice(REQUIRED, None, False)),
    ({"type": "tool", "name": "f", "disable_parallel_tool_use": True}, NAMED),
    ({"disable_parallel_tool_use": True}, ToolChoice(AUTO, None, False)),
])
def test_anthropics_words(value, choice):
    assert anthropic_choice(value) == choice


@pytest.mark.parametrize("value, param", [
    ("always", "tool_choice"), (3, "tool_choice"), ({"type": "function"}, "tool_choice.name"), ({}, "tool_choice.type"),
    ({"type": "function", "function": {}}, "tool_choice.function.name"), ({"type": "mcp"}, "tool_choice.type"),
    ({"type": ["function"]}, "tool_choice.type"), ({"type": "allowed_tools"}, "tool_choice.tools"),
    ({"type": "allowed_tools", "mode": "none", "tools": []}, "tool_choice.mode"),
    ({"type": "allowed_tools", "tools": [3]}, "tool_choice.tools[0]"),
])
def test_what_is_none_of_them_is_named(value, param):
    with pytest.raises(RequestError, match="wanted|missing") as caught:
        openai_choice(value, True)
    assert caught.value.param == param


def test_only_declared_tools():
    assert NAMED.check({"f", "g"}) is NAMED and ToolChoice().check(set()) == ToolChoice()
    for choice in (NAMED, ToolChoice(AUTO, frozenset({"f"})), ToolChoice(REQUIRED)):
        with pytest.raises(RequestError) as caught:
            choice.check({"g"} if choice.names else set())
        assert caught.value.param == "tool_choice"


def test_names_as_the_model_sees_them():
    """Codex's namespaces: by the whole name, by name and namespace, or by a name that only one tool has."""
    tools = read_tools([{"type": "namespace", "name": "mcp__db", "tools": [{"type": "function", "name": "query"}]},
                        {"type": "custom", "name": "apply_patch"}])
    for value in ({"type": "function", "name": "query", "namespace": "mcp__db"}, {"type": "function", "name": "query"},
                  {"type": "function", "name": "mcp__db__query"}):
        assert openai_choice(value, True, tools.seen).names == {"mcp__db__query"}
    assert openai_choice({"type": "custom", "name": "apply_patch"}, True, tools.seen).names == {"apply_patch"}
