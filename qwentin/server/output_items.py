"""One output item of the Responses API while it grows: a thought, a message or a call, and the events that tell of it.

    reasoning, message                  added, part added, delta*, text done, part done, item done
    function_call, custom_tool_call     added, delta*, arguments or input done, item done

Used by responses.py, which numbers the events; proven by tests/test_responses.py.
"""
import uuid
from dataclasses import dataclass, field

from .responses_input import Called

Events = list[tuple[str, dict]]


@dataclass(frozen=True)
class Kind:
    """prefix of its id; the event its deltas belong to; the key its text has; the type of its one content part."""
    prefix: str
    event: str
    key: str
    part: str | None = None


KINDS = {"reasoning": Kind("rs", "response.reasoning_text", "text", "reasoning_text"),
         "message": Kind("msg", "response.output_text", "text", "output_text"),
         "function_call": Kind("fc", "response.function_call_arguments", "arguments"),
         "custom_tool_call": Kind("ctc", "response.custom_tool_call_input", "input")}


@dataclass
class Item:
    kind: str
    index: int                          # in response.output
    call_id: str | None = None          # of a call
    called: Called | None = None
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict] = field(default_factory=list)
    status: str = "in_progress"

    def __post_init__(self):
        self.says = KINDS[self.kind]
        self.id = f"{self.says.prefix}_{uuid.uuid4().hex}"

    def place(self, **said) -> dict:
        """Where an event belongs, and what it says."""
        part = {"content_index": 0} if self.says.part else {}
        return {"item_id": self.id, "output_index": self.index, **part, **said}

    def scored(self, logprobs: list[dict]) -> dict:
        """The key that events of an answer's text have to have."""
        return {"logprobs": logprobs} if self.kind == "message" else {}

    def begin(self) -> Events:
        added = [("response.output_item.added", {"output_index": self.index, "item": self.object("in_progress")})]
        part = [("response.content_part.added", self.place(part=self.part("")))] if self.says.part else []
        return added + part

    def add(self, text: str, logprobs: list[dict] = ()) -> Events:
        self.texts.append(text)
        self.logprobs += logprobs
        if not (text or logprobs):
            return []
        return [(f"{self.says.event}.delta", self.place(delta=text, **self.scored(list(logprobs))))]

    def close(self, status: str) -> Events:
        self.status, text = status, "".join(self.texts)
        done = [(f"{self.says.event}.done", self.place(**{self.says.key: text}, **self.scored(self.logprobs)))]
        part = [("response.content_part.done", self.place(part=self.part(text)))] if self.says.part else []
        item = [("response.output_item.done", {"output_index": self.index, "item": self.object(status)})]
        return done + part + item

    def part(self, text: str) -> dict:
        more = {"annotations": [], "logprobs": self.logprobs} if self.kind == "message" else {}
        return {"type": self.says.part, "text": text, **more}

    def object(self, status: str) -> dict:
        """The item as output shows it; its content stays empty while it grows."""
        text = "".join(self.texts)
        out = {"id": self.id, "type": self.kind, "status": status}
        if self.says.part:
            content = [self.part(text)] if status != "in_progress" else []
            out |= {"role": "assistant"} if self.kind == "message" else {"summary": [], "encrypted_content": None}
            return {**out, "content": content}
        namespace = {"namespace": self.called.namespace} if self.called.namespace is not None else {}
        return {**out, "call_id": self.call_id, "name": self.called.name, **namespace, self.says.key: text}
