"""opencode: `opencode run`, continued with -c; Chat Completions through @ai-sdk/openai-compatible. A new session asks for
its title beside the first answer."""
import json

from .agents import COMMAND, WINDOW, Ask, agent
from .place import Place
from .report import Report
from .served import Served


def said(out: str) -> str:
    """The text parts of `--format json`."""
    events = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return "\n".join(e["part"]["text"] for e in events if e["type"] == "text")


def setup(place: Place, server: Served, report: Report) -> Ask:
    bins = place.npm("opencode-ai")
    model = {"name": "nano", "limit": {"context": WINDOW, "output": 4096}, "reasoning": True, "tool_call": True,
             "interleaved": {"field": "reasoning_content"}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": server.url + "/v1", "apiKey": "any"},
                "models": {"nano": model}}
    # left to itself it summarises a conversation that does not fit again and again, if its instructions alone do not
    settings = {"model": "local/nano", "provider": {"local": provider}, "compaction": {"auto": False}}
    (place.work / "opencode.json").write_text(json.dumps(settings))
    run = lambda *words, expect=0: place.run(bins, "opencode", *words, expect=expect, OPENCODE_DISABLE_MODELS_FETCH="1",
                                             OPENCODE_DISABLE_AUTOUPDATE="1")
    report.version = run("--version").out.strip()
    return lambda words, again, expect: run("run", "--format", "json", *["-c"] * again, words, expect=expect)


OPENCODE = agent("opencode", setup, said, "ContextOverflowError", "bash", command=COMMAND, description="the led command")
