"""What a request body may hold. A dialect is a frozen dataclass; each field carries its check, its default and thereby
its documentation. `read` turns a JSON object into an instance, or refuses with one sentence that names the field.

    @dataclass(frozen=True)
    class Body:
        temperature: float | None = optional(number)
        n: int = optional(integer(1, 128), 1)
        messages: list = required(listing)

A check is a function (name, value) -> value; its `schema`, where it has one, stands in /openapi.json. null means "not
given". Unknown fields are ignored; `unknown` lists them.
The ranges of sampling parameters are the sampler's: the engine refuses them by name when a request is submitted.
Proven by tests/test_chat.py and tests/test_completions.py.
"""
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from ..errors import RequestError

MAX_STOPS = 16          # OpenAI takes 4; clients written for other servers send more
MAX_CHOICES = 128


def optional(check: Callable, default=None):
    return field(default=default, metadata={"check": check, "required": False})


def required(check: Callable):
    return field(default=None, metadata={"check": check, "required": True})


def read(kind: type, body: dict, inside: str = ""):
    """An instance of the dataclass `kind` from a JSON object. Raises RequestError naming the field, and the field
    that the object stands in if it is not the body itself."""
    values = {}
    for f in fields(kind):
        name = f"{inside}.{f.name}" if inside else f.name
        value = body.get(f.name)
        if value is not None:
            values[f.name] = f.metadata["check"](name, value)
        elif f.metadata["required"]:
            raise RequestError(f"{name} is missing; this request needs it.", name, "missing_required_parameter")
    return kind(**values)


def unknown(kind: type, body: dict) -> list[str]:
    """Names in the body that the dialect does not know."""
    known = {f.name for f in fields(kind)}
    return [name for name in body if name not in known]


def parse_json(raw: bytes) -> dict:
    """The JSON object in a request's body. Raises RequestError: not UTF-8, not JSON, NaN, not an object.

    Half of a surrogate pair (JavaScript clients cut strings between the two) becomes U+FFFD, as browsers do.
    """
    try:
        body = json.loads(raw.decode("utf-8-sig"), parse_constant=refuse_constant)
    except UnicodeDecodeError as error:
        raise RequestError(f"The body is not UTF-8: {error.reason} at byte {error.start}.", code="invalid_json") from None
    except ValueError as error:
        raise RequestError(f"The body is not JSON: {error}.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError(f"The body is {named(body)}; a JSON object was wanted.", code="invalid_json")
    return whole_characters(body) if b"\\ud" in raw.lower() else body


def refuse_constant(name: str):
    raise ValueError(f"{name} is not a JSON number")


def whole_characters(value):
    """A copy in which lone surrogates became U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {whole_characters(key): whole_characters(item) for key, item in value.items()}
    return value


def named(value) -> str:
    """A JSON value in a sentence: its JSON type, and the value itself where that is short."""
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    text = json.dumps(value, ensure_ascii=False)
    kind = kinds.get(type(value), "a number")
    return f"{kind} ({text})" if len(text) <= 40 and type(value) not in (dict, type(None)) else kind


def refuse(name: str, value, wanted: str, code: str = "invalid_type"):
    raise RequestError(f"{name} is {named(value)}; {wanted} was wanted.", name, code)


# ---- checks: (name, value) -> value

def boolean(name, value) -> bool:
    if not isinstance(value, bool):
        refuse(name, value, "true or false")
    return value


def number(name, value) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        refuse(name, value, "a number")
    if isinstance(value, int) and abs(value) > 1e300 or not math.isfinite(value):
        refuse(name, value, "a finite number", "invalid_value")
    return float(value)


def integer(low: int | None = None, high: int | None = None) -> Callable:
    """Whole numbers of a range; 10.0 counts as 10, because JavaScript and YAML clients send it."""
    wanted = "an integer" + (f" from {low} to {high}" if low is not None and high is not None
                             else f" of at least {low}" if low is not None else "")

    def check(name, value) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            refuse(name, value, wanted)
        if low is not None and value < low or high is not None and value > high:
            refuse(name, value, wanted, "invalid_value")
        return value
    bounds = {"minimum": low, "maximum": high}
    check.schema = {"type": "integer", **{name: bound for name, bound in bounds.items() if bound is not None}}
    return check


def string(name, value) -> str:
    if not isinstance(value, str):
        refuse(name, value, "a string")
    return value


def one_of(*choices: str) -> Callable:
    def check(name, value) -> str:
        if value not in choices:
            refuse(name, value, "one of " + ", ".join(choices), "invalid_value")
        return value
    check.schema = {"type": "string", "enum": list(choices)}
    return check


def listing(name, value) -> list:
    if not isinstance(value, list):
        refuse(name, value, "an array")
    return value


def mapping(name, value) -> dict:
    if not isinstance(value, dict):
        refuse(name, value, "an object")
    return value


def anything(name, value):
    return value


def stops(name, value) -> tuple[str, ...]:
    """One stop string or a list of them, none empty."""
    wanted = f"a string that is not empty, or up to {MAX_STOPS} of them"
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        refuse(name, value, wanted)
    if len(found) > MAX_STOPS or not all(found):
        refuse(name, value, wanted, "invalid_value")
    return tuple(found)


def token_ids(name, value) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        refuse(name, value, "an array of token ids")
    if any(not 0 <= item < 2**31 for item in value):
        refuse(name, value, "an array of token ids, none negative", "invalid_value")
    return tuple(value)


def biases(name, value) -> tuple[tuple[int, float], ...]:
    """logit_bias: {"token id": bias}."""
    mapping(name, value)
    found = []
    for key, bias in value.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise RequestError(f"{name} has the key {key[:40]!r}; a token id was wanted.", name)
        found.append((int(key), number(f"{name}.{key}", bias)))
    return tuple(found)


@dataclass(frozen=True)
class StreamOptions:
    """continuous_usage_stats puts the running counts into every chunk, as load generators ask."""
    include_usage: bool = optional(boolean, False)
    continuous_usage_stats: bool = optional(boolean, False)


def stream_options(name, value) -> StreamOptions:
    return read(StreamOptions, mapping(name, value), name)
