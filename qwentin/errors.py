"""The exceptions that cross rooms. Each carries one sentence for a person; nothing here knows HTTP.

Raised at the door only: past it, `assert` marks what cannot happen.
"""


class QwentinError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(QwentinError):
    """An option, or a key of config.json, has a value that cannot be used."""


class CheckpointError(QwentinError):
    """A checkpoint directory cannot be served: names the tensor or key and the file."""


class RequestError(QwentinError):
    """A request cannot be served as it stands.

    `param` names the offending field (or is None); `code` is a short machine-readable word.
    """

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value"):
        super().__init__(message)
        self.param = param
        self.code = code


class ContextOverflow(RequestError):
    """Prompt, or prompt and completion limit together, exceed the context window."""

    def __init__(self, prompt: int, limit: int | None, context: int):
        asked = f"{prompt} in the prompt" + (f" and {limit} for the completion" if limit is not None else "")
        total = prompt + (limit or 0)
        self.prompt, self.limit, self.context = prompt, limit, context
        super().__init__(
            f"This model's maximum context length is {context} tokens, but {total} were requested ({asked}). "
            "Shorten the messages or the completion.", param="messages", code="context_length_exceeded")


class ConstraintFailed(QwentinError):
    """An output cannot go on within its grammar: it is too much for the library, or leaves no token."""

    def __init__(self, why: str):
        super().__init__(f"the output could not be constrained any further: {why}")


class QueueFull(QwentinError):
    """The engine holds as many requests as it may; try again after `retry_after` seconds."""

    def __init__(self, waiting: int, retry_after: int = 1):
        super().__init__(f"{waiting} requests are already waiting, which is the limit; retry in {retry_after} s.")
        self.retry_after = retry_after


class EngineStopped(QwentinError):
    """The engine is shutting down, or died; the request was not, or not fully, served."""


class Busy(QwentinError):
    """What was asked for has to wait until nothing runs."""


class WakeFailed(QwentinError):
    """An engine that sleeps cannot take its memory back now."""
