"""Which tools a request may or must call, in the words of each dialect -> one ToolChoice.

                  Chat Completions                         Responses                        Messages
    free          "auto", or nothing                       the same                         {"type": "auto"}
    none          "none"                                   "none"                           {"type": "none"}
    some call     "required"                               "required"                       {"type": "any"}
    this call     {"type": "function",                     {"type": "function" | "custom",  {"type": "tool", "name": N}
                   "function": {"name": N}}                 "name": N}
    these only    {"type": "allowed_tools",                {"type": "allowed_tools",        -
                   "allowed_tools": {"mode", "tools"}}      "mode", "tools"}
    one call      "parallel_tool_calls": false             the same                         "disable_parallel_tool_use"

A call that must come is forced by a grammar (toolgrammar.py), so it comes whatever the model would rather do. Proven by
tests/test_toolchoice.py and tests/test_forced_calls.py.
"""
from dataclasses import dataclass

from ..errors import RequestError
from .fields import boolean, listing, mapping, named, one_of, refuse, string

AUTO, NONE, REQUIRED = "auto", "none", "required"
FIELD = "tool_choice"


@dataclass(frozen=True)
class ToolChoice:
    """mode is AUTO, NONE or REQUIRED; `names`, if given, are the only tools that may be called; not `parallel`: one call."""
    mode: str = AUTO
    names: frozenset[str] | None = None
    parallel: bool = True

    def check(self, declared: set[str]) -> "ToolChoice":
        """Itself, if what it names is there. `declared` are the names as the model sees them."""
        unknown = sorted(set(self.names or ()) - declared)
        if unknown:
            raise RequestError(f"{FIELD} names the tool {unknown[0][:80]!r}, which is not among the tools.", FIELD)
        if self.mode == REQUIRED and not declared:
            raise RequestError(f"{FIELD} asks for a call, but there are no tools.", FIELD)
        return self


def openai_choice(value, parallel: bool, seen=lambda name, namespace: name) -> ToolChoice:
    """tool_choice of Chat Completions or Responses. `seen` gives the name that the model sees."""
    if value is None or isinstance(value, str):
        return ToolChoice(one_of(AUTO, NONE, REQUIRED)(FIELD, AUTO if value is None else value), None, parallel)
    kind = mapping(FIELD, value).get("type")
    if kind == "allowed_tools":
        inner = value.get("allowed_tools", value)
        mode = one_of(AUTO, REQUIRED)(f"{FIELD}.mode", mapping(f"{FIELD}.allowed_tools", inner).get("mode", AUTO))
        tools = listing(f"{FIELD}.tools", inner.get("tools"))
        return ToolChoice(mode, frozenset(tool_name(f"{FIELD}.tools[{i}]", t, seen) for i, t in enumerate(tools)), parallel)
    if kind not in ("function", "custom"):
        raise RequestError(f"{FIELD}.type is {named(kind)}; function, custom or allowed_tools was wanted.", f"{FIELD}.type",
                           "unsupported_value")
    return ToolChoice(REQUIRED, frozenset({tool_name(FIELD, value, seen)}), False)


def tool_name(here: str, value, seen) -> str:
    """The name in {"type": "function", "function": {"name": N}} or {"type": "function", "name": N}."""
    kind = mapping(here, value).get("type", "function")
    inner = value.get(kind) if isinstance(kind, str) else None
    where, holder = (f"{here}.{kind}", inner) if isinstance(inner, dict) else (here, value)
    return seen(string(f"{where}.name", holder.get("name")), holder.get("namespace"))


def anthropic_choice(value: dict | None) -> ToolChoice:
    """tool_choice of Messages."""
    value = value or {}
    single = boolean(f"{FIELD}.disable_parallel_tool_use", value.get("disable_parallel_tool_use") or False)
    kind = value.get("type", "auto")
    if kind == "tool":
        return ToolChoice(REQUIRED, frozenset({string(f"{FIELD}.name", value.get("name"))}), not single)
    modes = {"auto": AUTO, "none": NONE, "any": REQUIRED}
    if not isinstance(kind, str) or kind not in modes:
        refuse(f"{FIELD}.type", kind, "one of auto, any, tool, none", "invalid_value")
    return ToolChoice(modes[kind], None, not single)
