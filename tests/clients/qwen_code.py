"""Qwen Code: `qwen -p`, continued with -c; Chat Completions. Its memory asks a question of its own after an answer."""
from .agents import COMMAND, Ask, agent
from .place import Place
from .report import Report
from .served import Served


def setup(place: Place, server: Served, report: Report) -> Ask:
    bins = place.npm("@qwen-code/qwen-code", "node@22")
    # it takes a proxy for loopback too
    direct = {name: "" for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")}
    run = lambda *words, expect=0: place.run(bins, "qwen", *words, expect=expect, OPENAI_BASE_URL=server.url + "/v1",
                                             OPENAI_API_KEY="any", OPENAI_MODEL="nano", **direct)
    report.version = run("--version").out.strip()
    return lambda words, again, expect: run("--auth-type", "openai", "--yolo", *["-c"] * again, "-p", words, expect=expect)


QWEN = agent("qwen-code", setup, str, "maximum context length is 8192 tokens", "run_shell_command",
             command=COMMAND, is_background=False)
