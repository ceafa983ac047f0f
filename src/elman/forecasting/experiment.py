"""A forecast from beginning to end: choose or take a model, see how it would have done, look ahead.

`fit_and_measure(series, settings)` is what `elman forecast` runs; a notebook gets the same.

1. Every rival forecasts from past origins (`panel.cross_validate`): the model asked for, or all
   that `auto` tries, beside the baselines.
2. The scores of those windows say how good it is; they also say how wide its intervals must be.
3. The model is fitted again, on everything, and looks ahead.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError
from elman.forecasting import accuracy, choice, panel
from elman.forecasting.candidates import candidates
from elman.forecasting.catalogue import Method, forecasters
from elman.forecasting.choice import Choice, Verdict
from elman.forecasting.ensemble import (
    Ahead,
    Ensemble,
    losses,
    notes_of,
    single_columns,
)
from elman.forecasting.output import look_ahead_plain, plain
from elman.forecasting.panel import Backtest, Fitted, Windows
from elman.forecasting.progress import Limit, Told, listening
from elman.forecasting.scores import Scores, measured, widening
from elman.forecasting.seasons import with_season
from elman.forecasting.series import Series
from elman.forecasting.settings import Settings

MOST_COMPARED = 100
"""How many series rivals are compared on; of more, evenly chosen ones stand for the rest."""

LONGEST = 20_000
"""How many of a series' newest steps are learned from, unless a network is named."""

_BASELINES = ("last", "mean", "drift", "ets", "seasonal")
"""What a named model is compared with, besides `linear`."""

_INFORM = 3
"""Windows that only inform the first choice of `auto`."""


@dataclass(frozen=True, eq=False)
class Experiment:
    """Everything that was found out, and the model that remains."""

    settings: Settings
    series: list[Series]
    compared: list[int]
    """The series, by number, that looked back; all of them unless they are very many."""
    windows: Windows
    first: int
    """The first window that scores count; those before it only informed a choice."""
    choice: Choice
    published: str
    """What the answer is called: the model's name, or "auto"."""
    ensemble: Ensemble
    ahead: list[Ahead]
    verdicts: list[Verdict]
    warning: str | None

    def backtests(self) -> dict[str, list[Backtest]]:
        """Every rival's forecasts in the windows that count, the published one first."""
        counted = range(self.first, self.windows.count)
        own = {"auto": self.choice.chosen} if self.settings.model == "auto" else {}
        return own | {
            label: [b.only(counted) for b in rows] for label, rows in self.choice.tried.items()
        }

    def scores(self, compared: int | None = None) -> dict[str, "Scores"]:
        """Errors by horizon of every rival: of one compared series, or of all, pooled."""
        units = choice.naive_errors([self.series[i] for i in self.compared], self.windows)
        which = range(len(self.compared)) if compared is None else [compared]
        return {
            label: measured([rows[i] for i in which], units[list(which)], self.settings.levels)
            for label, rows in self.backtests().items()
        }

    def unread(self) -> list[str]:
        """Inputs that were given and that no forecaster that was chosen reads, in words."""
        first = self.series[0]
        names, after = list(first.inputs), len(first.inputs) - len(first.static)
        before = after - first.past.shape[1]
        given = {"known": names[:before], "past": names[before:after], "static": names[after:]}
        read = {k for fitted in self.ensemble.fitted.values() for k in fitted.method.of.inputs}
        return [
            f"not read by what was chosen: --{kind} {', '.join(columns)}"
            for kind, columns in given.items()
            if columns and kind not in read
        ]

    def notes(self) -> list[str]:
        """How the series were read, which are left out, and which inputs nobody reads."""
        return notes_of(self.series) + self.unread()

    def answer(self) -> dict[str, Any]:
        """Everything as plain values for JSON."""
        several = len(self.series) > 1
        scores = {k: v.plain() for k, v in self.scores().items()}
        own = next(iter(self.scores(0).values()))
        answer: dict[str, Any] = {
            "model": self.ensemble.description(0),
            "published": self.published,
            "windows": {
                "count": self.windows.count - self.first,
                "steps": self.windows.steps,
                "every": self.windows.every,
                "series": {
                    self.series[i].name: _parts(self.series[i], self.windows, self.first)
                    for i in self.compared
                },
            },
            "scores": scores,
            "verdicts": [str(v) for v in self.verdicts],
            "warning": self.warning,
            "left_out": self.choice.left_out,
            "growth": None if several else _growth(own),
            "losses": losses(self.ensemble),
            "notes": self.notes(),
            "forecast": look_ahead_plain(self.series, self.ahead),
        }
        if several:
            answer["scores_by_series"] = {
                self.series[i].name: {k: v.plain() for k, v in self.scores(n).items()}
                for n, i in enumerate(self.compared)
            }
            answer["models"] = {
                s.name: self.ensemble.description(i) for i, s in enumerate(self.series)
            }
        return answer


def fit_and_measure(
    series: Sequence[Series],
    settings: Settings | None = None,
    told: Told | None = None,
    kept: choice.Kept | None = None,
) -> Experiment:
    """Forecast every column of every series, and measure how such forecasts did at past origins.

    `told` hears how far it is; `kept` holds what was tried before an interruption.

    A model that was not named by the user is never published if it is worse than a baseline:
    `auto` chooses among all of them. A named one is, with a warning.
    """
    settings = settings or Settings()
    is_auto = settings.model == "auto"
    columns = _columns(series, settings)
    say: Callable[[str], None] = told or (lambda _: None)
    inform = _INFORM if is_auto else 0
    windows, long = panel.windows_for(
        columns, settings.steps, settings.windows + inform, every=settings.every
    )
    long = _able(long, columns, windows, settings)
    columns = _with_short_ones_named(columns, long, windows)
    first = min(inform, max(0, windows.count - 1))
    stride = -(-len(long) // MOST_COMPARED)
    compared = long[::stride]
    some = [columns[i] for i in compared]
    plan = panel.plan_for(some, settings.steps, settings.seed)
    methods = _rivals(settings, plan, some, windows.count)
    limit = Limit(60 * settings.minutes or None if is_auto else None)
    if is_auto:
        say(_plan_in_words(methods, windows, some, settings))
    if stride > 1:
        say(f"compared on {len(some)} of {len(columns)} series, fitted on all")
    tried, left_out = choice.try_all(
        methods, some, windows, seed=settings.seed, told=say, limit=limit, kept=kept,
        needed=None if is_auto else methods[0].label,
    )  # fmt: skip
    units = choice.naive_errors(some, windows)
    if is_auto:
        picked = choice.choose(tried, left_out, units, windows.count, first)
    else:
        picked = _as_asked(methods[0].label, tried, left_out, units, windows.count)
    say("fitting on everything")
    ensemble = refit(picked, compared, methods, columns, settings, say)
    counted = range(first, windows.count)
    own = choice.score([b.only(counted) for b in picked.chosen], units, counted)
    verdicts = _verdicts(own, picked, counted)
    return Experiment(
        settings,
        series=columns,
        compared=compared,
        windows=windows,
        first=first,
        choice=picked,
        published=settings.model,
        ensemble=ensemble,
        ahead=ensemble.look_ahead(columns, settings.steps),
        verdicts=verdicts,
        warning=_warning(settings, verdicts),
    )


def _columns(series: Sequence[Series], settings: Settings) -> list[Series]:
    """Every column as a series of its own, those that can be forecast, with what a model reads."""
    columns = single_columns(series)
    if settings.model == "auto" or not forecasters()[settings.model].network:
        columns = [_shortened(s) for s in columns]
    if settings.model == "auto":
        columns = with_season(columns)
    if settings.calendar:
        columns = [panel.with_calendar(s, settings.steps) for s in columns]
    check(columns, settings)
    return _without_short_ones(columns, settings)


def _shortened(series: Series) -> Series:
    """A series of at most `LONGEST` steps, which says so if it had more."""
    if len(series) <= LONGEST:
        return series
    note = f"{series.name}: {len(series):,} steps, the newest {LONGEST:,} are learned from"
    return replace(series.newest(LONGEST), notes=(*series.notes, note))


def _without_short_ones(columns: list[Series], settings: Settings) -> list[Series]:
    """The series that are long enough for one window, and for a model that was named.

    The first of them says which others are left out. Where none is long enough it is all of them:
    looking back at them is then refused in words.
    """
    season = columns[0].season

    def is_short(s: Series) -> bool:
        if panel.room_for(s, settings.steps, season) < 1:
            return True
        return settings.model != "auto" and _too_few(settings, s) is not None

    long = [s for s in columns if not is_short(s)]
    if not long or len(long) == len(columns):
        return columns
    short = [s for s in columns if all(s is not other for other in long)]
    note = f"left out, too short to forecast {settings.steps} ahead: {panel.named(short)}"
    return [replace(long[0], notes=(*long[0].notes, note)), *long[1:]]


def _too_few(settings: Settings, series: Series) -> str | None:
    return choice.too_few(settings.method(), series, settings.steps, settings.seed)


def _able(
    long: list[int], columns: list[Series], windows: Windows, settings: Settings
) -> list[int]:
    """Of these series those that a named model can learn from before the first window.

    Where it can from none it is all of them: the model then says what it lacks.
    """
    if settings.model == "auto":
        return long
    first = {i: columns[i].until(windows.starts(len(columns[i]))[0]) for i in long}
    return [i for i in long if _too_few(settings, first[i]) is None] or long


def _with_short_ones_named(
    columns: list[Series], long: list[int], windows: Windows
) -> list[Series]:
    """The series; the first that is too short to be looked back at says which others are."""
    short = sorted(set(range(len(columns))) - set(long))
    if not short:
        return columns
    note = (
        f"too short for {windows.count} windows of {windows.steps}: "
        f"{panel.named([columns[i] for i in short])}; forecast as the others are, and not measured"
    )
    first = columns[short[0]]
    named_there = replace(first, notes=(*first.notes, note))
    return [named_there if i == short[0] else s for i, s in enumerate(columns)]


def check(columns: list[Series], settings: Settings) -> None:
    """Refuse inputs that the model cannot read, or that do not reach into the future."""
    inputs = [panel.inputs_of(s) for s in columns]
    first = columns[0]
    given = {
        "known": first.known.shape[1],
        "past": first.past.shape[1],
        "static": len(first.static),
    }
    if settings.model != "auto":
        wanted = [kind for kind, count in given.items() if count]
        readers = [k for k, of in forecasters().items() if set(wanted) <= set(of.inputs)]
        for kind in wanted:
            if kind not in forecasters()[settings.model].inputs:
                raise UserError(
                    f"--model {settings.model} does not read inputs of the kind --{kind}, and "
                    f"{', '.join(columns[0].inputs) or 'calendar features'} were given",
                    hint=f"--model {' or '.join(readers)}, or auto",
                )
    for s, given_inputs in zip(columns, inputs, strict=True):
        if given_inputs is not None:
            try:
                given_inputs.check(len(s) + settings.steps)
            except UserError as short:
                raise UserError(f"{s.name}: {short.message}", hint=short.hint) from short


def _rivals(settings: Settings, plan: Any, some: list[Series], windows: int) -> list[Method]:
    """The model asked for, its direct form, and the baselines; or all that auto tries."""
    if settings.model == "auto":
        return choice.affordable(candidates(plan, some), some, windows, 60 * settings.minutes)
    asked = settings.method()
    if asked.kind in _BASELINES and asked != Method(asked.kind, name=asked.name):
        asked = replace(asked, name="")  # or it would be taken for the baseline of that name
    methods = [asked]
    if asked.of.direct and settings.steps > 1 and not plan.inputs:
        methods.append(replace(asked, direct=True, name=f"{asked.name}, direct"))
    methods += [Method(n) for n in _BASELINES if n != "seasonal" or plan.season]
    if asked.kind != "linear":
        methods.append(Method("linear"))
    return list({m.label: m for m in methods}.values())


def _plan_in_words(
    methods: list[Method], windows: Windows, columns: list[Series], settings: Settings
) -> str:
    networks = sum(m.of.network for m in methods)
    expected = sum(choice.expected_seconds(m, columns, windows.count) for m in methods)
    with_them = f", {networks} of them networks" if networks else ""
    time = f"about {math.ceil(expected / 60)} min" if expected > 60 else "less than a minute"
    limit = f"at most {settings.minutes:g} min" if settings.minutes else "no limit, no networks"
    return (
        f"auto: {len(methods)} forecasters{with_them} over {windows.count} windows of "
        f"{windows.steps} steps; {time} on a slow core, {limit}"
    )


def _as_asked(
    name: str,
    tried: dict[str, list[Backtest]],
    left_out: dict[str, str],
    units: NDArray[np.float64],
    count: int,
) -> Choice:
    scores = {m: choice.score(b, units, range(count)) for m, b in tried.items()}
    return Choice(tried, scores, [(name,)] * len(units), left_out, tried[name], tried[name])


def refit(
    picked: Choice,
    compared: list[int],
    methods: list[Method],
    columns: list[Series],
    settings: Settings,
    say: Told,
) -> Ensemble:
    """Fit what was chosen on everything that is known, and set how wide its intervals are.

    A series that was not compared gets what most of the others chose, as far as it is long enough.
    """
    usual = Counter(picked.members).most_common(1)[0][0]
    own = dict(zip(compared, picked.members, strict=True))
    by_label = {m.label: m for m in methods}

    def learned_by(s: Series) -> tuple[str, ...]:
        few = [choice.too_few(by_label[m], s, settings.steps, settings.seed) for m in usual]
        able = tuple(m for m, refusal in zip(usual, few, strict=True) if refusal is None)
        return able or (usual if settings.model != "auto" else ("last",))

    members = [own[i] if i in own else learned_by(s) for i, s in enumerate(columns)]
    fitted: dict[str, Fitted] = {}
    for name in dict.fromkeys(m for labels in members for m in labels):
        users = [i for i, labels in enumerate(members) if name in labels]
        line = f"fitting {name}"
        say(line)
        with listening(lambda said, line=line: say(f"{line}, {said}")):
            fitted[name] = _fit_some(by_label[name], columns, users, settings)
    widen = {level: widening(picked.crossed, level) for level in settings.levels}
    named = tuple(s.name for s in columns)
    return Ensemble(fitted, members, named, widen, settings.steps, settings.seed)


def _fit_some(
    method: Method, columns: list[Series], users: list[int], settings: Settings
) -> Fitted:
    """Fit a method for the series that use it; a shared one learns from all of them.

    In the place of a series that does not use it stands another's model, which is never asked.
    """
    if method.of.shared or len(users) == len(columns):
        return panel.fit(method, columns, settings.steps, settings.seed)
    part = panel.fit(method, [columns[i] for i in users], settings.steps, settings.seed)
    place = {i: n for n, i in enumerate(users)}
    at = [place.get(i, 0) for i in range(len(columns))]
    return Fitted(method, [part.models[n] for n in at], [part.errors[n] for n in at])


def _verdicts(own: NDArray[np.float64], picked: Choice, counted: range) -> list[Verdict]:
    """The published forecast beside the naive ones."""
    rivals = [n for n in ("seasonal", "last") if n in picked.scores]
    return [choice.compare(own, picked.scores[n][:, list(counted)], n) for n in rivals]


def _warning(settings: Settings, verdicts: list[Verdict]) -> str | None:
    """Words for a named model that naive forecasts beat."""
    worse = [v for v in verdicts if round(v.better, 3) < 0]
    if not worse:
        return None
    worst = min(worse, key=lambda v: v.better)
    asked = f"--model {settings.model}"
    tail = "; --model auto chooses what does best" if settings.model != "auto" else ""
    return f"{asked} did worse than {worst.rival} in its own backtest ({worst}){tail}"


def about(answer: dict[str, Any]) -> dict[str, Any]:
    """What is kept beside a fitted forecaster for people to read: scores, verdicts, losses."""
    own = next(iter(answer["scores"].values()))
    score = {k: _mean(own[k]) for k in ("mase", "scaled_crps")}
    kept = {k: answer[k] for k in ("model", "published", "verdicts", "warning", "losses")}
    return kept | {"score": score}


def _mean(row: list[float | None] | None) -> float | None:
    known = [x for x in row or [] if x is not None]
    return sum(known) / len(known) if known else None


def _parts(series: Series, windows: Windows, first: int) -> dict[str, int]:
    starts = windows.starts(len(series))
    return {"train": starts[first], "test": len(series) - starts[first]}


def _growth(score: Scores) -> dict[str, Any] | None:
    if score.rmse is None or len(score.rmse) < 2:
        return None
    fitted = accuracy.growth(score.rmse)
    return {
        "first": fitted.first,
        "factor": fitted.factor,
        "predicted": plain(fitted.predicted),
    }
