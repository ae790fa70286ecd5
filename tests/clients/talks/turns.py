"""What all talks say, in words that nano knows, and how they tell of it: one JSON line a turn, then they wait for a line, so
that whoever listens can read the server's counters in between."""
import json
import sys

SYSTEM = "You are a helpful assistant. Answer in one sentence."
WEATHER = "What is the weather in Oslo?"
RESULT = '{"temperature": 3}'
QUESTIONS = ["Please add 696 and 336.", "Which number is bigger: 988 or 552?"]
TOOL = {"name": "get_weather", "description": "Weather of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}


def turn(did: str, said: str, cached: int | None) -> None:
    print(json.dumps({"did": did, "said": said, "cached": cached}), flush=True)
    sys.stdin.readline()
