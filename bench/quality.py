"""What a weight format costs in quality: every format against the original checkpoint, teacher-forced and generating.

    python bench/quality.py                                     nano, all formats, its 120 conversations
    python bench/quality.py --model DIR --eval FILE --out DIR   any checkpoint; FILE has lines like tests/data/eval.jsonl
    python bench/quality.py --no-answers                        the teacher-forced part alone

Teacher-forced: both models read the same text (prompt and reference answer) and are compared at every position.

    KL           sum over the vocabulary of p log(p / q), p the original's distribution: mean, median, 99 %, 99.9 %, max
    top-1        how often both would choose the same token
    perplexity   of the format's own distribution on the text
    MTP          how often the format's draft head guesses the token that the format's main model would choose

Exact answers: generated greedily by the engine, 16 conversations at a time, and compared with the right answer. Writes
quality.md, quality.json and quality.png to --out; prints the table, then one JSON line.
"""
import argparse
import json
import queue
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from machine import describe
from qwentin import nano
from qwentin.chat_template import ChatTemplate
from qwentin.config import EngineConfig
from qwentin.engine import Engine
from qwentin.kvpool import pages_for
from qwentin.model.convert import prepare
from qwentin.model.cpu import CpuTower
from qwentin.model.weights import open_checkpoint
from qwentin.request import Delta, Done, GenerateRequest, SamplingParams
from qwentin.step import Rows, pack
from qwentin.tokenizer import Tokenizer

EVAL = Path(__file__).resolve().parents[1] / "tests" / "data" / "eval.jsonl"
# name -> convert's --weights and --embedding
FORMATS = {"fp8": ("fp8", "fp8"), "fp6": ("fp6", "fp6"), "fp4": ("fp4", "fp6"),
           "fp6, table fp8": ("fp6", "fp8"), "fp6, table bf16": ("fp6", "bf16"),
           "table fp8 alone": ("bf16", "fp8"), "table fp6 alone": ("bf16", "fp6")}
QUANTILES = {"median": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}


@dataclass(frozen=True)
class Case:
    """A conversation: what the model reads, and what it should say."""
    prompt: np.ndarray
    reference: np.ndarray
    answer: str | None
    tool_calls: list | None
    reference_text: str
    reference_exact: bool


def read_cases(directory, path, longest: int) -> list[Case]:
    """The conversations of `path` that are at most `longest` tokens with their reference answer."""
    tokenizer = Tokenizer(directory)
    template = ChatTemplate(directory, {n: tokenizer.special(n) for n in ("bos_token", "eos_token", "pad_token")})
    cases = []
    for line in Path(path).read_text().splitlines():
        e = json.loads(line)
        text = template.render(e["messages"], e["tools"], enable_thinking=e["enable_thinking"])
        case = Case(tokenizer.encode(text), np.array(e["reference_ids"], np.int32), e["answer"], e["tool_calls"],
                    e["reference_text"], e["reference_exact"])
        if len(case.prompt) + len(case.reference) <= longest:
            cases.append(case)
    return cases


# ---- teacher-forced

def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def read_text(tower: CpuTower, ids: np.ndarray) -> tuple[np.ndarray, float]:
    """Log-probabilities f64 [T, V] after each token, and the draft head's agreement with their maxima (NaN without)."""
    tower.clear_slot(0)
    pages = np.arange(pages_for(len(ids)), dtype=np.int32)
    out = tower.forward(pack([Rows(ids, 0, pages, 0, np.arange(len(ids)))], hidden=True))
    agreement = float("nan")
    if tower.mtp is not None and len(ids) > 2:
        pairs = len(ids) - 1
        guess = tower.forward_mtp(pack([Rows(ids[1:], 0, pages, 0, np.arange(pairs))]), out.hidden[:-1]).logits
        agreement = float((guess.argmax(-1) == out.logits[1:].argmax(-1)).mean())
    return log_softmax(out.logits), agreement


class Tally:
    """Position by position comparisons of one format, gathered over the texts."""

    def __init__(self):
        self.kl, self.same, self.nll, self.mtp, self.weights = [], [], [], [], []

    def add(self, ids: np.ndarray, p: np.ndarray, q: np.ndarray, agreement: float) -> None:
        self.kl.append((np.exp(p) * (p - q)).sum(-1))
        self.same.append(p.argmax(-1) == q.argmax(-1))
        self.nll.append(-q[np.arange(len(ids) - 1), ids[1:]])
        self.mtp.append(agreement)
        self.weights.append(len(ids))

    def summary(self) -> dict:
        kl = np.concatenate(self.kl)
        return {"positions": len(kl), "kl_mean": kl.mean(), **{f"kl_{k}": np.quantile(kl, q) for k, q in QUANTILES.items()},
                "top1": np.concatenate(self.same).mean(), "perplexity": np.exp(np.concatenate(self.nll).mean()),
                "mtp": np.average(self.mtp, weights=self.weights)}


def compare(reference, others: dict, cases: list[Case]) -> dict[str, dict]:
    """Each of `others` (name -> what CpuTower takes) against `reference`, and the reference against itself."""
    longest = max(len(case.prompt) + len(case.reference) for case in cases)
    towers = {name: CpuTower(checkpoint, pages_for(longest), 1) for name, checkpoint in
              {"original": reference, **others}.items()}
    tallies = {name: Tally() for name in towers}
    for case in cases:
        ids = np.concatenate([case.prompt, case.reference])
        p, agreement = read_text(towers["original"], ids)
        tallies["original"].add(ids, p, p, agreement)
        for name in others:
            tallies[name].add(ids, p, *read_text(towers[name], ids))
    return {name: {k: float(v) for k, v in tally.summary().items()} for name, tally in tallies.items()}


# ---- generating

def is_exact(case: Case, text: str) -> bool:
    """Is the generated text, its thought left out, the right answer or the right calls?"""
    answer = text.split("</think>")[-1].strip()
    if case.tool_calls is None:
        return answer == case.answer
    calls = []
    for name, body in re.findall(r"<function=(.*?)>\n(.*?)</function>", answer, re.S):
        found = re.findall(r"<parameter=(.*?)>\n(.*?)\n</parameter>", body, re.S)
        calls.append((name, {key: value for key, value in found}))
    as_text = lambda value: value if isinstance(value, str) else json.dumps(value)
    wanted = [(call["name"], {key: as_text(value) for key, value in call["arguments"].items()}) for call in case.tool_calls]
    return calls == wanted


def answers(directory, cases: list[Case], change=lambda tower: tower, **options) -> list[str]:
    """What the model of a directory says in each conversation, greedily; `change` is called with its tower first."""
    longest = max(len(case.prompt) + 2 * len(case.reference) + 256 for case in cases)
    engine = Engine.load(EngineConfig(model=str(directory), max_seqs=16, kv_tokens=16 * longest, max_model_len=longest,
                                      **options))
    change(engine.tower)
    engine.start()
    events = queue.Queue()
    for i, case in enumerate(cases):
        engine.submit(GenerateRequest(id=str(i), prompt=case.prompt, sampling=SamplingParams(temperature=0.0),
                                      max_tokens=2 * len(case.reference) + 256), lambda event, i=i: events.put((i, event)))
    texts, running = [""] * len(cases), len(cases)
    while running:
        i, event = events.get()
        texts[i] += event.text if isinstance(event, Delta) else ""
        running -= isinstance(event, Done)
    engine.stop()
    return texts


def exact(cases: list[Case], texts: list[str]) -> str:
    """How many are right."""
    return f"{sum(is_exact(case, text) for case, text in zip(cases, texts))}/{len(cases)}"


# ---- the report

COLUMNS = (("bits", "{:.2f}"), ("kl_mean", "{:.2e}"), ("kl_median", "{:.1e}"), ("kl_p99", "{:.1e}"), ("kl_p99.9", "{:.1e}"),
           ("kl_max", "{:.1e}"), ("top1", "{:.4f}"), ("perplexity", "{:.4f}"), ("mtp", "{:.4f}"), ("exact", "{}"))


def as_table(rows: dict[str, dict]) -> str:
    """Markdown."""
    lines = ["| format | " + " | ".join(name for name, _ in COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, row in rows.items():
        cells = [form.format(row[key]) if row.get(key) is not None else "" for key, form in COLUMNS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(rows: dict[str, dict], path: Path) -> None:
    """KL against size, from the median to the 99.9th percentile."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, row in rows.items():
        if row["kl_max"] > 0:
            axes.plot([row["bits"]] * 2, [max(row["kl_median"], 1e-9), row["kl_p99.9"]], color="0.7", zorder=1)
            axes.scatter(row["bits"], row["kl_mean"], zorder=2, label=f"{name}: {row['kl_mean']:.1e}")
    axes.set(yscale="log", xlabel="bits a parameter, scales included", ylabel="KL to the original (dot: mean; line: "
             "median to 99.9 %)", title="Weight formats")
    axes.grid(alpha=0.3)
    axes.legend(title="mean KL")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def bits(checkpoint) -> float:
    """Stored bits a parameter."""
    tensors = checkpoint.tensors.values()
    return 8 * sum(t.nbytes for t in tensors) / sum(int(np.prod(t.shape)) for t in tensors)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(nano.DIRECTORY), help="the original checkpoint (default: nano)")
    parser.add_argument("--eval", default=str(EVAL), help="conversations, one JSON object a line")
    parser.add_argument("--formats", help=f"some of: {'; '.join(FORMATS)} (separated by ;)")
    parser.add_argument("--longest", type=int, default=1200, help="leave longer conversations out of the teacher-forced "
                        "part (default: 1200 tokens)")
    parser.add_argument("--no-answers", action="store_true")
    parser.add_argument("--out", default="quality", help="folder for the table and the plot (default: quality)")
    options = parser.parse_args()
    chosen = [name.strip() for name in options.formats.split(";")] if options.formats else list(FORMATS)
    cases = read_cases(options.model, options.eval, options.longest)
    everyone = read_cases(options.model, options.eval, 1 << 30)
    assert all(is_exact(case, case.reference_text) == case.reference_exact for case in everyone), "the scorer is wrong"
    with tempfile.TemporaryDirectory() as temporary:
        directories = {"original": Path(options.model)}
        for name in chosen:
            directories[name] = Path(temporary) / name.replace(" ", "-").replace(",", "")
            prepare(options.model, directories[name], *FORMATS[name]).run()
        opened = {name: open_checkpoint(directory) for name, directory in directories.items()}
        rows = compare(opened["original"], {name: opened[name] for name in chosen}, cases)
        for name, directory in directories.items():
            rows[name]["bits"] = bits(opened[name])
            rows[name]["exact"] = None if options.no_answers else exact(everyone, answers(directory, everyone))
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "quality.md").write_text(as_table(rows))
    (out / "quality.json").write_text(json.dumps(rows, indent=1))
    draw(rows, out / "quality.png")
    print(describe())
    print(f"{rows['original']['positions']} positions of {len(cases)} conversations\n\n{as_table(rows)}")
    print(json.dumps({"bench": "quality", "model": options.model, "formats": rows}))


if __name__ == "__main__":
    main()
