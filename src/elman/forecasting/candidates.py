"""What `auto` tries: one line each, and when it is worth trying."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from elman.forecasting.catalogue import Method, Plan
from elman.forecasting.series import Series

_FARTHEST = 400
"""How many past values a linear model reads at most: more would cost their cube in time. Changes
over a longer season still meet it."""
_MANY = 10
"""From so many series on, one network learns from all of them together."""


@dataclass(frozen=True)
class Facts:
    """What is known about the series before anything is tried."""

    plan: Plan
    seasonal: bool
    inputs: bool
    positive: bool
    sparse: bool
    """Whether zeros are common: demand that comes now and then."""
    many: bool

    @classmethod
    def of(cls, plan: Plan, panel: Sequence[Series]) -> "Facts":
        return cls(
            plan,
            bool(plan.season),
            plan.inputs > 0,
            all((s.values > 0).all() for s in panel),
            any((s.values == 0).mean() > 0.2 for s in panel),
            len(panel) >= _MANY,
        )

    def taus(self) -> list[int]:
        """How many past values linear models read: a few, a season, two seasons."""
        plan = self.plan
        longest = min(2 * (plan.season or 6) + 1, plan.length // 3)
        taus = {min(t, _FARTHEST) for t in (plan.window(4), plan.window(8), longest)}
        return [t for t in sorted(taus) if t >= 1]

    def at_most(self, tau: int, lag: Sequence[int]) -> int:
        """A window of changes, a third of those that there are: more would be learned by heart."""
        return max(1, min(tau, (self.plan.length - sum(lag)) // 3))

    def lags(self, changes: "Changes") -> list[tuple[int, ...]]:
        """The differences to try: values themselves, changes over one step, over a season, …"""
        m = self.plan.season
        every = [(), (1,), *([(m,), (m, 1)] if m else [])]
        return {"none": [()], "one": [(1,)], "season": [(m or 1,)], "each": every}[changes]


Changes = Literal["none", "one", "season", "each"]


When = Callable[[Facts], bool]


def _always(_: Facts) -> bool:
    return True


def _plain(facts: Facts) -> bool:
    return not facts.inputs


def _grows(facts: Facts) -> bool:
    return facts.positive and not facts.inputs


def _repeats(facts: Facts) -> bool:
    return facts.seasonal and not facts.inputs


def _alone(facts: Facts) -> bool:
    """Whether each series is to have a network of its own."""
    return not facts.inputs and not facts.many


@dataclass(frozen=True)
class Row:
    """One line of the table: a forecaster, on what, and when."""

    kind: str
    when: When = _always
    options: Mapping[str, Any] = field(default_factory=dict)
    taus: bool = False
    """Whether it is tried with every window of `Facts.taus`, or with the longest if logged."""
    changes: Changes = "none"
    """The differences it is tried with, by their name in `Facts.lags`; linear with inputs: none."""
    logged: bool = False
    deseasonalised: bool = False
    median: bool = False

    def methods(self, facts: Facts) -> list[Method]:
        """What this line makes of some series."""
        if not self.when(facts):
            return []
        taus = facts.taus()[-1 if self.logged else 0 :] if self.taus else [None]
        lags = facts.lags("none" if self.kind == "linear" and facts.inputs else self.changes)
        return [
            Method(
                self.kind,
                {**self.options, **({} if tau is None else {"tau": facts.at_most(tau, lag)})},
                lag,
                self.logged,
                self.deseasonalised,
                median=self.median,
            )
            for tau, lag in itertools.product(taus, lags)
        ]


_SHORT = {"tau": 4}

TRIED: tuple[Row, ...] = (
    Row("last"),
    Row("mean"),
    Row("drift"),
    Row("seasonal", lambda f: f.seasonal),
    Row("ets"),
    Row("ets", _grows, logged=True),
    Row("mean", lambda f: f.sparse, median=True),
    Row("ets", lambda f: f.sparse, median=True),
    Row("mean", _repeats, deseasonalised=True),
    Row("regression", options={"trend": "level"}),
    Row("regression", options={"trend": "line"}),
    Row("regression", options={"trend": "changes"}),
    Row("regression", _grows, {"trend": "line"}, logged=True),
    Row("regression", _grows, {"trend": "changes"}, logged=True),
    Row("linear", taus=True, changes="each"),
    Row("linear", _grows, taus=True, changes="each", logged=True),
    Row("linear", lambda f: f.seasonal, _SHORT, deseasonalised=True),
    Row("linear", _repeats, _SHORT, deseasonalised=True, changes="one"),
    Row("linear", lambda f: f.seasonal and _grows(f), _SHORT, deseasonalised=True, logged=True),
    Row("gru", _alone),
    Row("gru", _alone, changes="season"),
    Row("lstm", _alone),
    Row("lstm", _alone, changes="season"),
    Row("global-lstm", lambda f: not _alone(f)),
)
"""In this order; naive ones first, networks last."""


def candidates(plan: Plan, panel: Sequence[Series]) -> list[Method]:
    """What `auto` tries on these series, in the order of the table, nothing twice."""
    facts = Facts.of(plan, panel)
    methods = [m for row in TRIED for m in row.methods(facts)]
    return list({m.label: m for m in methods}.values())
