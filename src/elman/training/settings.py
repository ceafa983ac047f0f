"""The settings of a training: how to read, how to update, for how long."""

from dataclasses import dataclass, field

from elman.errors import UserError
from elman.options import check, option
from elman.training.optimisation import PANEL, VALIDATED, Optimisation
from elman.training.segments import CUT, Reading

PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Settings:
    """A whole training: how to read, how to update, for how long."""

    epochs: int = option(10, "Passes over the text", panel=PANEL, at_least=1, later=True)
    accumulate: int = option(
        1, "Segments per update", panel=PANEL, at_least=1, later=True, beside=CUT
    )
    validate_every: int = option(
        0,
        "Updates; 0: twenty times, or a tenth of the time",
        panel=PANEL,
        at_least=0,
        beside=VALIDATED,
    )
    patience: int = option(
        0,
        "Stop after so many validations without a better one; 0: never",
        panel=PANEL,
        at_least=0,
        later=True,
        beside=VALIDATED,
    )
    precision: str = option(
        "float32", "Of the products, by autocast", panel=PANEL, choices=PRECISIONS
    )
    lane_groups: int = option(
        0,
        "Groups of lanes, summed in a fixed order: as many processes as you like, up to so many, "
        "end in the same weights; 0: in the fastest order",
        panel=PANEL,
        at_least=0,
    )
    seed: int = option(0, "Same seed, same model", panel="Run", at_least=0)
    reading: Reading = field(default_factory=Reading)
    optimisation: Optimisation = field(default_factory=Optimisation)

    def __post_init__(self) -> None:
        check(self)
        for name, kind in (("reading", Reading), ("optimisation", Optimisation)):
            if not isinstance(getattr(self, name), kind):
                raise UserError(
                    f"{name}={getattr(self, name)!r} must be of the type {kind.__name__}",
                    hint=f"elman.training.{kind.__name__}(…)",
                )
