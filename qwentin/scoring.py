"""Scores of a prompt's own tokens (echo): what the model thought of each, from the rows of its prefill steps.

Who calls: engine.py. Proven by tests/test_engine.py.
"""
from .request import PromptScored, Token
from .sampler import best, log_probabilities
from .sequence import Job, Sequence
from .step import Row


def score_prompt(job: Job, sequence: Sequence, start: int, count: int, rows: list[Row], vocabulary: int) -> None:
    """Log-probabilities of the prompt tokens that the rows of positions start .. start + count - 1 predict; sends
    PromptScored with the last."""
    wanted = sequence.request.prompt_logprobs
    if wanted is None or sequence.scored >= sequence.prompt_tokens:
        return
    if not job.scores:
        job.scores.append(Token(sequence.ids[0], 0))
    end = min(start + count, sequence.prompt_tokens - 1)
    for row, at in zip(rows, range(max(sequence.scored, start), end)):
        scores, token = log_probabilities(row.logits, vocabulary), sequence.ids[at + 1]
        job.characters += len(job.reader.push(sequence.ids[at]))
        job.scores.append(Token(token, job.characters, float(scores[token]), best(scores, wanted)))
    sequence.scored = max(sequence.scored, end)
    if len(job.scores) == sequence.prompt_tokens:
        sequence.scored = sequence.prompt_tokens
        job.emit(PromptScored(tuple(job.scores)))
