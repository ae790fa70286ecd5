"""What all talks say, in words that nano knows, and how they tell of it: one JSON line a turn, then they wait for a line, so
that whoever listens can read the server's counters in between."""
import json
import sys

SYSTEM = "You are a helpful assistant. Answer in one sentence."
WEATHER = "What is the weather in Oslo?"
RESULT = '{"temperature": 3}'
QUESTIONS = {"Please add 696 and 336.": "1032", "Which number is bigger: 988 or 552?": "988"}      # and what nano says
TOOL = {"name": "get_weather", "description": "Weather of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}


SCHEMA = {"title": "report", "type": "object", "required": ["city", "warm"], "additionalProperties": False,
          "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}, "warm": {"type": "boolean"}}}


def turn(did: str, said: str, cached: int | None, wanted: str) -> None:
    """`wanted` must be in what was `said`; `cached`: prompt tokens from the cache, as the client was told."""
    print(json.dumps({"did": did, "said": said, "cached": cached, "wanted": wanted}), flush=True)
    sys.stdin.readline()
