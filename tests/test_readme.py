"""README: its commands are what CI runs, its example is what the server answers, its table is the options."""
import argparse
import json
import re
from pathlib import Path

from http_client import call
from qwentin.config import add_options

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def block(heading):
    """The first fenced block under a heading."""
    return re.search(rf"^## {heading}\n```\w*\n(.*?)^```$", README, re.M | re.S).group(1)


def options_table():
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser)
    rows = [f"| `{a.option_strings[0]} {a.metavar}` | {a.help} |" for a in parser._actions]
    return "\n".join(["| option | meaning |", "|---|---|", *rows])


def test_options_table_is_generated():
    assert options_table() in README, "paste this into README.md:\n" + options_table()


def test_commands_are_one_line_each():
    for heading in ("Install and serve", "Install and test"):
        assert len(block(heading).strip().splitlines()) == 1
    assert "'.[test]'" in block("Install and test") and "qwentin.server" in block("Install and serve")


def test_curl_example_gets_the_answer_printed_below_it(server):
    body = json.loads(re.search(r"-d '(\{.*?\})'\n", README).group(1))
    path = re.search(r"curl http://127.0.0.1:8000(\S+)", README).group(1)
    message = call(server.url, path, body).json["choices"][0]["message"]
    assert f"`content` is `{message['content']}`" in README and message["reasoning_content"]


def test_the_tree_names_what_exists():
    listed = re.search(r"^## The tree\n```\n(.*?)^```$", README, re.M | re.S).group(1)
    for name in re.findall(r"\b[a-z_]+\.py\b", listed):
        assert list((ROOT / "qwentin").rglob(name)) or list((ROOT / "tests").glob(name)), name
