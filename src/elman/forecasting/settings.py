"""What is asked of a forecast: which model, how far, and how to look back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elman.errors import UserError
from elman.forecasting.catalogue import FLAGS, Method, names
from elman.forecasting.ensemble import check_steps
from elman.options import as_number, hold_numbers, whole_number


@dataclass(frozen=True)
class Settings:
    """What to forecast with, how far, and how to look back."""

    model: str = "auto"
    steps: int = 16
    difference: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    levels: tuple[float, ...] = (90.0,)
    windows: int = 5
    every: int | None = None
    calendar: bool = False
    minutes: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        hold_numbers(self)
        options = {name: as_number(value) for name, value in self.options.items()}
        object.__setattr__(self, "options", options)
        self._check_numbers()
        if self.model not in names():
            raise UserError(
                f"--model {self.model!r} is unknown", hint=f"one of {', '.join(names())}"
            )
        check_steps(self.steps)
        if self.difference < 0:
            raise UserError(
                f"--difference {self.difference} is negative", hint="0 leaves values alone"
            )
        if self.windows < 1:
            raise UserError(f"--windows {self.windows} must be at least 1", hint="5 is common")
        object.__setattr__(self, "levels", _percents(self.levels))
        if self.model == "auto":
            self._check_auto()
        else:
            self.method()
        self._check_sizes()

    def _check_numbers(self) -> None:
        for name in ("steps", "difference", "windows", "seed"):
            least = 0 if name == "seed" else None  # of the others more is said later
            hint = f"{name}={getattr(Settings, name)}"
            whole_number(name, getattr(self, name), at_least=least, hint=hint)

    def _check_auto(self) -> None:
        """Refuse what is for one model alone."""
        for name in self.options:
            raise UserError(
                f"{FLAGS.get(name, name)} means nothing to --model auto, which tries several",
                hint="--model linear or gru, or leave the option out",
            )
        if self.difference:
            raise UserError(
                "--difference means nothing to --model auto, which tries several",
                hint="leave it out, or name a --model",
            )

    def _check_sizes(self) -> None:
        for name, most in (("hidden", 4096), ("epochs", 100_000), ("tau", 100_000)):
            value = whole_number(name, self.options.get(name, 1), hint="leave it out")
            if value < 1:
                raise UserError(f"{FLAGS[name]} {value} must be at least 1", hint="leave it out")
            if value > most:
                weights = f" ({12 * value**2:.1e} weights)" if name == "hidden" else ""
                raise UserError(
                    f"{FLAGS[name]} {value}{weights} is more than {most}",
                    hint="such a model has no use here",
                )

    def method(self) -> Method:
        """The one model that was asked for."""
        lags = (self.difference,) if self.difference else ()
        return Method(self.model, dict(self.options), lags, name=self.model)


def _percents(levels: Any) -> tuple[float, ...]:
    """Levels as percents to four places, by which tables name them; each once."""
    try:
        percents = tuple(dict.fromkeys(round(float(x), 4) for x in [*levels]))
    except (TypeError, ValueError) as wrong:
        raise UserError(f"levels={levels!r} must be percents", hint="levels=(80, 95)") from wrong
    for level in percents:
        if not 0 < level < 100:
            raise UserError(
                f"--level {level:g} must lie between 0 and 100 percent",
                hint="80 covers four in five",
            )
    return percents
