"""`python -m qwentin chat`: what it prints, dims, remembers and refuses; over a scripted engine, and once for real."""
import argparse
import io
import subprocess
import sys

import pytest

from fake_engine import FakeEngine, pieces
from qwentin.commands import chat
from qwentin.request import Finish, Usage

REPLY = "I greet 😀.\n</think>\n\nHello 漢字!"


class Screen(io.StringIO):
    def __init__(self, tty):
        super().__init__()
        self.tty = tty

    def isatty(self):
        return self.tty


def talk(script, *options, tty=False, **engine):
    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    engine = FakeEngine(script, **engine)
    engine.start()
    return chat.Chat(engine, parser.parse_args(options), Screen(tty))


def test_a_turn_on_paper():
    talked = talk(pieces(REPLY))
    assert talked.turn("Hi")
    thought, rest = talked.out.getvalue().split("\n\n")
    assert thought == "I greet 😀." and rest.startswith("Hello 漢字!\n[prefill ")
    assert "\x1b" not in talked.out.getvalue() and rest.count("\n") == 2


def test_the_thought_is_dimmed_on_a_screen():
    talked = talk([[REPLY.encode()]], tty=True)
    talked.turn("Hi")
    said = talked.out.getvalue()
    assert "\x1b[2mI greet 😀.\x1b[0m" in said and "\x1b[0mHello 漢字!" in said


def test_history_and_forgetting():
    talked = talk(pieces(REPLY), "--system", "Be brief.")
    talked.turn("Hi")
    talked.turn("And?")
    assert talked.history == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello 漢字!", "reasoning_content": "I greet 😀."},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Hello 漢字!", "reasoning_content": "I greet 😀."}]
    assert "Hello" in bytes(talked.engine.requests[1].prompt.tolist()).decode()
    talked.forget()
    assert talked.history == [{"role": "system", "content": "Be brief."}]


def test_endings_are_said_but_not_remembered():
    talked = talk([[b"</think>half"], Finish(0, "error", "numbers that are not finite")])
    assert talked.turn("Hi") and "half\n[failed: numbers that are not finite]" in talked.out.getvalue()
    assert talked.history[-1]["content"] == "half"
    talked = talk(pieces("</think>long"), "--max-tokens", "10")
    assert talked.turn("Hi") and "lo\n[the limit is reached]" in talked.out.getvalue()


def test_options_reach_the_engine():
    talked = talk(pieces("x"), "--temperature", "0", "--seed", "4", "--max-tokens", "3", "--no-thinking")
    talked.turn("Hi")
    request, = talked.engine.requests
    assert (request.sampling.temperature, request.sampling.seed, request.max_tokens) == (0, 4, 3)
    assert bytes(request.prompt.tolist()).endswith(b"</think>\n\n")


def test_a_refused_turn_leaves_the_conversation_alone(capsys):
    talked = talk(pieces("x"), context=300)
    talked.turn("Hi")
    before = list(talked.history)
    assert not talked.turn("x" * 300)
    assert "maximum context length is 300" in capsys.readouterr().err and talked.history == before


def test_ctrl_c_stops_the_reply(monkeypatch):
    talked = talk([[b"x"]] * 10**6, "--no-thinking", step_s=0.001)

    class Interrupted(chat.queue.SimpleQueue):
        count = 0

        def get(self):
            self.count += 1
            if self.count == 5:
                raise KeyboardInterrupt
            return super().get()
    monkeypatch.setattr(chat.queue, "SimpleQueue", Interrupted)
    assert talked.turn("Hi")
    assert talked.out.getvalue().split("\n[prefill")[0].endswith("x\n[stopped]")
    assert set(talked.history[-1]["content"]) == {"x"} and not talked.engine.jobs


def test_rates():
    usage = Usage(prompt_tokens=110, completion_tokens=21, cached_tokens=10, prefill_s=0.1, decode_s=0.2)
    assert chat.rates(usage) == "[prefill 100 tokens (10 more from the cache), 1000 tok/s; decode 21 tokens, 100 tok/s]"
    assert "0 tok/s]" in chat.rates(Usage(completion_tokens=1))


def command(*arguments, typed=""):
    return subprocess.run([sys.executable, "-m", "qwentin", "chat", "--threads", "1", *arguments], input=typed,
                          capture_output=True, text=True, timeout=120)


def test_the_real_command():
    done = command("--temperature", "0", typed="Please add 6 and 3.\n\n/new\nHello!\n/quit\nnever read\n")
    assert done.returncode == 0 and done.stderr == ""
    assert "6 + 3 = 9\n[prefill 18 tokens, " in done.stdout
    assert "How can I help you today?\n[prefill 12 tokens, " in done.stdout
    assert done.stdout.count("[prefill ") == 2 and "\x1b" not in done.stdout


@pytest.mark.parametrize("arguments, said", [(["--temperature", "5", "Hi"], "temperature"),
                                             (["--model", "/no/such", "Hi"], "--model")])
def test_the_real_command_refuses(arguments, said):
    done = command(*arguments)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
