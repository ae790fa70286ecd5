"""`python -m qwentin`: the dispatcher lists commands with examples, names near misses, maps errors to exit codes."""
import subprocess
import sys

import pytest

from qwentin.__main__ import build_parser, command_names, main


def run(*words):
    return subprocess.run([sys.executable, "-m", "qwentin", *words], capture_output=True, text=True)


def test_help_lists_every_command():
    done = run("--help")
    assert done.returncode == 0
    for name in command_names():
        assert name.replace("_", "-") in done.stdout
    assert "chat" in command_names()


@pytest.mark.parametrize("name", command_names())
def test_each_command_has_help_with_an_example(name):
    text = build_parser([name])._subparsers._group_actions[0].choices[name.replace("_", "-")].format_help()
    assert "example: " in text and len(text.splitlines()) > 4


def test_near_misses(capsys):
    assert main(["caht"]) == 2
    assert "did you mean chat?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["chat", "--modle", "x"])
    assert caught.value.code == 2 and "did you mean --model?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2


def test_an_unusable_model_is_one_sentence(capsys):
    assert main(["chat", "--model", "/no/such/place"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("qwentin: ") and "/no/such/place" in text and "Traceback" not in text
