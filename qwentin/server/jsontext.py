"""JSON text of values and of the insides of strings, always valid and always encodable. Proven by tests/test_tooljson.py."""
import json
import math
import re
from json.encoder import encode_basestring

LITERALS = {"true": "true", "false": "false", "null": "null", "none": "null"}     # Python's too, in any case
NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,3999})(?:\.\d{1,999})?(?:[eE][+-]?\d{1,9})?", re.ASCII)
SURROGATE = re.compile("[\ud800-\udfff]")


def encodable(text: str) -> str:
    """JSON text with lone surrogates as escapes: UTF-8 has no bytes for them."""
    return SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def dumps(value) -> str:
    return encodable(json.dumps(value, ensure_ascii=False))


def escape(text: str) -> str:
    """The inside of a JSON string. Any cut of a text escapes to the same pieces."""
    return encodable(encode_basestring(text))[1:-1]


def is_number(word: str) -> bool:
    """JSON's grammar, and a value that a float or an int of Python can hold."""
    return NUMBER.fullmatch(word) is not None and math.isfinite(float(word))
