"""Claude Code: `claude -p`, continued with -c; the Messages dialect."""
import json

from .agents import COMMAND, FIRST, LAST, TOLD, TOOL, WINDOW, rules
from .client import Client
from .place import Failed, Place
from .report import Report
from .served import Served


def converse(place: Place, server: Served, report: Report) -> None:
    bins = place.npm("@anthropic-ai/claude-code", "node@22")
    run = lambda *words: place.run(
        bins, "claude", *words, ANTHROPIC_BASE_URL=server.url, ANTHROPIC_AUTH_TOKEN="any", ANTHROPIC_MODEL="nano",
        ANTHROPIC_SMALL_FAST_MODEL="nano", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", DISABLE_AUTOUPDATER="1").out
    report.version = run("--version").split()[0]

    def turn(did, wanted, *words):
        found = json.loads(run("-p", "--allowedTools", "Bash", "--output-format", "json", *words))
        if found["is_error"]:
            raise Failed(f"{did}: {found['result']}")
        usage = found["usage"]
        report.turn(server, did, found["result"], wanted, usage["cache_read_input_tokens"])
    turn("a question", "", FIRST)
    turn("Bash is called and its output told", TOLD, "-c", TOOL)
    turn("a question", "", "-c", LAST)


CLAUDE = Client("claude-code", converse, WINDOW, rules("Bash", command=COMMAND, description="the led command"))
