"""Codex CLI: `codex exec`, continued with `resume --last`; the Responses dialect."""
import json

from .agents import COMMAND, WINDOW, Ask, agent
from .place import Place
from .report import Report
from .served import Served

CONFIG = """model = "nano"
model_provider = "local"
model_context_window = {window}
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "LOCAL_KEY"
"""


def said(out: str) -> str:
    """The agent's messages of `--json`."""
    events = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return "\n".join(e["item"]["text"] for e in events
                     if e["type"] == "item.completed" and e["item"]["type"] == "agent_message")


def setup(place: Place, server: Served, report: Report) -> Ask:
    bins = place.npm("@openai/codex")
    (place.home / ".codex").mkdir(exist_ok=True)
    (place.home / ".codex" / "config.toml").write_text(CONFIG.format(window=WINDOW, url=server.url))
    run = lambda *words, expect=0: place.run(bins, "codex", *words, expect=expect, LOCAL_KEY="any")
    report.version = run("--version").out.split()[-1]
    # its sandbox wants namespaces of the kernel that a container does not give
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
    return lambda words, again, expect: run("exec", *["resume", "--last"] * again, *flags, words, expect=expect)


CODEX = agent("codex", setup, said, "ran out of room in the model's context window", "exec_command", cmd=COMMAND)
