"""What one client's conversation came to: a row of the table, and the same as one JSON line."""
from dataclasses import asdict, dataclass, field

from .place import Failed
from .served import Served, Turn

NANO = "nano"                                           # whose words the replies are
LED = "nano, led by a script"


@dataclass
class Report:
    """`turns` in order; `result` is "ok" or what went wrong."""
    client: str
    version: str = "?"
    replies: str = NANO
    turns: list[Turn] = field(default_factory=list)
    result: str = "ok"
    seconds: float = 0.0

    def turn(self, server: Served, did: str, said: str, wanted: str = "", client_cached: int | None = None) -> None:
        """Count the turn that just ended. Failed if it came to no request or a refusal, or if `said` lacks `wanted`."""
        turn = server.since(did, client_cached)
        self.turns.append(turn)
        if turn.refused:
            raise Failed(f"{did}: the server refused {turn.refused}")
        if not turn.requests:
            raise Failed(f"{did}: no request came")
        if not said.strip() or wanted not in said:
            raise Failed(f"{did}: {wanted!r} was wanted, this came: {said[-1500:]!r}")

    def row(self) -> str:
        done = "; ".join(f"{number}. {turn.did}" for number, turn in enumerate(self.turns, 1))
        reuse = "; ".join(f"{number}. {turn}" for number, turn in enumerate(self.turns, 1))
        return f"| {self.client} | {self.version} | {done} | {self.replies} | {self.result.splitlines()[0]} | {reuse} |"

    def as_dict(self) -> dict:
        return asdict(self)


HEADER = """| client | version | turns | replies | result | prompt tokens from the prefix cache |
|---|---|---|---|---|---|"""
