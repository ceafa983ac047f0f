"""What a training tells after every update and validation."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Update:
    """What one update did; `nats` is the mean over the tokens it read, dropout included."""

    step: int
    epoch: int
    nats: float
    perplexity: float
    gradient_norm: float  # before clipping
    learning_rate: float
    tokens: int
    tokens_per_second: float
    progress: float  # of the whole training, 0 to 1

    def json(self) -> dict[str, Any]:
        """The record as it stands in metrics.jsonl."""
        return {"kind": "update", **asdict(self)}


@dataclass(frozen=True)
class Validation:
    """The score of the held-out text, read in parallel lanes (see `metrics.evaluate`)."""

    step: int
    epoch: int
    nats: float
    perplexity: float
    improved: bool

    def json(self) -> dict[str, Any]:
        """The record as it stands in metrics.jsonl."""
        return {"kind": "validation", **asdict(self)}


Record = Update | Validation
