"""From a row of logits to the next token.

    logits -> ids without text masked -> bias -> penalties -> ids that the guide forbids left out
           -> temperature -> top_k -> top_p -> min_p -> one uniform number

`Sampler` is the state of one choice: its parameters, its random numbers, the counts that penalties need, and how far its
guide (guide.py) has come. A token that the guide has settled is taken without a look at the logits.
`distribution` is the whole chain as a pure function, because accepting a drafted tree needs the same probabilities. Where a
tower gives the best candidates of a row (step.Row) and these decide, they alone go through it, with the same outcome.
Proven by tests/test_sampler.py.
"""
import numpy as np

from .config import read_generation_config
from .errors import RequestError
from .guide import Steering
from .request import SamplingParams
from .step import Row

# field: lowest, highest, wanted in words. The refusal sentence is made from it.
RANGES = {
    "temperature": (0.0, 2.0, "a number from 0 to 2"),
    "top_p": (0.0, 1.0, "a number above 0, at most 1"),
    "top_k": (-1, 2**31 - 1, "a positive integer, or 0 or -1 for all tokens"),
    "min_p": (0.0, 1.0, "a number from 0 to 1"),
    "presence_penalty": (-2.0, 2.0, "a number from -2 to 2"),
    "frequency_penalty": (-2.0, 2.0, "a number from -2 to 2"),
    "repetition_penalty": (0.0, 10.0, "a number above 0, at most 10"),
}
ABOVE_LOW = {"top_p", "repetition_penalty"}       # the lowest value itself is refused


def check(params: SamplingParams, vocabulary: int) -> None:
    """RequestError naming the first field that is out of range."""
    for name, (low, high, wanted) in RANGES.items():
        value = getattr(params, name)
        if not low <= value <= high or (name in ABOVE_LOW and value == low):
            raise RequestError(f"{name} is {value}; {wanted} was wanted.", name)
    if params.seed is not None and not -2**63 <= params.seed < 2**64:
        raise RequestError(f"seed is {params.seed}; a 64-bit integer was wanted.", "seed")
    for token, bias in params.logit_bias:
        if not 0 <= token < vocabulary:
            raise RequestError(f"logit_bias names token {token}; ids from 0 to {vocabulary - 1} exist.", "logit_bias")
        if not -100 <= bias <= 100:
            raise RequestError(f"logit_bias of token {token} is {bias}; a number from -100 to 100 was wanted.",
                               "logit_bias")


def default_sampling(directory) -> SamplingParams:
    """What a request that says nothing gets: the checkpoint's generation_config.json."""
    given = read_generation_config(directory)
    known = {k: given[k] for k in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty") if k in given}
    if given.get("do_sample") is False:
        known["temperature"] = 0.0
    return SamplingParams(**known)


class Sampler:
    """One choice's way of picking tokens. `vocabulary` ids have text; logits rows may be longer."""

    def __init__(self, params: SamplingParams, prompt: np.ndarray, vocabulary: int, index: int = 0,
                 steering: Steering | None = None):
        self.params, self.vocabulary, self.steering = params, vocabulary, steering
        seed = None if params.seed is None else [params.seed % 2**64, index]       # choices of one seed differ
        self.random = np.random.default_rng(seed)
        self.penalised = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)
        self.counts = np.zeros(vocabulary if self.penalised else 0, np.int32)      # of generated tokens
        self.seen = np.zeros(vocabulary if self.penalised else 0, bool)            # in prompt or output
        if self.penalised:
            self.seen[prompt[prompt < vocabulary]] = True

    def choose(self, logits: np.ndarray | Row) -> int:
        """The next token by logits f32 [V] or a step's row; it is counted as generated. Raises ConstraintFailed."""
        token = self.steering.forced() if self.steering else self.first(logits)
        if token is None:
            ids, probabilities = self.distribution(logits)
            token = int(ids[pick(probabilities, self.random.random())]) if len(ids) > 1 else int(ids[0])
        if self.steering:
            token = self.steering.take(token)
        if self.penalised:
            self.counts[token] += 1
            self.seen[token] = True
        return token

    def first(self, logits: np.ndarray | Row) -> int | None:
        """The best candidate's id where that is all there is to say."""
        if isinstance(logits, Row) and logits.ids is not None and self.params.temperature == 0 and not self.penalised \
                and not self.params.logit_bias:
            return int(logits.ids[0])
        return None

    def distribution(self, logits: np.ndarray | Row) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that may follow, i64 [K], and their probabilities, f64 [K], after every processor."""
        p, mask = self.params, self.steering.mask() if self.steering else None
        row = logits if isinstance(logits, Row) else Row(logits)
        ids, values = self.few(row, mask) or self.all(row.logits[:self.vocabulary], mask)
        if p.temperature == 0:
            return ids[values.argmax()][None], np.ones(1)
        found, probabilities = truncate(values.astype(np.float64) / p.temperature, p.top_k, p.top_p, p.min_p)
        return ids[found], probabilities

    def all(self, row: np.ndarray, mask: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Ids that may follow and their logits, biased and penalised."""
        p, ids = self.params, np.arange(len(row))
        if p.logit_bias or self.penalised:
            row = row.astype(np.float32)        # a copy: the caller's logits stay the model's
        for token, bias in p.logit_bias:
            row[token] += np.float32(bias)
        if self.penalised:
            self.penalise(row)
        return (ids, row) if mask is None else (ids[mask], row[mask])

    def few(self, row: Row, mask: np.ndarray | None) -> tuple[np.ndarray, np.ndarray] | None:
        """The same of the best `wanted` tokens alone, best first, if a row's candidates tell which these are, else None.

        No other id has a larger logit than the last candidate, or an equal one and a lower id; so their order is that of all
        ids, less those that the guide forbids. Penalties that only lower move a candidate down, and it is sure of its place
        as long as it stays above the last.
        """
        p = self.params
        wanted = 1 if p.temperature == 0 else p.top_k
        if row.ids is None or p.logit_bias or not 0 < wanted <= len(row.ids):
            return None
        ids, values = row.ids, row.values
        if ids[-1] >= self.vocabulary:          # there are fewer
            ids, values = ids[ids < self.vocabulary], values[ids < self.vocabulary]
        if self.penalised:
            if min(p.repetition_penalty - 1, p.presence_penalty, p.frequency_penalty) < 0:
                return None
            last = values[-1]
            self.penalise(values, ids)
            sure = values > last
            ids, values = ids[sure], values[sure]
            order = np.lexsort((ids, -values))
            ids, values = ids[order], values[order]
        if mask is not None:
            ids, values = ids[mask[ids]], values[mask[ids]]
        return (ids[:wanted], values[:wanted]) if len(ids) >= wanted else None

    def penalise(self, row: np.ndarray, ids: np.ndarray | slice = slice(None)) -> None:
        """Lower or raise logits f32 [K], those of `ids`, in place."""
        p, seen, counts = self.params, self.seen[ids], self.counts[ids]
        if p.repetition_penalty != 1:
            r = np.float32(p.repetition_penalty)
            row[seen] = np.where(row[seen] > 0, row[seen] / r, row[seen] * r)
        row -= np.float32(p.frequency_penalty) * counts
        row -= np.float32(p.presence_penalty) * (counts > 0)


def truncate(row, top_k, top_p, min_p):
    """Softmax of row f64 [V], restricted to its top_k tokens, to the fewest that reach top_p, to those of at least min_p
    times the best. Returns ids and probabilities, best first wherever a restriction applies."""
    ids = np.arange(len(row))
    if 0 < top_k < len(row):
        last = np.partition(row, -top_k)[-top_k]
        above = np.flatnonzero(row > last)
        ids = np.concatenate([above, np.flatnonzero(row == last)[:top_k - len(above)]])
    if 0 < top_k < len(row) or top_p < 1 or min_p > 0:
        ids = ids[np.lexsort((ids, -row[ids]))]         # best first, lower id first among equals
    weights = np.exp(row[ids] - row.max())
    weights /= weights.sum()
    if top_p < 1:
        keep = np.searchsorted(np.cumsum(weights), top_p) + 1
        ids, weights = ids[:keep], weights[:keep]
    if min_p > 0:
        keep = weights >= min_p * weights[0]
        ids, weights = ids[keep], weights[keep]
    return ids, weights / weights.sum()


def pick(probabilities, uniform: float) -> int:
    """The index that a uniform number of [0, 1) falls on."""
    cumulative = np.cumsum(probabilities)
    return min(int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right")), len(cumulative) - 1)


def log_probabilities(logits: np.ndarray, vocabulary: int) -> np.ndarray:
    """Natural log-softmax over the ids with text: f32 [..., V] -> f64 [..., vocabulary]."""
    rows = logits[..., :vocabulary].astype(np.float64)
    rows = rows - rows.max(-1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(-1, keepdims=True))


def best(row: np.ndarray, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` best (id, log-probability) of row f64 [vocabulary], best first."""
    if not count:
        return ()
    ids = np.argpartition(row, -count)[-count:] if count < len(row) else np.arange(len(row))
    ids = ids[np.lexsort((ids, -row[ids]))]
    return tuple((int(i), float(row[i])) for i in ids)
