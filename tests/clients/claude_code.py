"""Claude Code: `claude -p`, continued with -c; the Messages dialect."""
import json

from .agents import COMMAND, Ask, agent
from .place import Place
from .report import Report
from .served import Served


def setup(place: Place, server: Served, report: Report) -> Ask:
    bins = place.npm("@anthropic-ai/claude-code", "node@22")
    run = lambda *words, expect=0: place.run(
        bins, "claude", *words, expect=expect, ANTHROPIC_BASE_URL=server.url, ANTHROPIC_AUTH_TOKEN="any",
        ANTHROPIC_MODEL="nano", ANTHROPIC_SMALL_FAST_MODEL="nano", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1")
    report.version = run("--version").out.split()[0]
    flags = ["-p", "--allowedTools", "Bash", "--output-format", "json"]
    return lambda words, again, expect: run(*flags, *["-c"] * again, words, expect=expect)


CLAUDE = agent("claude-code", setup, lambda out: json.loads(out)["result"], "Prompt is too long", "Bash",
               command=COMMAND, description="the led command")
