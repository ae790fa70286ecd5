"""lm-eval: a task of likelihoods over /v1/completions with the server's own tokenizer, and one of generation over
/v1/chat/completions. No tokenizer files, no data from outside: both tasks stand in a folder made here."""
import json

from .client import Client
from .place import Place
from .report import Report
from .served import Served

LIKELY = """task: likely
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{folder}/likely.jsonl"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{right}}}}"
metric_list: [{{metric: acc}}]
"""
SUMS = """task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{folder}/sums.jsonl"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{right}}}}"
generation_kwargs: {{until: ["<never>"], max_gen_toks: 200}}
filter_list: [{{name: sum, filter: [{{function: regex, regex_pattern: "= (\\\\d+)"}}, {{function: take_first}}]}}]
metric_list: [{{metric: exact_match}}]
"""
ASKED = "<|im_start|>user\nPlease add {a} and {b}.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n{a} + {b} ="
DOCUMENTS = {
    "likely": [{"text": ASKED.format(a=a, b=b), "choices": [f"{a + b}", f"{a + b + 10}"], "right": 0}
               for a, b in ((12, 30), (7, 5), (20, 21), (40, 8))],
    "sums": [{"text": f"Please add {a} and {b}.", "right": str(a + b)} for a, b in ((696, 336), (12, 30), (551, 27))]}


def result(out: str, task: str) -> str:
    """The value in the row of lm-eval's table that names the task."""
    rows = [[cell.strip() for cell in line.split("|")] for line in out.splitlines() if line.startswith(f"|{task}")]
    return " ".join(row[7] for row in rows)


def converse(place: Place, server: Served, report: Report) -> None:
    bins = place.pip("lm-eval[api]")
    for name, written in (("likely", LIKELY), ("sums", SUMS)):
        (place.work / f"{name}.yaml").write_text(written.format(folder=place.work))
        (place.work / f"{name}.jsonl").write_text("".join(json.dumps(d) + "\n" for d in DOCUMENTS[name]))
    version = "import importlib.metadata as found; print(found.version('lm_eval'))"
    report.version = place.run(bins, "python", "-c", version).out.strip()

    def evaluate(task, model, route, *words):
        arguments = f"model=nano,base_url={server.url}/v1/{route},num_concurrent=1,max_retries=1"
        arguments += ",tokenizer_backend=remote,tokenized_requests=True" if model == "local-completions" else ""
        done = place.run(bins, "lm_eval", "run", "--model", model, "--model_args", arguments, "--include_path", ".",
                         "--tasks", task, *words, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", OPENAI_API_KEY="any")
        return result(done.out, task)
    report.turn(server, "8 likelihoods, accuracy 1 (echo and logprobs: never from the cache)",
                evaluate("likely", "local-completions", "completions"), "1")
    report.turn(server, "3 sums generated, all right",
                evaluate("sums", "local-chat-completions", "chat/completions", "--apply_chat_template"), "1")


LM_EVAL = Client("lm-eval", converse)
