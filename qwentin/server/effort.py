"""How much a request thinks: whether, at which effort, for how many tokens; and who has the last word.

The first that speaks decides:

               whether                                   effort                                  budget
    1  chat_template_kwargs.enable_thinking     chat_template_kwargs.reasoning_effort    thinking_token_budget
    2  enable_thinking                          reasoning_effort, reasoning.effort,      thinking_budget
                                                output_config.effort
    3  reasoning_effort, reasoning.effort:      --reasoning-effort                       thinking.budget_tokens (Messages)
       "none" is off, another one on;
       thinking.type (Messages)
    4  off (Messages only: its clients          the chat template's own                  --reasoning-budget
       count on it)
    5  --thinking                                                                        no limit
    6  the chat template's own default

A budget of 0 closes the thought at once; off leaves it out of the prompt, which the model knows better. Effort is a word
to the template; with one that does not read it (Qwen3.5, 3.6) only the budget counts. Thoughts of earlier turns are kept
or dropped by preserve_thinking, where the template asks: chat_template_kwargs, then the field, then --preserve-thinking,
then the template. What came of it all is told in x_qwentin and in the log. The server's own rows (--...) come with the
ChatTemplate and the EngineConfig. Proven by tests/test_effort.py and tests/test_preserve_thinking.py.
"""
from dataclasses import dataclass

from ..errors import RequestError
from .fields import boolean, integer, mapping, optional

# OpenAI's words for effort -> the template's (Qwen3.8 knows low, medium and xhigh)
EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "xhigh", "xhigh": "xhigh", "max": "xhigh"}
RESERVED = ("messages", "tools", "self")


@dataclass(frozen=True)
class Thinking:
    """The fields that all dialects share; the names are those of vLLM and of Qwen's own service."""
    enable_thinking: bool | None = optional(boolean)
    thinking_token_budget: int | None = optional(integer(0))
    thinking_budget: int | None = optional(integer(0))
    preserve_thinking: bool | None = optional(boolean)
    chat_template_kwargs: dict | None = optional(mapping)

    def variables(self, effort: str | None, switch: bool | None = None) -> dict:
        """Variables for the template. `switch` is what the dialect itself says of thinking."""
        on = switch if self.enable_thinking is None else self.enable_thinking
        return template_variables(self.chat_template_kwargs or {}, on, effort, self.preserve_thinking)

    def budget(self, dialect: int | None = None) -> int | None:
        """The budget that the request names. `dialect`: where its dialect has a place of its own for one."""
        given = (self.thinking_token_budget, self.thinking_budget, dialect)
        return next((value for value in given if value is not None), None)


def template_variables(kwargs: dict, enable_thinking: bool | None, effort: str | None, preserve: bool | None = None) -> dict:
    """Variables for the template, by the precedence above. `kwargs` is chat_template_kwargs, passed through."""
    variables = {} if preserve is None else {"preserve_thinking": preserve}
    if effort is not None:
        variables["enable_thinking"] = effort != "none"
        if effort != "none":
            variables["reasoning_effort"] = EFFORTS[effort]
    if enable_thinking is not None:
        variables["enable_thinking"] = enable_thinking
    for key, value in kwargs.items():
        if key in RESERVED:
            raise RequestError(f"chat_template_kwargs may not hold {key!r}; it has a field of its own.",
                               "chat_template_kwargs")
        variables[key] = value
    if "enable_thinking" in kwargs:
        boolean("chat_template_kwargs.enable_thinking", kwargs["enable_thinking"])
    return variables
