"""How much a request thinks: who has the last word, budgets and loops in the embedded model, and what is told of it."""
import json
import time

import pytest

from conftest import start_server
from fake_engine import FakeEngine
from http_client import call
from qwentin import nano
from qwentin.chat_template import ChatTemplate
from qwentin.config import EngineConfig
from qwentin.server.chat import ChatReply
from qwentin.server.effort import template_variables
from qwentin.server.fields import read
from qwentin.server.messages import MessagesReply
from qwentin.server.responses import ResponsesReply
from spoken import DIALECTS, ask

SUM = "Please add 696 and 336."
CHAT, RESPONSES, MESSAGES = ChatReply, ResponsesReply, MessagesReply
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}
BUDGET = {"thinking": {"type": "enabled", "budget_tokens": 7}}


def turn(dialect, body, **options):
    """The turn that a dialect makes of a body on a server with these options."""
    engine = FakeEngine([])
    engine.config = EngineConfig(**options)
    engine.chat_template = ChatTemplate(nano.DIRECTORY, {}, engine.config.template_defaults)
    base = {"input": "Hi"} if dialect is RESPONSES else {"messages": [{"role": "user", "content": "Hi"}]}
    return dialect(read(dialect.body_type, {**base, **body}), engine, "m").turn


@pytest.mark.parametrize("dialect, body, options, on", [
    (CHAT, {}, {}, True), (RESPONSES, {}, {}, True), (MESSAGES, {}, {}, False),             # nobody says anything
    (CHAT, {}, {"thinking": "off"}, False), (RESPONSES, {}, {"thinking": "off"}, False),    # the server
    (CHAT, {}, {"thinking": "on"}, True), (MESSAGES, {}, {"thinking": "on"}, False),        # its clients count on off
    (CHAT, {"reasoning_effort": "low"}, {"thinking": "off"}, True), (CHAT, {"reasoning_effort": "none"}, {}, False),
    (RESPONSES, {"reasoning": {"effort": "high"}}, {"thinking": "off"}, True),
    (RESPONSES, {"reasoning": {"effort": "none"}}, {"thinking": "on"}, False),
    (MESSAGES, {"thinking": {"type": "enabled"}}, {"thinking": "off"}, True),
    (MESSAGES, {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, {}, False),
    (CHAT, {**OFF, "reasoning_effort": "high"}, {}, False), (CHAT, {**ON, "reasoning_effort": "none"}, {}, True),
    (RESPONSES, {**OFF, "reasoning": {"effort": "high"}}, {}, False), (MESSAGES, {**OFF, **BUDGET}, {}, False),
    (MESSAGES, ON, {}, True),
    (CHAT, {**ON, "chat_template_kwargs": OFF}, {}, False), (CHAT, {**OFF, "chat_template_kwargs": ON}, {}, True),
    (RESPONSES, {**ON, "chat_template_kwargs": OFF}, {}, False),
    (MESSAGES, {**BUDGET, "chat_template_kwargs": OFF}, {}, False),
])
def test_C7_who_decides_whether(dialect, body, options, on):
    assert turn(dialect, body, **options).thinking is on


@pytest.mark.parametrize("dialect, body, options, effort", [
    (CHAT, {}, {}, None), (CHAT, {}, {"reasoning_effort": "low"}, "low"),
    (CHAT, {"reasoning_effort": "high"}, {"reasoning_effort": "low"}, "xhigh"),
    (CHAT, {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "medium"}}, {}, "medium"),
    (RESPONSES, {"reasoning": {"effort": "minimal"}}, {}, "low"),
    (MESSAGES, {**BUDGET, "output_config": {"effort": "max"}}, {"reasoning_effort": "low"}, "xhigh"),
    (CHAT, {"reasoning_effort": "xhigh", **OFF}, {}, None),
])
def test_who_decides_the_effort(dialect, body, options, effort):
    assert turn(dialect, body, **options).extras()["x_qwentin"]["reasoning_effort"] == effort


@pytest.mark.parametrize("dialect, body, options, budget", [
    (CHAT, {}, {}, None), (CHAT, {}, {"reasoning_budget": 90}, 90),
    (CHAT, {"thinking_budget": 5}, {"reasoning_budget": 90}, 5),
    (CHAT, {"thinking_token_budget": 3, "thinking_budget": 5}, {}, 3), (RESPONSES, {"thinking_budget": 0}, {}, 0),
    (MESSAGES, BUDGET, {"reasoning_budget": 90}, 7), (MESSAGES, {**BUDGET, "thinking_budget": 5}, {}, 5),
    (MESSAGES, {"thinking": {"type": "adaptive"}}, {"reasoning_budget": 90}, 90),
])
def test_who_decides_the_budget(dialect, body, options, budget):
    found = turn(dialect, body, **options)
    assert found.request.guide.budget == budget and found.request.guide.loop == 256
    assert found.extras()["x_qwentin"].get("thinking_budget") == budget


def test_no_thought_no_guide():
    assert turn(CHAT, {**OFF, "thinking_budget": 5}).request.guide is None
    assert "thinking_budget" not in turn(CHAT, {**OFF, "thinking_budget": 5}).extras()["x_qwentin"]


def test_preserve_thinking():
    assert template_variables({}, None, None, True) == {"preserve_thinking": True}
    assert template_variables({"preserve_thinking": False}, None, None, True) == {"preserve_thinking": False}
    assert turn(CHAT, {}, preserve_thinking="on").variables["preserve_thinking"] is True
    assert turn(MESSAGES, {"preserve_thinking": False}, preserve_thinking="on").variables["preserve_thinking"] is False
    assert "preserve_thinking" not in turn(CHAT, {}).variables


# ---- the embedded model

@pytest.mark.parametrize("dialect", DIALECTS)
def test_R10_the_resolved_effort_is_in_the_extras_and_in_the_log(server, dialect):
    said = ask(server, dialect, True, SUM, thinking=True, effort="xhigh", budget=77)
    assert said.extras["reasoning_effort"] == "xhigh" and said.extras["thinking"] is True
    assert said.extras["effort_in_template"] is False          # the embedded template knows no effort: this is told too
    assert said.extras["thinking_budget"] == 77
    line = json.dumps({"thinking": True, "reasoning_effort": "xhigh", "effort_in_template": False, "thinking_budget": 77})
    end = time.monotonic() + 30         # it is written when the reply is out
    while line[:-1] not in server.log_text():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_budget_closes_the_thought_and_there_is_an_answer(server, dialect, stream):
    before = counted(server, "closed_budget")
    free = ask(server, dialect, stream, SUM, thinking=True)
    said = ask(server, dialect, stream, SUM, thinking=True, budget=5)
    assert 0 < len(said.thought) < len(free.thought) and free.thought.startswith(said.thought)
    assert said.text and said.finish == "stop" and said.extras["thought_closed"] == ["budget"]
    assert "thought_closed" not in free.extras and counted(server, "closed_budget") == before + 1
    none = ask(server, dialect, stream, SUM, thinking=True, budget=0)
    assert none.thought == "" and none.text.startswith("696 + 336 = ") and none.finish == "stop"


def test_the_servers_defaults_and_a_loop(server):
    """A model that cannot close its thought goes round in circles; the shared server looks for 256 tokens of it."""
    body = {"messages": [{"role": "user", "content": SUM}], "temperature": 0, "max_tokens": 1000,
            "logit_bias": {"4095": -100}}           # </think>
    before = counted(server, "closed_loop")
    whole = call(server.url, "/v1/chat/completions", body).json
    assert whole["x_qwentin"]["thought_closed"] == ["loop"] and whole["choices"][0]["message"]["content"]
    assert counted(server, "closed_loop") == before + 1
    found = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 256 < found < 600
    other = start_server("--thinking=off", "--reasoning-budget=9", "--reasoning-loop=0", "--reasoning-effort=low")
    try:
        said = ask(other, "chat", False, SUM)
        assert said.thought == "" and said.text.startswith("696 + 336 = ")
        said = ask(other, "chat", False, SUM, effort="high")
        assert said.thought and said.extras["thinking_budget"] == 9 and said.extras["thought_closed"] == ["budget"]
        assert ask(other, "chat", False, SUM, thinking=True).extras["reasoning_effort"] == "low"
        longer = {**body, **ON, "thinking_budget": 2000, "max_tokens": found + 9}
        endless = call(other.url, "/v1/chat/completions", longer).json
        assert endless["choices"][0]["finish_reason"] == "length" and not endless["choices"][0]["message"]["content"]
    finally:
        assert other.stop() == 0


def counted(server, name) -> float:
    lines = call(server.url, "/metrics").raw.decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"qwentin_{name}_total ")))
