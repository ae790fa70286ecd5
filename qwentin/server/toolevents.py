"""What an answer is made of: text and tool calls, in the order they were written.

Made by toolcall.py and answer.py, read by the dialects.
"""
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Reasoning:
    """More of the thought."""
    text: str


@dataclass(frozen=True)
class Text:
    """More of the answer's text."""
    text: str


@dataclass(frozen=True)
class CallStart:
    """A call to tool `name`; `index` counts the calls of the answer from 0."""
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """More of a call's arguments. Joined: one JSON object, or the bare text for a freeform tool."""
    index: int
    fragment: str


@dataclass(frozen=True)
class CallEnd:
    """complete: the call was closed, by itself or by the next; else the text ended inside it."""
    index: int
    complete: bool = True


Event = Reasoning | Text | CallStart | ArgumentsDelta | CallEnd


def joined(events: list[Event]) -> list[Event]:
    """The same with neighbours of a kind as one, and without empty ones."""
    out: list[Event] = []
    for (kind, index), group in groupby(events, lambda event: (type(event), getattr(event, "index", None))):
        if kind in (Text, Reasoning):
            text = "".join(event.text for event in group)
            out += [kind(text)] if text else []
        elif kind is ArgumentsDelta:
            fragment = "".join(event.fragment for event in group)
            out += [ArgumentsDelta(index, fragment)] if fragment else []
        else:
            out += group
    return out
