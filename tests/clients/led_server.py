"""`python -m tests.clients.led_server RULES.json [options]`: qwentin's server with some replies written in advance.

An agent's tools are beyond nano: under 10,000 tokens of instructions it does not call them. Here everything is the server
and nano's tower (prefill, prefix cache, parsing, streaming) except the choice of tokens in replies that a rule names:

    [{"asked": "text in the last message", "say": "reply"}, ...]        the first that fits; without one nano chooses

A reply stands behind the thought: where the prompt opens one, a short one is closed first.
"""
import json
import sys
from pathlib import Path

import numpy as np

from qwentin import nano, sequence
from qwentin.sampler import Sampler
from qwentin.server.__main__ import main
from qwentin.tokenizer import Tokenizer

THOUGHT = "I was told what to say.\n</think>\n\n"
END = "<|im_end|>"


class Rules:
    """Which ids a prompt is answered with."""

    def __init__(self, path: str):
        self.rules, self.tokenizer = json.loads(Path(path).read_text()), Tokenizer(nano.DIRECTORY)

    def reply(self, prompt: np.ndarray) -> list[int]:
        """The ids to say, the stop id last; [] where no rule fits."""
        text = self.tokenizer.decode(prompt[-3000:].tolist())
        last = text.rpartition("<|im_start|>user")[2]
        for rule in self.rules:
            if rule["asked"] in last:
                said = (THOUGHT if text.endswith("<think>\n") else "") + rule["say"] + END
                return self.tokenizer.encode(said).tolist()
        return []


def led_by(rules: Rules) -> type[Sampler]:
    class LedSampler(Sampler):
        """A Sampler that follows the reply to its end."""

        def __init__(self, params, prompt, *more, **named):
            super().__init__(params, prompt, *more, **named)
            self.reply = iter(rules.reply(prompt))

        def choose(self, *arguments):
            token = next(self.reply, None)
            return super().choose(*arguments) if token is None else token
    return LedSampler


if __name__ == "__main__":
    sequence.Sampler = led_by(Rules(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
