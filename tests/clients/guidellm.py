"""guidellm: a load of synthetic prompts over /v1/chat/completions, one stream and then four."""
import json

from .client import Client
from .place import Place
from .report import Report
from .served import NANO, Served

REQUESTS = 8


def converse(place: Place, server: Served, report: Report) -> None:
    bins = place.pip("guidellm")
    offline = dict(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    report.version = place.run(bins, "guidellm", "--version", **offline).out.split()[-1]

    def load(profile):
        out = place.work / "out.json"
        place.run(bins, "guidellm", "run", "--backend", f"kind=openai_http,target={server.url},model=nano",
                  "--tokenizer", f"kind=huggingface_auto,model={NANO}",
                  "--data", "kind=synthetic_text,prompt_tokens=200,output_tokens=24", "--profile", profile,
                  "--constraint", f"kind=max_requests,count={REQUESTS}", "--output", f"kind=json,path={out}",
                  "--disable-console-interactive", **offline)
        return json.loads(out.read_text())
    for did, profile in (("8 prompts, one at a time", "kind=synchronous"),
                         ("the same 8, four at a time", "kind=concurrent,streams=4")):
        totals = load(profile)["benchmarks"][0]["metrics"]["request_totals"]
        report.turn(server, did, f"{totals['successful']} of {totals['total']}", f"{REQUESTS} of {REQUESTS}")


GUIDELLM = Client("guidellm", converse)
