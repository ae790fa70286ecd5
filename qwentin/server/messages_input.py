"""Anthropic's messages, system and tools -> the conversation that a chat template renders.

    system              a string or text blocks; the per-request billing line that Claude Code puts first is dropped: it
                        would make every prompt differ from its beginning on
    role system         also inside messages; conversation.py's rule for later system messages places it
    text                blocks of a user turn are separate paragraphs; those of an assistant turn are joined as they are
    thinking            is reasoning_content; its signature is not checked; redacted_thinking is left out
    tool_use            is a tool call
    tool_result         is a message of role tool. Texts beside it that are wholly <system-reminder> stay with the result:
                        as a user turn they would end the tool loop and, with most templates, drop its thoughts
    image, document     refused by name, except text documents; inside a tool result they become a note in brackets

How much it thinks: effort.py. thinking.type enabled, adaptive and between_tools are on, disabled is off. Proven by
tests/test_messages.py and tests/test_messages_input.py.
"""
import re

from ..errors import RequestError
from .conversation import NO_TEXT, Conversation, function_tool, place_systems
from .effort import EFFORTS
from .fields import integer, listing, mapping, named, one_of, refuse, string

BILLING = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n?")
REMINDER = re.compile(r"\s*<system-reminder>.*</system-reminder>\s*", re.DOTALL)
ROLES = ("user", "assistant", "system")
THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
PARAGRAPH = "\n\n"


def conversation_of(body) -> Conversation:
    """The conversation of a MessagesBody. Raises RequestError naming the message or block."""
    if not body.messages:
        raise RequestError("messages is empty; at least one message was wanted.", "messages")
    turns = [] if body.system is None else [{"role": "system", "content": system_text(body.system)}]
    for i, given in enumerate(body.messages):
        turns += turn(f"messages[{i}]", given)
    if turns[-1]["role"] == "assistant":
        raise RequestError("messages ends with an assistant message; this model cannot continue one (prefill).", "messages",
                           "unsupported_value")
    tools, _ = declared(body.tools)
    return Conversation(place_systems(turns), tools or None, variables_of(body))


def variables_of(body) -> dict:
    kind = (body.thinking or {}).get("type", "disabled")
    one_of(*THINKING)("thinking.type", kind)
    effort = (body.output_config or {}).get("effort")
    if effort is not None:
        one_of(*EFFORTS)("output_config.effort", effort)
    return body.variables(effort, THINKING[kind])


def budget_of(body) -> int | None:
    """thinking.budget_tokens, unless an extension says otherwise. It counts whatever thinking.type says: the template has
    been told by then whether there is a thought."""
    given = (body.thinking or {}).get("budget_tokens")
    return body.budget(None if given is None else integer(0)("thinking.budget_tokens", given))


def marked_strict(kept: list[dict] | None, tools: list | None) -> list[dict]:
    """The declared tools, with `strict` beside those whose schema the client wants kept to."""
    strict = {tool.get("name") for tool in tools or [] if tool.get("strict") is True}
    return [{**tool, "strict": tool["function"]["name"] in strict} for tool in kept or []]


def declared(tools: list | None) -> tuple[list[dict], list[str]]:
    """The client's own tools as templates print them, and a note for each kind that only Anthropic's servers run."""
    kept, notes = [], []
    for i, tool in enumerate(tools or []):
        here = f"tools[{i}]"
        kind = mapping(here, tool).get("type") or "custom"
        if kind != "custom":
            notes.append(f"ignoring tools of type {str(kind)[:60]!r}, which this server does not run")
            continue
        name = string(f"{here}.name", tool.get("name"))
        kept.append(function_tool(name, tool.get("description"), tool.get("input_schema")))
    return kept, notes


def system_text(system) -> str:
    """The system prompt without billing lines."""
    if isinstance(system, str):
        return BILLING.sub("", system, count=1) if BILLING.match(system) else system
    texts = [string(f"system[{i}].text", mapping(f"system[{i}]", block).get("text"))
             for i, block in enumerate(listing("system", system))]
    return PARAGRAPH.join(text for text in texts if not BILLING.fullmatch(text))


def turn(name: str, given) -> list[dict]:
    """One of Anthropic's messages as the template's."""
    role = mapping(name, given).get("role")
    if role not in ROLES:
        raise RequestError(f"{name}.role is {named(role)}; one of {', '.join(ROLES)} was wanted.", f"{name}.role")
    content = given.get("content")
    if content is None or isinstance(content, str):
        return [{"role": role, "content": content or ""}]
    if not isinstance(content, list):
        refuse(f"{name}.content", content, "a string or an array of content blocks")
    blocks = [(f"{name}.content[{i}]", mapping(f"{name}.content[{i}]", block)) for i, block in enumerate(content)]
    if role == "user":
        return user_turn(blocks)
    if role == "assistant":
        return [assistant_turn(blocks)]
    return [{"role": "system", "content": PARAGRAPH.join(text_of(here, block) for here, block in blocks)}]


def user_turn(blocks: list[tuple[str, dict]]) -> list[dict]:
    """Tool results, then what the user says."""
    results, texts = [], []
    for here, block in blocks:
        if block.get("type") == "tool_result":
            results.append({"role": "tool", "content": result_text(here, block.get("content")),
                            "tool_call_id": block.get("tool_use_id")})
        else:
            text = text_of(here, block)
            if results and REMINDER.fullmatch(text):
                results[-1]["content"] += PARAGRAPH + text
            else:
                texts.append(text)
    said = [{"role": "user", "content": PARAGRAPH.join(texts)}] if texts or not results else []
    return results + said


def text_of(here: str, block: dict) -> str:
    """A block that can be read as text. Refused by name if it cannot."""
    kind, source = block.get("type", "text"), block.get("source")
    if kind == "text":
        return string(f"{here}.text", block.get("text"))
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return string(f"{here}.source.data", source.get("data"))
    raise RequestError(f"{here} is a block of type {named(kind)}; this model reads text only.", here, "unsupported_content")


def result_text(here: str, content) -> str:
    """A tool result as text: refusing one would end an agent's session for good, so what is no text becomes a note."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for i, block in enumerate(listing(f"{here}.content", content)):
        try:
            parts.append(text_of(f"{here}.content[{i}]", mapping(f"{here}.content[{i}]", block)))
        except RequestError as error:
            if error.code != "unsupported_content":
                raise
            parts.append(f"[{str(block.get('type'))[:40]}: {NO_TEXT}]")
    return PARAGRAPH.join(parts)


def assistant_turn(blocks: list[tuple[str, dict]]) -> dict:
    """Thoughts, texts and calls; other blocks are what another server left in the history."""
    thoughts, texts, calls = [], [], []
    for here, block in blocks:
        kind = block.get("type", "text")
        if kind == "text":
            texts.append(string(f"{here}.text", block.get("text")))
        elif kind == "thinking":
            thoughts.append(string(f"{here}.thinking", block.get("thinking")))
        elif kind == "tool_use":
            function = {"name": string(f"{here}.name", block.get("name")),
                        "arguments": mapping(f"{here}.input", block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
    out = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        out["reasoning_content"] = PARAGRAPH.join(thoughts)
    if calls:
        out["tool_calls"] = calls
    return out
