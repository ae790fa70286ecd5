"""The Python clients of tests/clients, each through its whole conversation with nano: texts, tools, no refusal, and from the
second turn on the server computes no more than what is new, or goes on from the last place that the template keeps."""
import shutil
import sys
from pathlib import Path

import pytest

from clients import llm_cli
from clients.place import Place
from clients.report import Report
from clients.sdks import talk
from clients.served import Served


@pytest.fixture
def counted(server):
    """The shared server with its counters read up to here."""
    found = Served(server.url, server.process, server.log)
    found.since("before")
    return found


@pytest.mark.parametrize("script, turns", [("openai_talk.py", 10), ("anthropic_talk.py", 5), ("langchain_talk.py", 5),
                                           ("litellm_talk.py", 8)])
def test_sdk(script, turns, counted, tmp_path):
    report = Report(script)
    place = Place(script, tmp_path)
    talk(sys.executable, script, counted, report, place.environment(Path(sys.executable).parent, {}))
    assert report.version[0].isdigit() and len(report.turns) == turns
    for turn in report.turns:
        assert turn.requests == 1 and turn.client_cached in (turn.cached, None)
    # behind a tool's result only what came since is computed; a new question drops the thoughts before it
    result, first, second = report.turns[1:4]
    assert result.prompt - result.cached < 60
    assert min(first.cached, second.cached) >= 128 and second.prompt - second.cached < 60


def test_llm(counted, tmp_path, monkeypatch):
    report = Report("llm")
    place = Place("llm", tmp_path)
    monkeypatch.setattr(place, "pip", lambda *packages: Path(sys.executable).parent)
    assert shutil.which("llm", path=str(Path(sys.executable).parent)), "the test extra installs it"
    llm_cli.converse(place, counted, report)
    assert len(report.turns) == 4 and all(turn.cached > 30 for turn in report.turns[1:])
