"""The one table of forecasters: a new one is its class and one line here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elman.cells import models
from elman.errors import UserError
from elman.forecasting.autoregressive_errors import AutoregressiveErrors
from elman.forecasting.base import Forecaster
from elman.forecasting.baselines import Drift, Last, Mean, Seasonal
from elman.forecasting.deseasonalised import Deseasonalised
from elman.forecasting.differenced import Differenced, Logged
from elman.forecasting.global_network import Global
from elman.forecasting.linear import Linear
from elman.forecasting.networks import Recurrent, Window
from elman.forecasting.regression import Regression
from elman.forecasting.smoothing import Smoothing
from elman.gradients import Carry, Checkpointed, Memory, Stored
from elman.gradients.carry import CARRIES, named
from elman.kernels.choice import FASTEST_FIRST
from elman.training.segments import bytes_of

_NETWORK = ("tau", "hidden", "epochs", "learning_rate", "gaussian")
_BACK = ("carry", "memory", "kernel")
_GLOBAL = ("tau", "hidden", "updates", "learning_rate", *_BACK)


@dataclass(frozen=True)
class Plan:
    """What a forecaster is made for: its horizon, season, data and inputs."""

    steps: int
    season: int | None = None
    length: int = 1_000_000
    known: int = 0
    past: int = 0
    seed: int = 0

    @property
    def inputs(self) -> int:
        return self.known + self.past

    def window(self, least: int) -> int:
        """How many past values to read: a season and a bit, but at most a third of the data."""
        return max(1, min(max(least, (self.season or 0) + 1), self.length // 3))


@dataclass(frozen=True)
class Kind:
    """One line of the table: how to make it, and what it understands."""

    make: Callable[[Plan, dict[str, Any]], Forecaster]
    options: tuple[str, ...] = ()
    direct: bool = False
    """Whether one output can span the whole horizon (`direct=K`)."""
    shared: bool = False
    """Whether one model serves all series; the others are fitted series by series."""
    inputs: tuple[str, ...] = ()
    """The kinds of inputs that it reads: known, past, static."""
    network: bool = False
    """Whether it is trained by gradient descent, so that fitting it again is expensive."""
    seconds: Callable[[int], float] = lambda steps: 2e-3 + 1e-5 * steps
    """Roughly how long a fit on so many steps of a series takes on a slow core."""


_MOST_EFFECTS = 200
"""A longer season is not regressed on: an effect a place would cost its cube in time."""


def _seasonal(plan: Plan, _: dict[str, Any]) -> Forecaster:
    if not plan.season:
        raise UserError("the seasonal model needs to know the season", hint="--season 12")
    return Seasonal(plan.season)


def _smoothing(plan: Plan, _: dict[str, Any]) -> Forecaster:
    """With a season where the data has two of them and a step more to learn from."""
    return Smoothing(plan.season if plan.length > 2 * (plan.season or 0) + 1 else None)


def _linear(plan: Plan, o: dict[str, Any]) -> Forecaster:
    tau = o.get("tau") or plan.window(8)
    if plan.inputs:
        return Regression(tau, plan.steps if plan.past else 1)
    return Linear(tau, o.get("direct", 1))


def _regression(plan: Plan, o: dict[str, Any]) -> Forecaster:
    least = 3 * (plan.season or 1)
    season = plan.season if plan.length >= least and least <= 3 * _MOST_EFFECTS else None
    return AutoregressiveErrors(**{"tau": max(1, min(4, plan.length // 12)), **o, "season": season})


def _window(plan: Plan, o: dict[str, Any]) -> Forecaster:
    return Window(**{"seed": plan.seed, **o})


def _recurrent(cell: Any) -> Callable[[Plan, dict[str, Any]], Forecaster]:
    def make(plan: Plan, o: dict[str, Any]) -> Forecaster:
        tau = min(max(32, 2 * (plan.season or 0)), max(1, plan.length // 3))
        return Recurrent(cell, **{"seed": plan.seed, "tau": tau, **o})

    return make


def _global(cell: str) -> Callable[[Plan, dict[str, Any]], Forecaster]:
    def make(plan: Plan, o: dict[str, Any]) -> Forecaster:
        season = plan.season or 1
        tau = min(max(24, 2 * season), max(season, plan.length - plan.steps - 8))
        lag = o.get("difference", season if season > 1 else 1)
        settings = {"seed": plan.seed, "tau": max(tau, lag, 1), **o, "difference": lag}
        return Global(plan.steps, cell, **settings)

    return make


FORECASTERS: dict[str, Kind] = {
    "last": Kind(lambda plan, o: Last()),
    "seasonal": Kind(_seasonal),
    "mean": Kind(lambda plan, o: Mean()),
    "drift": Kind(lambda plan, o: Drift()),
    "ets": Kind(_smoothing, seconds=lambda steps: 2e-4 * steps),
    "linear": Kind(_linear, ("tau",), direct=True, inputs=("known", "past")),
    "regression": Kind(
        _regression, ("tau", "trend"), inputs=("known",), seconds=lambda steps: 2e-2 + 1e-4 * steps
    ),
    "window": Kind(
        _window, _NETWORK, direct=True, network=True, seconds=lambda steps: 3e-4 * steps
    ),
}
"""Those that are not named after a cell."""


def forecasters() -> dict[str, Kind]:
    """All by name: the table's, then one per cell, alone (`gru`) and shared (`global-gru`)."""
    cells = [c for c in models() if c not in FORECASTERS]
    own = {
        c: Kind(
            _recurrent(c),
            (*_NETWORK, *_BACK),
            direct=True,
            network=True,
            seconds=lambda steps: 0.9 * max(1, steps // 64),
        )
        for c in cells
    }
    shared = {
        f"global-{c}": Kind(
            _global(c),
            _GLOBAL,
            shared=True,
            inputs=("known", "past", "static"),
            network=True,
            seconds=lambda steps: 16.0,
        )
        for c in cells
    }
    return FORECASTERS | own | shared


def names() -> tuple[str, ...]:
    """What `--model` may be."""
    return ("auto", *forecasters())


@dataclass(frozen=True)
class Method:
    """A forecaster by name with its settings: what is tried, compared, chosen and fitted again."""

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    difference: tuple[int, ...] = ()
    logged: bool = False
    deseasonalised: bool = False
    direct: bool = False
    median: bool = False
    """Whether the forecast is the middle of the distribution, not what the model expects."""
    name: str = ""
    """How tables call it, where that is not made from the settings."""

    def __post_init__(self) -> None:
        known = forecasters()
        if self.kind not in known:
            raise UserError(
                f"--model {self.kind!r} is unknown", hint=f"one of {', '.join(names())}"
            )
        for name in self.options:
            if name not in known[self.kind].options:
                fits = [k for k, kind in known.items() if name in kind.options]
                raise UserError(
                    f"{FLAGS.get(name, name)} means nothing to --model {self.kind}",
                    hint=f"it is for {', '.join(fits)}",
                )
        self._settings()
        for lag in self.difference:
            if lag < 1:
                raise UserError(f"--difference {lag} is negative", hint="0 leaves values alone")

    @property
    def of(self) -> Kind:
        return forecasters()[self.kind]

    @property
    def label(self) -> str:
        """Its name, or one from its settings: "linear, tau=9, changes over 12, logarithms"."""
        if self.name:
            return self.name
        words = [self.kind]
        words += ["direct"] if self.direct else []
        words += [str(v) if k == "trend" else f"{k}={v}" for k, v in self.options.items()]
        words += [f"changes over {lag}" for lag in self.difference]
        words += ["season removed"] if self.deseasonalised else []
        words += ["logarithms"] if self.logged else []
        words += ["median"] if self.median else []
        return ", ".join(words)

    def _settings(self) -> dict[str, Any]:
        """The options, with what is said in words made into what it means."""
        return {k: _MEANING[k](v) if k in _MEANING else v for k, v in self.options.items()}

    def make(self, plan: Plan) -> Forecaster:
        """A fresh, unfitted forecaster."""
        settings = self._settings()
        if self.direct:
            settings["direct"] = plan.steps
        if self.of.shared:
            if self.difference:
                settings["difference"] = self.difference[0]
            return self.of.make(plan, settings)
        if plan.inputs and self.of.inputs and (self.difference or self.logged):
            raise UserError(
                f"{self.kind} reads inputs beside plain values, not beside changes or logarithms",
                hint="leave --difference out",
            )
        taken = sum(self.difference)
        model = self.of.make(replace(plan, length=max(plan.length - taken, 1)), settings)
        for lag in self.difference:
            model = Differenced(model, lag)
        if self.deseasonalised and plan.season:
            model = Deseasonalised(model, plan.season)
        return Logged(model) if self.logged else model


FLAGS = {
    "tau": "--tau",
    "hidden": "--hidden-size",
    "epochs": "--epochs",
    "updates": "--updates",
    "learning_rate": "--learning-rate",
    "gaussian": "--gaussian",
    "carry": "--carry",
    "memory": "--memory",
    "kernel": "--kernel",
}
"""What the options of a model are called on a command line."""


def carry_of(said: Carry | str) -> Carry:
    """A carry by its name and the steps between its cuts; a carry itself is left alone.

    >>> carry_of("truncated:12"), carry_of("full")
    (Truncated(window=12), Full())
    """
    if isinstance(said, Carry):
        return said
    name, _, steps = said.partition(":")
    cut = [n for n, carry in CARRIES.items() if not carry.whole]
    if name not in CARRIES or (name in cut) != bool(steps) or (steps and not _counts(steps)):
        raise UserError(
            f"--carry {said!r} is not a carry",
            hint=f"{', '.join(n for n in CARRIES if n not in cut)}, or one of {', '.join(cut)} "
            "with the steps between its cuts: truncated:12",
        )
    window = int(steps or 1)
    return named(name, window, CARRIES[name].suggests(window).get("history", 0))


def _counts(word: str) -> bool:
    return word.isdecimal() and len(word) <= 9 and int(word) > 0


def memory_of(said: Memory | str) -> Memory:
    """A memory by a word: stored, or a budget of bytes as in 64M; a memory is left alone."""
    if isinstance(said, Memory):
        return said
    budget = bytes_of(said)
    return Checkpointed(budget=budget) if budget else Stored()


def kernel_of(said: str | None) -> str | None:
    """The name of a kernel, if it is one."""
    if said not in (None, "auto", *FASTEST_FIRST):
        raise UserError(
            f"--kernel {said!r} names no kernel", hint=f"auto, {', '.join(FASTEST_FIRST)}"
        )
    return said


_MEANING: dict[str, Callable[[Any], Any]] = {
    "carry": carry_of,
    "memory": memory_of,
    "kernel": kernel_of,
}
"""Options that can be said in words, on a command line and in a saved request."""
