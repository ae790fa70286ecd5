"""Codex CLI: `codex exec`, continued with `resume --last`; the Responses dialect."""
import json

from .agents import COMMAND, FIRST, LAST, TOLD, TOOL, WINDOW, rules
from .client import Client
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


def converse(place: Place, server: Served, report: Report) -> None:
    bins = place.npm("@openai/codex")
    (place.home / ".codex").mkdir()
    (place.home / ".codex" / "config.toml").write_text(CONFIG.format(window=WINDOW, url=server.url))
    run = lambda *words: place.run(bins, "codex", *words, LOCAL_KEY="any").out
    report.version = run("--version").split()[-1]
    # its sandbox wants namespaces of the kernel that a container does not give
    open_door = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
    report.turn(server, "a question", said(run("exec", *open_door, FIRST)))
    resume = lambda words: said(run("exec", "resume", "--last", *open_door, words))
    report.turn(server, "exec_command is called and its output told", resume(TOOL), TOLD)
    report.turn(server, "a question", resume(LAST))


CODEX = Client("codex", converse, WINDOW, rules("exec_command", cmd=COMMAND))
