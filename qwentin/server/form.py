"""What an answer must be: the fields that clients ask for structured output with -> the source of one grammar.

    Chat, Completions   response_format {"type": "json_object"}
                        response_format {"type": "json_schema", "json_schema": {"schema": ..., "strict": ...}}
                        structured_outputs {"json" | "json_object" | "regex" | "choice" | "grammar": ...}   as in vLLM
                        guided_json, guided_regex, guided_choice, guided_grammar                            its older names
    Responses           text.format {"type": "json_object"} | {"type": "json_schema", "schema", "strict"}
    Messages            output_config.format, output_format {"type": "json_schema", "schema"}

A schema that cannot be compiled is refused with the field's name. Keywords of JSON Schema that a grammar cannot enforce
(uniqueItems, not, ...) are refused if the request is strict; otherwise they are left out, with a line in the log. A
`grammar` is Lark, GBNF or EBNF. Proven by tests/test_chat.py (refusals) and tests/test_structured_output.py.
"""
import json
from dataclasses import dataclass

from ..constraint import choice, free_grammar, json_schema, regex
from ..errors import RequestError
from .fields import anything, boolean, listing, mapping, optional, refuse, string

MOST_CHOICES = 4096
MOST_TEXT = 2**16           # characters of a pattern or a grammar that a person or a program wrote


@dataclass(frozen=True)
class Form:
    """source: what constraint.Grammars compiles. field: whom to name in a refusal."""
    source: str
    field: str


@dataclass(frozen=True)
class Structured:
    """The fields of the two older OpenAI routes."""
    response_format: dict | None = optional(mapping)
    structured_outputs: dict | None = optional(mapping)
    guided_json: str | dict | None = optional(anything)
    guided_regex: str | None = optional(string)
    guided_choice: list | None = optional(listing)
    guided_grammar: str | None = optional(string)

    def form(self) -> Form | None:
        """What they ask for together. RequestError if that is two things."""
        found = [format_of("response_format", self.response_format)] if self.response_format else []
        given = {name: value for name, value in (self.structured_outputs or {}).items() if value is not None}
        found += [MAKERS[kind](f"structured_outputs.{kind}", given[kind]) for kind in MAKERS if kind in given]
        for kind in MAKERS:
            value = getattr(self, f"guided_{kind}", None)
            if value is not None:
                found.append(MAKERS[kind](f"guided_{kind}", value))
        found = [form for form in found if form is not None]
        if len(found) > 1:
            raise RequestError(f"{found[0].field} and {found[1].field} both say what the output must be; one was wanted.",
                               found[1].field)
        return found[0] if found else None


def format_of(here: str, value: dict | None) -> Form | None:
    """response_format, text.format or output_config.format; None for plain text."""
    kind = mapping(here, value or {}).get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return any_object(here, True)
    if kind != "json_schema":
        refuse(f"{here}.type", kind, "one of text, json_object, json_schema", "unsupported_value")
    nested = value.get("json_schema")
    where, inner = (here, value) if nested is None else (f"{here}.json_schema", mapping(f"{here}.json_schema", nested))
    strict = boolean(f"{where}.strict", inner.get("strict") or False)
    if inner.get("schema") is None:
        raise RequestError(f"{where}.schema is missing; json_schema needs one.", f"{where}.schema",
                           "missing_required_parameter")
    return schema_form(f"{where}.schema", inner["schema"], strict)


def schema_form(here: str, schema, strict: bool = False) -> Form:
    """JSON that fits a schema."""
    return made(here, json_schema, mapping(here, {} if schema is True else schema), not strict)


def json_form(here: str, value) -> Form:
    """vLLM takes a schema, or its JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RequestError(f"{here} is not JSON: {error}.", here) from None
    return schema_form(here, value)


def any_object(here: str, value) -> Form | None:
    return Form(json_schema({"type": "object"}), here) if boolean(here, value) else None


def regex_form(here: str, value) -> Form:
    return made(here, regex, written(here, value))


def choice_form(here: str, value) -> Form:
    texts = [string(f"{here}[{i}]", text) for i, text in enumerate(listing(here, value))]
    if not 1 <= len(texts) <= MOST_CHOICES:
        raise RequestError(f"{here} holds {len(texts)} texts; 1 to {MOST_CHOICES} were wanted.", here)
    return made(here, choice, texts)


def grammar_form(here: str, value) -> Form:
    return made(here, free_grammar, written(here, value))


def written(here: str, value) -> str:
    if len(string(here, value)) > MOST_TEXT:
        raise RequestError(f"{here} has {len(value)} characters; {MOST_TEXT} can be used at most.", here)
    return value


def made(here: str, make, *arguments) -> Form:
    """The form of the source that `make` makes. Raises RequestError naming the field if it makes none."""
    try:
        return Form(make(*arguments), here)
    except ValueError as error:
        why = " ".join(str(error).split())[:300].rstrip(". ")
        raise RequestError(f"{here} cannot be used: {why}.", here) from None


MAKERS = {"json": json_form, "json_object": any_object, "regex": regex_form, "choice": choice_form, "grammar": grammar_form}
