"""What a training tells: each kind of record, as a class and as a line of metrics.jsonl.

    {"kind": "update", "step": 1, "epoch": 0, "nats": 3.3, …}        ⇄  Update(step=1, epoch=0, …)

`step` is always the number of updates made so far.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self, cast, get_args

from elman.errors import UserError


class Record:
    """One of the classes below; `KINDS` has them by the name they go by in the file."""

    kind: ClassVar[str]
    step: int

    def json(self) -> dict[str, Any]:
        """The record as it stands in metrics.jsonl."""
        names = [place.name for place in _places(type(self))]
        return {"kind": self.kind} | {name: getattr(self, name) for name in names}

    @classmethod
    def late(
        cls, known: dict[str, Any], rest: Callable[[], dict[str, Any]], ready: Callable[[], bool]
    ) -> Self:
        """A record whose other numbers are asked of `rest` when first looked at: a GPU may still
        be working on them, unless it is `ready`."""
        record = object.__new__(cls)
        record.__dict__.update(known, _rest=rest, _ready=ready)
        return record

    @property
    def is_known(self) -> bool:
        """Whether its numbers can be read without waiting."""
        return "_rest" not in self.__dict__ or self.__dict__["_ready"]()

    def __getattr__(self, name: str) -> Any:
        """The numbers that are not there yet; Python asks here for nothing else."""
        rest = self.__dict__.get("_rest")
        if rest is None or name.startswith("_"):
            raise AttributeError(f"a {type(self).__name__} record has no {name}")
        self.__dict__.update(rest())
        del self.__dict__["_rest"], self.__dict__["_ready"]
        return getattr(self, name)

    def __getstate__(self) -> dict[str, Any]:
        """A copy waits for all numbers."""
        if "_rest" in self.__dict__:
            self.json()
        return self.__dict__


@dataclass(frozen=True)
class Update(Record):
    """What one update did; `nats` is the mean over the tokens it read, dropout included."""

    kind: ClassVar[str] = "update"
    step: int
    epoch: int
    nats: float
    perplexity: float
    gradient_norm: float  # before clipping
    learning_rate: float
    tokens: int
    tokens_per_second: float
    progress: float  # of the whole training, 0 to 1


@dataclass(frozen=True)
class Validation(Record):
    """The score of the held-out text, read in parallel lanes (see `metrics.evaluate`)."""

    kind: ClassVar[str] = "validation"
    step: int
    epoch: int
    nats: float
    perplexity: float
    improved: bool


@dataclass
class Tally:
    """A pass over the text so far: what its `Epoch` will tell."""

    nats: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Epoch(Record):
    """One pass over the text, as the notes print it: its perplexity while it was learnt from."""

    kind: ClassVar[str] = "epoch"
    step: int
    epoch: int  # passes made so far
    nats: float
    perplexity: float
    tokens: int
    tokens_per_second: float


Progress = Update | Epoch | Validation
"""What a training itself tells."""


@dataclass(frozen=True)
class Sample(Record):
    """A text of the model's own, always from the same beginning and with the same seed."""

    kind: ClassVar[str] = "sample"
    step: int
    text: str


@dataclass(frozen=True)
class Diagnosis(Record):
    """How far back the gradient reached at one moment (`diagnostics.glance`)."""

    kind: ClassVar[str] = "diagnosis"
    step: int
    half_within: int
    ninety_within: int
    window_keeps: float
    decay_per_step: float | None
    saturation: float


@dataclass(frozen=True)
class Result(Record):
    """The score of the run's weights on the part that is reported, by the definition: one lane.

    That is the test part; runs without one, and those of older versions, report validation.
    """

    kind: ClassVar[str] = "result"
    step: int  # of those weights
    tokens: int
    nats_per_token: float
    perplexity: float
    bits_per_char: float
    part: str = "validation"


@dataclass(frozen=True)
class Change(Record):
    """Options in which the training goes on otherwise than it began, as one types them."""

    kind: ClassVar[str] = "change"
    step: int
    options: dict[str, Any]


KINDS: dict[str, type[Record]] = {
    kind.kind: kind for kind in (Update, Epoch, Validation, Sample, Diagnosis, Change, Result)
}
"""Every kind of record: a new one is a class and a name here."""


def from_json(values: Any) -> Record:
    """The record that a line of metrics.jsonl stands for; what a later elman added is left out.

    A null where a number belongs stands for one that was not finite, which JSON cannot hold.
    """
    try:
        kind: Any = KINDS[values["kind"]]
        return kind(**{place.name: place.value(values) for place in _places(kind)})
    except (KeyError, TypeError) as problem:
        raise UserError(
            f"{str(values)[:200]} is not a record of a training: {problem!r}",
            hint=f"its kind is one of {', '.join(KINDS)}, with all of that kind's numbers",
        ) from problem


class _Place(NamedTuple):
    """A field of a record, as JSON has it."""

    name: str
    types: tuple[type, ...]  # that a value may have; (): any
    optional: bool
    is_float: bool
    default: Any

    def value(self, values: dict[str, Any]) -> Any:
        """An older elman's record may leave out what can be None or has a default."""
        if self.name not in values and (self.optional or self.default is not MISSING):
            return None if self.default is MISSING else self.default
        value = values[self.name]
        if type(value) in self.types:
            return value
        if value is None and (self.optional or self.is_float):
            return None if self.optional else math.nan
        odd_bool = isinstance(value, bool) and bool not in self.types
        if self.types and (odd_bool or not isinstance(value, self.types)):
            raise TypeError(f"{self.name} is {str(value)[:40]!r}")
        return value


@functools.cache
def _places(kind: type[Record]) -> list[_Place]:
    """The fields of a kind of record: a run has many records, and asks of each."""
    places = []
    for field in fields(cast(Any, kind)):
        optional = type(None) in get_args(field.type)
        types = TYPES.get(get_args(field.type)[0] if optional else field.type, ())
        places.append(_Place(field.name, types, optional, field.type is float, field.default))
    return places


TYPES = {int: (int,), float: (int, float), bool: (bool,), str: (str,)}
"""What JSON has where a field of each type is expected."""
