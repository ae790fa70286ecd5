"""Items, instructions and tools of the Responses API -> the conversation that a chat template renders.

    instructions                    the leading system message; developer and system items as conversation.py places them
    reasoning, message (assistant), function_call, custom_tool_call       in a row are one assistant turn
    function_call_output, custom_tool_call_output                         messages of role tool
    reasoning                       its content, or its summary if that is all there is; encrypted_content is not read
    other items                     what hosted tools left in the history: not shown, with a line in the log

Tools: a `namespace` is printed as its functions, named NAMESPACE__NAME, and a call is reported with the two apart, which
is how Codex finds an MCP tool. A `custom` tool is printed as a function with one string, `input`. Tools that OpenAI's
servers run (web_search and others) are not shown to the model, with a line in the log.

How much it thinks: effort.py. Proven by tests/test_responses.py.
"""
from dataclasses import dataclass, field

from ..errors import RequestError
from .conversation import Conversation, add_calls, function_tool, message, place_systems, text_of
from .effort import EFFORTS
from .fields import listing, mapping, one_of, refuse, string


@dataclass(frozen=True)
class Called:
    """Who a tool is to the client."""
    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass
class Tools:
    """The declared tools: as templates print them, as toolschema.py reads them, and by the name that the model sees."""
    printed: list[dict] = field(default_factory=list)
    declared: list[dict] = field(default_factory=list)
    named: dict[str, Called] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, here: str, tool, namespace: str | None = None) -> None:
        kind = mapping(here, tool).get("type")
        if kind == "namespace" and namespace is None:
            inside = string(f"{here}.name", tool.get("name"))
            for i, inner in enumerate(listing(f"{here}.tools", tool.get("tools"))):
                self.add(f"{here}.tools[{i}]", inner, inside)
        elif kind in ("function", "custom"):
            name = string(f"{here}.name", tool.get("name"))
            seen = full_name(namespace, name)
            self.named[seen] = Called(name, namespace, kind == "custom")
            printed = custom_tool(seen, tool) if kind == "custom" else function_tool(
                seen, tool.get("description"), tool.get("parameters"))
            self.printed.append(printed)
            self.declared.append({**printed, "type": kind, "strict": tool.get("strict") is True})
        else:
            self.notes.append(f"ignoring tools of type {str(kind)[:60]!r}, which this server does not run")

    def seen(self, name: str, namespace: str | None = None) -> str:
        """The name that the model sees, of a tool as the client names it."""
        found = [seen for seen, called in self.named.items() if called.name == name
                 and namespace in (None, called.namespace)]
        return found[0] if len(found) == 1 else full_name(namespace, name)


def full_name(namespace, name: str) -> str:
    """One name for a tool of a namespace, in the way that models have seen MCP tools named."""
    return f"{namespace.removesuffix('__')}__{name}" if isinstance(namespace, str) and namespace else name


def custom_tool(name: str, tool: dict) -> dict:
    """A tool that takes free text, as a function with one string."""
    description, form = tool.get("description"), tool.get("format")
    description = description if isinstance(description, str) else ""
    if isinstance(form, dict) and isinstance(form.get("definition"), str):
        description += f"\n\nThe input is text that this grammar ({form.get('syntax')}) accepts:\n{form['definition']}"
    text = {"type": "string", "description": "The whole input as plain text"}
    return function_tool(name, description.strip(), {"type": "object", "properties": {"input": text}, "required": ["input"]})


def read_tools(tools: list | None) -> Tools:
    found = Tools()
    for i, tool in enumerate(tools or []):
        found.add(f"tools[{i}]", tool)
    return found


def conversation_of(body, tools: Tools) -> Conversation:
    """The conversation of a ResponsesBody. Raises RequestError naming the item. Adds to tools.notes what it left out."""
    found = Transcript(tools.notes)
    if body.instructions:
        found.turns.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        found.turns.append({"role": "user", "content": body.input})
    elif isinstance(body.input, list):
        for i, item in enumerate(body.input):
            found.add(f"input[{i}]", mapping(f"input[{i}]", item))
    else:
        refuse("input", body.input, "a string or an array of items")
    if not found.turns:
        raise RequestError("input is empty; at least one item was wanted.", "input")
    effort = (body.reasoning or {}).get("effort")
    if effort is not None:
        one_of("none", *EFFORTS)("reasoning.effort", effort)
    return Conversation(place_systems(found.turns), tools.printed or None, body.variables(effort))


class Transcript:
    """Items in, turns out."""

    def __init__(self, notes: list[str]):
        self.turns: list[dict] = []
        self.notes = notes

    def add(self, here: str, item: dict) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self.add_message(here, item)
        elif kind == "reasoning":
            self.add_reasoning(here, item)
        elif kind == "function_call":
            self.add_call(here, item, string(f"{here}.arguments", item.get("arguments")))
        elif kind == "custom_tool_call":
            self.add_call(here, item, {"input": string(f"{here}.input", item.get("input"))})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self.turns.append({"role": "tool", "content": output_text(f"{here}.output", item.get("output")),
                               "tool_call_id": item.get("call_id")})
        elif kind == "item_reference":
            raise RequestError(f"{here} refers to a stored item; nothing is stored here, send the item itself.", here,
                               "unsupported_value")
        else:
            self.notes.append(f"ignoring input items of type {str(kind)[:60]!r}")

    def assistant(self) -> dict:
        """The assistant turn that the last item belongs to, or a new one."""
        if not self.turns or self.turns[-1]["role"] != "assistant":
            self.turns.append({"role": "assistant", "content": ""})
        return self.turns[-1]

    def add_message(self, here: str, item: dict) -> None:
        said = message(here, item)
        if said["role"] == "assistant":
            self.assistant()["content"] += said["content"]
        else:
            self.turns.append(said)

    def add_reasoning(self, here: str, item: dict) -> None:
        """A thought comes first in its turn: after anything else it begins the next one."""
        place = f"{here}.content" if item.get("content") else f"{here}.summary"
        parts = listing(place, item.get("content") or item.get("summary") or [])
        thought = "\n\n".join(string(f"{place}[{i}].text", mapping(f"{place}[{i}]", part).get("text"))
                              for i, part in enumerate(parts))
        turn = self.assistant()
        if turn["content"] or turn.get("tool_calls") or turn.get("reasoning_content"):
            turn = {"role": "assistant", "content": ""}
            self.turns.append(turn)
        turn["reasoning_content"] = thought

    def add_call(self, here: str, item: dict, arguments: str | dict) -> None:
        name = full_name(item.get("namespace"), string(f"{here}.name", item.get("name")))
        call = {"id": item.get("call_id"), "function": {"name": name, "arguments": arguments}}
        add_calls(here, {"tool_calls": [call]}, self.assistant())


def output_text(name: str, output) -> str:
    """A tool's result: text, a list of parts, or the older object around either."""
    if isinstance(output, dict):
        output = output.get("content")
    return text_of(name, output, strict=False)
