"""aider: one file in a git repository, each message a run of its own that restores the chat; Chat Completions, no tools: it
edits files as the reply writes them."""
from .agents import FIRST, LAST, WINDOW
from .client import Client
from .place import Failed, Place
from .report import Report
from .served import Served

EDIT = "Make the led edit."
NEW = 'print("led-42")\n'
REPLY = f"Here it is.\n\ngreeting.py\n```\n{NEW}```\n"


def converse(place: Place, server: Served, report: Report) -> None:
    bins = place.pip("aider-chat")
    file = place.work / "greeting.py"
    file.write_text('print("hello")\n')
    who = ["-c", "user.name=n", "-c", "user.email=n@localhost"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        place.run(bins, "git", *words)
    run = lambda *words: place.run(bins, "aider", *words, OPENAI_API_BASE=server.url + "/v1", OPENAI_API_KEY="any").out
    report.version = run("--version").split()[-1]
    ask = lambda words: run("--model", "openai/nano", "--no-show-model-warnings", "--no-check-update", "--no-analytics",
                            "--no-pretty", "--yes-always", "--no-auto-commits", "--no-suggest-shell-commands",
                            "--restore-chat-history", "--message", words, "greeting.py")
    report.turn(server, "a question", ask(FIRST))
    report.turn(server, "a file is edited", ask(EDIT), "Applied edit to greeting.py")
    if file.read_text() != NEW:
        raise Failed(f"greeting.py holds {file.read_text()!r}")
    report.turn(server, "a question", ask(LAST))


AIDER = Client("aider", converse, WINDOW, ({"asked": EDIT, "say": REPLY},))
