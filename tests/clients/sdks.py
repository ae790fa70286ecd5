"""Python SDKs: a script of talks/ runs under the interpreter that has the SDK, and tells of each turn as it goes."""
import json
import subprocess
from pathlib import Path

from .client import Client
from .place import Failed, Place
from .report import Report
from .served import Served

TALKS = Path(__file__).with_name("talks")


def talk(python: str, script: str, server: Served, report: Report, environment: dict[str, str]) -> None:
    """Run talks/`script` and count its turns. Failed if it ends before its last one or says something else."""
    process = subprocess.Popen([python, str(TALKS / script), server.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env=environment)
    try:
        report.version = process.stdout.readline().strip()
        for line in process.stdout:
            if not line.startswith("{"):        # what the SDK itself has to say
                continue
            told = json.loads(line)
            if "end" in told:
                return
            report.turn(server, told["did"], told["said"], told["wanted"], told["cached"])
            process.stdin.write("\n")
            process.stdin.flush()
        raise Failed(f"{script} ended early:\n{process.stderr.read()[-3000:]}")
    finally:
        process.kill()
        process.communicate()


def sdk(name: str, script: str, *packages: str) -> Client:
    def converse(place: Place, server: Served, report: Report) -> None:
        bins = place.pip(*packages)
        talk(str(bins / "python"), script, server, report, place.environment(bins, {}))
    return Client(name, converse)


OPENAI = sdk("openai", "openai_talk.py", "openai")
ANTHROPIC = sdk("anthropic", "anthropic_talk.py", "anthropic")
LANGCHAIN = sdk("langchain-openai", "langchain_talk.py", "langchain-openai")
LITELLM = sdk("litellm", "litellm_talk.py", "litellm")
