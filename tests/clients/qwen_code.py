"""Qwen Code: `qwen -p`, continued with -c; Chat Completions."""
from .agents import COMMAND, FIRST, LAST, TOLD, TOOL, WINDOW, rules
from .client import Client
from .place import Place
from .report import Report
from .served import Served


def converse(place: Place, server: Served, report: Report) -> None:
    bins = place.npm("@qwen-code/qwen-code", "node@22")
    # it takes a proxy for loopback too
    run = lambda *words: place.run(bins, "qwen", *words, OPENAI_BASE_URL=server.url + "/v1", OPENAI_API_KEY="any",
                                   OPENAI_MODEL="nano", HTTP_PROXY="", HTTPS_PROXY="", http_proxy="", https_proxy="").out
    report.version = run("--version").strip()
    ask = lambda *words: run("--auth-type", "openai", "--yolo", *words)
    report.turn(server, "a question, and its memory's request", ask("-p", FIRST))
    report.turn(server, "run_shell_command is called and its output told", ask("-c", "-p", TOOL), TOLD)
    report.turn(server, "a question", ask("-c", "-p", LAST))


QWEN = Client("qwen-code", converse, WINDOW, rules("run_shell_command", command=COMMAND, is_background=False))
