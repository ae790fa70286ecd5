r"""A completion's text in, its thought, text and tool calls out: reasoning.py and toolcall.py as one machine.

    I need the weather.\n</think>\n\nLet me look.\n\n<tool_call>...      the thought ends at </think>
    Reasoning(...)                  Text(...)      CallStart(0, ...) ...

A call in a thought is a draft if the thought is closed later, and the answer if it never is: some completions leave
</think> out. Only their end tells which, so from a complete call in a thought on, its text waits. A thought that was cut
off (`finish(cut=True)`) decided on nothing: all of it is thought.

    I need the weather.\n<tool_call>...</tool_call> but first\n</think>\n\nHello    Reasoning (all), Text("Hello")
    I need the weather.\n<tool_call>...</tool_call>                               Reasoning, CallStart, ..., CallEnd

Proven by tests/test_answer.py: every way of cutting the text gives the same events.
"""
from collections.abc import Callable
from dataclasses import replace

from .reasoning import CLOSE, ReasoningSplitter
from .toolcall import ToolCallParser, new_call_id
from .toolevents import CallEnd, CallStart, Event, Reasoning, joined
from .toolschema import Toolbox


class AnswerParser:
    """One choice. `thinking`: the prompt leaves the model inside a thought; the rest as for ToolCallParser."""

    def __init__(self, thinking: bool, tools: Toolbox | list[dict] | None, new_id: Callable[[], str] = new_call_id,
                 parallel: bool = True):
        self.tools = tools if isinstance(tools, Toolbox) else Toolbox(tools)
        self.new_id = new_id
        self.splitter = ReasoningSplitter(thinking)
        self.answer = ToolCallParser(self.tools, new_id, parallel)
        self.draft = ToolCallParser(self.tools, str, parallel, guess=False)      # reads the thought, for calls in it
        self.drafted: list[Event] = []      # what it found, calls without identifiers
        self.thinking = thinking
        self.start = None if thinking else 0    # where the answer starts, in characters of the completion
        self.read = self.split = 0          # characters taken in; those that the splitter has seen
        self.waiting: list[str] = []        # the text between
        self.tail = ""                      # the end of the thought so far, where </think> may begin

    def push(self, text: str) -> list[Event]:
        self.read += len(text)
        return joined(self.think(text) if self.thinking else self.after_thought(text))

    def think(self, text: str) -> list[Event]:
        """Text that began inside the thought; it may close it."""
        self.waiting.append(text)
        self.tail += text
        if CLOSE in self.tail:
            self.thinking = False
            return self.release(self.read)
        self.tail = self.tail[-len(CLOSE) + 1:]
        events = self.draft.push(text)
        if self.draft.began is not None:
            self.drafted += events
        return self.release(self.settled)

    @property
    def settled(self) -> int:
        """Characters that are thought whatever follows: no call in them, no beginning of </think>."""
        held = next((k for k in range(len(self.tail), 0, -1) if CLOSE.startswith(self.tail[-k:])), 0)
        return min(self.draft.settled, self.read - held)

    def release(self, until: int) -> list[Event]:
        """Give the splitter the waiting text before `until`."""
        if until <= self.split:
            return []
        whole = "".join(self.waiting)
        count = until - self.split
        self.waiting = [whole[count:]] if count < len(whole) else []
        return self.after_thought(whole[:count])

    def after_thought(self, text: str) -> list[Event]:
        """Text that the splitter may see."""
        self.split += len(text)
        thought, answer = self.splitter.push(text)
        if self.start is None:
            self.start = self.splitter.start
        return [Reasoning(thought), *self.answer.push(answer)]

    def finish(self, cut: bool = False) -> list[Event]:
        """The events that waited for more text. `cut`: the text ended at a limit, not by itself."""
        events: list[Event] = []
        if self.thinking:
            self.drafted += self.draft.finish()
            called = any(isinstance(event, CallEnd) and event.complete for event in self.drafted)
            if called and not cut:
                return self.call_in_thought()
            events += self.release(self.read)
        return joined([*events, Reasoning(self.splitter.finish()), *self.answer.finish()])

    def call_in_thought(self) -> list[Event]:
        """The thought ends where its first call begins."""
        self.start, self.answer = self.draft.began, self.draft
        events = self.release(self.start)
        first = next(i for i, event in enumerate(self.drafted) if isinstance(event, CallStart))
        calls = [replace(event, id=self.new_id()) if isinstance(event, CallStart) else event
                 for event in self.drafted[first:]]
        return joined([*events, Reasoning(self.splitter.finish()), *calls])

    def is_thought(self, offset: int) -> bool | None:
        """Does a token whose text starts at `offset` belong to the thought? None while that is open."""
        if self.start is not None:
            return offset < self.start if offset < self.read else None
        return True if offset < self.split else None

    @property
    def dropped(self) -> list[str]:
        """Calls beyond the first, where only one is allowed."""
        return self.answer.dropped
