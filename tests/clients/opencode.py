"""opencode: `opencode run`, continued with -c; Chat Completions through @ai-sdk/openai-compatible."""
import json

from .agents import COMMAND, FIRST, LAST, TOLD, TOOL, WINDOW, rules
from .client import Client
from .place import Place
from .report import Report
from .served import Served


def said(out: str) -> str:
    """The text parts of `--format json`."""
    events = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return "\n".join(e["part"]["text"] for e in events if e["type"] == "text")


def converse(place: Place, server: Served, report: Report) -> None:
    bins = place.npm("opencode-ai")
    model = {"name": "nano", "limit": {"context": WINDOW, "output": 4096}, "reasoning": True, "tool_call": True,
             "interleaved": {"field": "reasoning_content"}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": server.url + "/v1", "apiKey": "any"},
                "models": {"nano": model}}
    (place.work / "opencode.json").write_text(json.dumps({"model": "local/nano", "provider": {"local": provider}}))
    run = lambda *words: place.run(bins, "opencode", *words, OPENCODE_DISABLE_MODELS_FETCH="1",
                                   OPENCODE_DISABLE_AUTOUPDATE="1").out
    report.version = run("--version").strip()
    ask = lambda *words: said(run("run", "--format", "json", *words))
    report.turn(server, "a question, and the session's title beside it", ask(FIRST))
    report.turn(server, "bash is called and its output told", ask("-c", TOOL), TOLD)
    report.turn(server, "a question", ask("-c", LAST))


OPENCODE = Client("opencode", converse, WINDOW, rules("bash", command=COMMAND, description="the led command"))
