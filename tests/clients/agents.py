"""What the coding agents are asked: two questions for nano, and between them a tool loop that is written in advance.

The command's output is not in the command, so an agent that did not run it cannot be answered the second rule's reply.
"""
import json

FIRST, TOOL, LAST = "Please add 696 and 336.", "Run the led command.", "Which number is bigger: 988 or 552?"
COMMAND, PRINTED, TOLD = "echo led-$((40+2))", "led-42", "The command printed led-42."
WINDOW = 65536          # their system prompts and tools are 9,000 to 27,000 of nano's tokens


def call(name: str, **arguments) -> str:
    """A tool call as the model writes it."""
    written = "".join(f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
                      for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def rules(tool: str, **arguments) -> tuple[dict, ...]:
    """TOOL is answered with a call, what it printed with TOLD."""
    return {"asked": PRINTED, "say": TOLD}, {"asked": TOOL, "say": call(tool, **arguments)}
