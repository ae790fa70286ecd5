"""llm: the command line of that name, a conversation continued with -c, and a Python function as its tool."""
import json

from .client import Client
from .place import Place
from .report import Report
from .served import Served

FUNCTION = '''
def get_weather(city: str) -> str:
    "Weather of a city"
    return '{"temperature": 3}'
'''


def converse(place: Place, server: Served, report: Report) -> None:
    bins = place.pip("llm")
    user = place.home / "llm"
    user.mkdir()
    (user / "extra-openai-models.yaml").write_text(json.dumps([{
        "model_id": "nano", "model_name": "any", "api_base": server.url + "/v1", "supports_tools": True}]))
    ask = lambda *words: place.run(bins, "llm", *words, LLM_USER_PATH=str(user), OPENAI_API_KEY="any")
    report.version = ask("--version").out.split()[-1]
    system = ["-s", "You are a helpful assistant. Answer in one sentence.", "-o", "temperature", "0"]
    report.turn(server, "a question, streamed", ask("-m", "nano", *system, "Please add 696 and 336.").out, "1032")
    report.turn(server, "the next one, -c", ask("-c", "-o", "temperature", "0", "Which number is bigger: 988 or 552?").out,
                "988")
    report.turn(server, "the next one, whole",
                ask("-c", "--no-stream", "-o", "temperature", "0", "Please add 12 and 30.").out, "42")
    # it does not send the thought back, and without it nano does not know what to do with a result
    tooled = ask("--functions", FUNCTION, "--td", "-m", "nano", *system, "-o", "max_tokens", "60",
                 "What is the weather in Oslo?")
    called = tooled.out + tooled.err
    report.turn(server, "a tool is called and its result sent back", called, "get_weather({'city': 'Oslo'})")


LLM = Client("llm", converse)
