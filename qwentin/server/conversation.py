"""A client's messages -> the messages that a chat template renders, and the template's variables.

Clients send more shapes than templates take; each is brought to one:

    content         a string, null, or a list of parts   -> a string (text parts joined; images and audio are refused, but
                    noted in brackets inside a tool's result: refusing one would end an agent's session for good)
    developer       is system
    system          the leading ones become one system message. A later one cannot stay where it is (the stock template
                    raises, merging it forward would change the prompt's beginning and lose the cached prefix): after a
                    tool result it is appended to that result, elsewhere it becomes a user message. Either way its text
                    stands between <system> and </system>
    tool_calls      arguments as JSON text -> a mapping; text that is no JSON object stays what it was: text of the turn
    function        the older way to call: function_call and role function are tool_calls and role tool
    reasoning       is reasoning_content

How much it thinks: effort.py. Proven by tests/test_chat.py.
"""
import json
from dataclasses import dataclass

from ..chat_template import ChatTemplate
from ..errors import RequestError
from .fields import listing, mapping, refuse, string, whole_characters

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
         "function": "tool"}
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
NO_TEXT = "not shown, this model reads text only"


@dataclass(frozen=True)
class Conversation:
    """What a chat template renders: messages, the declared tools as it prints them, and its variables."""
    messages: list[dict]
    tools: list[dict] | None
    variables: dict

    def render(self, chat_template: ChatTemplate) -> tuple[str, str]:
        """The prompt in two parts: what the conversation's next prompt will begin with too, and the rest."""
        whole = chat_template.render(self.messages, self.tools, **self.variables)
        stable = chat_template.render(self.messages, self.tools, **{**self.variables, "add_generation_prompt": False})
        return (stable, whole[len(stable):]) if whole.startswith(stable) else ("", whole)


def conversation(messages: list) -> list[dict]:
    """Messages for the template. Raises RequestError naming the message, e.g. messages[2].content."""
    if not messages:
        raise RequestError("messages is empty; at least one message was wanted.", "messages")
    return place_systems([message(f"messages[{i}]", m) for i, m in enumerate(messages)])


def message(name: str, given) -> dict:
    """One message, every key checked, unknown keys dropped."""
    mapping(name, given)
    role = ROLES.get(given["role"]) if isinstance(given.get("role"), str) else None
    if role is None:
        raise RequestError(f"{name}.role is {json.dumps(given.get('role'))[:40]}; one of {', '.join(ROLES)} was wanted.",
                           f"{name}.role")
    out = {"role": role, "content": text_of(f"{name}.content", given.get("content"), strict=role != "tool")}
    if role == "assistant":
        thought = given.get("reasoning_content")
        thought = given.get("reasoning") if thought is None else thought
        if thought is not None:
            out["reasoning_content"] = string(f"{name}.reasoning_content", thought)
        add_calls(name, given, out)
    if role == "tool" and isinstance(given.get("tool_call_id"), str):
        out["tool_call_id"] = given["tool_call_id"]
    return out


def text_of(name: str, content, strict: bool = True) -> str:
    """Content as one string; null is the empty one. What is no text is refused, or noted if not `strict`."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        refuse(name, content, "a string, null or an array of text parts")
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        here = f"{name}[{i}]"
        kind = mapping(here, part).get("type", "text")
        if not isinstance(kind, str) or kind not in TEXT_PARTS:
            if not strict:
                texts.append(f"[{str(kind)[:40]}: {NO_TEXT}]")
                continue
            raise RequestError(f"{here} is a part of type {json.dumps(kind)[:40]}; this model reads text parts only.", here,
                               "unsupported_content")
        texts.append(string(f"{here}.{TEXT_PARTS[kind]}", part.get(TEXT_PARTS[kind], "")))
    return "".join(texts)


def add_calls(name: str, given: dict, out: dict) -> None:
    """Tool calls of an assistant message, arguments as mappings; those that cannot be are written into its text."""
    calls = given.get("tool_calls")
    calls = [] if calls is None else listing(f"{name}.tool_calls", calls)
    if not calls and given.get("function_call") is not None:
        calls = [{"function": given["function_call"]}]
    kept = []
    for i, call in enumerate(calls):
        here = f"{name}.tool_calls[{i}].function"
        function = mapping(here, mapping(f"{name}.tool_calls[{i}]", call).get("function"))
        called = string(f"{here}.name", function.get("name"))
        arguments = as_mapping(function.get("arguments"))
        if arguments is not None:
            kept.append({"id": call.get("id"), "type": "function",
                         "function": {"name": called, "arguments": arguments}})
        else:
            raw = string(f"{here}.arguments", function["arguments"])
            text = f"<tool_call>\n<function={called}>\n{raw}\n</function>\n</tool_call>"
            out["content"] = f"{out['content']}\n\n{text}" if out["content"] else text
    if kept:
        out["tool_calls"] = out.get("tool_calls", []) + kept


def as_mapping(arguments) -> dict | None:
    """Arguments of a call, or None if they are text that is no JSON object. No text at all is no arguments."""
    if arguments is None or isinstance(arguments, str) and not arguments.strip():
        return {}
    if isinstance(arguments, str):
        try:
            arguments = whole_characters(json.loads(arguments))
        except (ValueError, RecursionError):
            return None
    return arguments if isinstance(arguments, dict) else None


def place_systems(messages: list[dict]) -> list[dict]:
    """Leading system messages merged into one; later ones moved out of the system role, each where it stood."""
    lead = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    out = []
    if lead:
        texts = [m["content"] for m in messages[:lead] if m["content"]]
        out.append({"role": "system", "content": "\n\n".join(texts)})
    for m in messages[lead:]:
        if m["role"] != "system":
            out.append(m)
            continue
        text = f"<system>\n{m['content']}\n</system>"
        if out[-1]["role"] == "tool":
            out[-1] = {**out[-1], "content": f"{out[-1]['content']}\n\n{text}"}
        else:
            out.append({"role": "user", "content": text})
    return out


def tool_list(name: str, value) -> list[dict]:
    """Declared tools, kept as they came: their JSON goes into the prompt key by key."""
    for i, tool in enumerate(listing(name, value)):
        here = f"{name}[{i}]"
        kind = mapping(here, tool).get("type", "function")
        if kind != "function":
            raise RequestError(f"{here} is a tool of type {json.dumps(kind)[:40]}; function tools are served.", here,
                               "unsupported_tool")
        string(f"{here}.function.name", mapping(f"{here}.function", tool.get("function")).get("name"))
    return value


def function_tool(name: str, description, parameters) -> dict:
    """A tool in the form that templates print, from a dialect that writes it flat."""
    said = {"name": name} | ({"description": description} if isinstance(description, str) else {})
    return {"type": "function", "function": {**said, "parameters": parameters if isinstance(parameters, dict) else {}}}
