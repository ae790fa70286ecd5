"""What the coding agents are asked: two questions for nano, between them a tool loop that is written in advance; then one
question with a server whose window is too small for their instructions, which they must understand.

The command's output is not in the command, so an agent that did not run it cannot be answered the second rule's reply.
"""
import json
from collections.abc import Callable

from .client import Client
from .place import Done, Failed, Place
from .report import Report
from .served import Served, serve

FIRST, TOOL, LAST = "Please add 696 and 336.", "Run the led command.", "Which number is bigger: 988 or 552?"
COMMAND, PRINTED, TOLD = "echo led-$((40+2))", "led-42", "The command printed led-42."
WINDOW = 65536          # their system prompts and tools are 9,000 to 27,000 of nano's tokens
Ask = Callable[[str, bool, int | None], Done]       # words, whether the session goes on, the exit code that is expected


def call(name: str, **arguments) -> str:
    """A tool call as the model writes it."""
    written = "".join(f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
                      for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def agent(name: str, setup: Callable[[Place, Served, Report], Ask], said: Callable[[str], str], too_long: str,
          tool: str, **arguments) -> Client:
    """A Client. `setup` installs and points the agent at a server; `said` reads the answer out of what it prints;
    too_long: what it prints when the prompt does not fit; tool: what runs COMMAND, if called with these arguments."""
    def converse(place: Place, server: Served, report: Report) -> None:
        ask = setup(place, server, report)
        report.turn(server, "a question", said(ask(FIRST, False, 0).out))
        report.turn(server, f"{tool} is called and its output told", said(ask(TOOL, True, 0).out), TOLD)
        report.turn(server, "a question", said(ask(LAST, True, 0).out))
        report.turn(server, "a question in a new session", said(ask(LAST, False, 0).out))
        with serve() as narrow:
            done = setup(place, narrow, report)(FIRST, False, None)
            if too_long not in done.out + done.err or done.code == 0:
                raise Failed(f"a window too small: {too_long!r} and an exit code were wanted, these came: {done.code}, "
                             f"{done.out[-1500:]} {done.err[-1500:]}")
        report.result += f", says of a prompt that does not fit: {too_long}"
    rules = {"asked": PRINTED, "say": TOLD}, {"asked": TOOL, "say": call(tool, **arguments)}
    return Client(name, converse, WINDOW, rules)
