"""Messages to prompt text: the checkpoint's own chat template, rendered in jinja2's sandbox as transformers does.

Proven by tests/test_chat_template.py.
"""
import datetime
import json
from pathlib import Path

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import ConfigError, RequestError


class ChatTemplate:
    """The template of a checkpoint directory: chat_template.jinja, or tokenizer_config.json's "chat_template".

    text is the template's source, "" if the checkpoint has none: then render() refuses.
    `defaults` are variables for whoever does not say otherwise (enable_thinking, reasoning_effort, ...).
    """

    def __init__(self, directory, special_tokens: dict[str, str | None], defaults: dict | None = None):
        self.text = read_template(Path(directory))
        self.variables = {name: value or "" for name, value in special_tokens.items()} | (defaults or {})
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self.template = environment.from_string(self.text)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template of {directory} does not parse: {error}.") from None

    def render(self, messages: list[dict], tools: list | None = None, add_generation_prompt: bool = True,
               **variables) -> str:
        """The prompt text. `variables` reach the template as they are (enable_thinking, reasoning_effort, ...).

        Raises RequestError when the checkpoint has no template, or when the template refuses the messages.
        """
        if not self.text:
            raise RequestError("this checkpoint has no chat template; use /v1/completions.", "messages")
        try:
            return self.template.render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt,
                                        **{**self.variables, **variables})
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}", "messages") from None


def read_template(directory: Path) -> str:
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    config = directory / "tokenizer_config.json"
    value = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.exists() else None
    if isinstance(value, list):         # named templates: the one for plain chat
        value = next((entry["template"] for entry in value if entry.get("name") == "default"), None)
    return value or ""


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """JSON as the templates expect it: jinja2's own filter would escape <, > and &."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message):
    raise jinja2.TemplateError(message)
