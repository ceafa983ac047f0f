"""`elman gradients`: where the gradient of a trained model goes, in words, numbers and pictures."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from elman.cli.console import emit, note
from elman.cli.device import use_threads
from elman.cli.limits import RunFolder, a_path
from elman.cli.source import read_like
from elman.files import check_new_folder

if TYPE_CHECKING:
    from elman.diagnostics import ByLag, CarryScore, Clipping, Units
    from elman.language_model import LanguageModel
    from elman.runs import Run

NEAR, FAR = 400, 2049
"""Tokens that are read: for the units and the carries; for the lags, twice as far as any goes."""


def gradients(
    run: RunFolder,
    source: Annotated[
        str | None, typer.Argument(help="Text to read (default: the run's held-out part)")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=8, max=10**6, help="Tokens of the text to read (default: as many as it takes)"
        ),
    ] = None,
    lags: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10**6,
            help="Steps back to follow a loss (default: until hardly any gradient is left)",
        ),
    ] = None,
    draws: Annotated[
        int, typer.Option(min=2, max=10**4, help="Draws of each randomised carry")
    ] = 20,
    figure: Annotated[
        Path | None,
        typer.Option(help="Draw every picture into this folder", parser=a_path, metavar="FOLDER"),
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0: as many as there are")] = 0,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout")] = False,
) -> None:
    """See the gradient: how far back it reaches, which units are stuck, what a window cuts off."""
    from elman.runs import Run

    if figure is not None:
        check_new_folder(figure, "--figure")
    use_threads(threads)
    opened = Run.open(run)
    model = opened.load_model()
    window = opened.config.training.reading.window
    text = text_ids(opened, source)
    ids = text[: steps or NEAR]
    far = text[: steps or (FAR if lags is None else max(NEAR, 2 * lags + 1))]
    measures = measured(opened, model, ids, far, lags, draws)
    answer = summary(measures, window, len(ids) - 1)
    if figure is not None:
        answer["figures"] = draw(figure, opened, model, ids, measures, window)
    if json:
        emit(answer)
        return
    print(answer["verdict"])
    print_numbers(measures, window)
    quoted = shlex.quote(str(run))
    if figure is None:
        note(f"next: elman gradients {quoted} --figure {shlex.quote(str(run / 'pictures'))}")
    else:
        note(f"drew {len(answer['figures'])} figures into {figure}")
        note(f"next: elman report {quoted}")


def text_ids(opened: Run, source: str | None) -> Any:
    """The given text as ids, or the run's held-out part."""
    from elman.errors import UserError, counted
    from elman.text import prepared

    if source is None:
        parts = opened.splits()
        ids = parts.validation if len(parts.validation) else parts.train
    else:
        data, text = opened.config.data, read_like(opened.config.data, source)
        ids = prepared.all_held_out(data, text, opened.vocab).validation
    if len(ids) < 9:
        raise UserError(
            f"{counted(len(ids), 'tokens')} are too few to see a gradient through time",
            hint="a text of at least 9 tokens",
        )
    return ids


def measured(
    opened: Run, model: LanguageModel, ids: Any, far: Any, lags: int | None, draws: int
) -> dict[str, Any]:
    """Everything that is measured: lags over the `far` text, all else over `ids`."""
    from elman import diagnostics as d

    passage, window = d.Passage.read(model, ids), opened.config.training.reading.window
    return {
        "by_lag": d.by_lag(d.Passage.read(model, far), lags),
        "units": d.units(passage),
        "exponents": d.lyapunov_exponents(d.Passage.read(model, ids[:101]), 1),
        "radius": d.spectral_radius(passage),
        "carries": d.compare_carries(model, ids, min(window, (len(ids) - 1) // 2), draws),
        "clipping": norms(opened),
    }


def norms(opened: Run) -> Clipping | None:
    """How the run's gradient norms stood to its clipping threshold."""
    from elman.diagnostics import clipping

    recorded = [r["gradient_norm"] for r in opened.metrics() if "gradient_norm" in r]
    return clipping(recorded, opened.config.training.optimisation.clip) if recorded else None


def verdict(by_lag: ByLag, units: Units, exponent: float, window: int) -> str:
    """The short answer, in words: how far back, and whether anything is wrong."""
    least = "" if by_lag.settled else "at least "
    if exponent > 0.01:
        flow = f"exploding: yes, small changes grow by {exponent:.2f} a step"
    elif by_lag.decay < -1:
        flow = f"vanishing: the gradient falls by a factor of {math.exp(-by_lag.decay):.1f} a step"
    else:
        flow = "exploding: no"
    return (
        f"{by_lag.words(window)}\n"
        f"to keep 90 %: {least}--window {by_lag.recommend()}; "
        f"{units.saturated} of {units.total} units are saturated, {units.dead} never move; {flow}"
    )


def summary(measures: dict[str, Any], window: int, steps: int) -> dict[str, Any]:
    """Everything that was measured, as JSON."""
    by_lag, units = measures["by_lag"], measures["units"]
    exponent = float(measures["exponents"][0])
    return {
        "verdict": verdict(by_lag, units, exponent, window),
        "steps": steps,
        "window": window,
        "mean_norm_by_lag": by_lag.mean.tolist(),
        "decay_per_step": by_lag.decay if by_lag.decay > float("-inf") else None,
        "half_within": by_lag.horizon(0.5),
        "ninety_within": by_lag.horizon(0.9),
        "window_keeps": by_lag.kept(window),
        "recommended_window": by_lag.recommend(),
        "lags": by_lag.lags,
        "settled": by_lag.settled,
        "share_beyond": by_lag.beyond if math.isfinite(by_lag.beyond) else None,
        "units": units.total,
        "saturated_units": units.saturated,
        "dead_units": units.dead,
        "gate_openness": [
            {gate: float(v.mean()) for gate, v in layer.items()} for layer in units.openness
        ],
        "largest_lyapunov_exponent": exponent,
        "spectral_radius": measures["radius"],
        "carries": [carry_record(score) for score in measures["carries"]],
        "clipping": vars(measures["clipping"]) if measures["clipping"] else None,
    }


def carry_record(score: CarryScore) -> dict[str, Any]:
    return {**vars(score), "carry": score.name}


def print_numbers(measures: dict[str, Any], window: int) -> None:
    """The numbers behind the verdict."""
    by_lag, units = measures["by_lag"], measures["units"]
    print("\nlag      mean ‖∂L/∂h‖   share so far")
    for k in sorted({0, 1, 2, 5, 10, 20, window, len(by_lag.share) - 1}):
        if k < len(by_lag.share):
            print(f"{k:>3} {by_lag.mean[k]:18.3e} {by_lag.share[k]:14.1%}")
    print(beyond(by_lag))
    for i, layer in enumerate(units.openness):
        if layer:
            openings = ", ".join(f"{gate} {v.mean():.2f}" for gate, v in layer.items())
            print(f"\nlayer {i + 1} gates, mean opening: {openings}")
    print(
        f"\nlargest Lyapunov exponent {measures['exponents'][0]:+.3f} per step; "
        f"spectral radius of W_hh {', '.join(f'{r:.2f}' for r in measures['radius'])}"
    )
    print(f"\n{'carry':36}{'cosine':>8}{'norm':>7}{'bias':>7}{'noise':>7}{'steps kept':>12}")
    for s in measures["carries"]:
        print(
            f"{s.name:36}{s.cosine:8.4f}{s.norm_ratio:7.2f}{s.bias:7.3f}{s.deviation:7.3f}"
            f"{s.steps_kept:12}"
        )
    clip = measures["clipping"]
    if clip:
        print(
            f"\ngradient norms of the training: median {clip.median:.3g}, 90 % below "
            f"{clip.ninety:.3g}, largest {clip.largest:.3g}; clipped {clip.clipped:.0%} of updates"
        )


def beyond(by_lag: ByLag) -> str:
    """How far the losses were followed, and what that leaves out."""
    if not math.isfinite(by_lag.beyond):
        return f"followed {by_lag.lags} steps back, where the gradient does not fall yet"
    return (
        f"followed {by_lag.lags} steps back; if it goes on falling as there, "
        f"{by_lag.beyond:.1%} lies beyond"
    )


def draw(
    folder: Path, opened: Run, model: LanguageModel, ids: Any, measures: dict[str, Any], window: int
) -> list[str]:
    """Every picture, as SVG files in a folder."""
    from elman import diagnostics as d
    from elman.figures import diagrams, save
    from elman.figures import gradients as pictures

    folder.mkdir(parents=True, exist_ok=True)
    tokens = [str(opened.vocab.to_tokens(int(i))) for i in ids[:60]]
    short = d.Passage.read(model, ids[:60])
    drawn = {
        "lags": pictures.lags(measures["by_lag"], window),
        "units": pictures.units(d.units(short), tokens[:-1]),
        "directions": pictures.directions(d.singular_values(short, _lags(len(short)))),
        "tokens": pictures.attribution(
            d.attribute(model, ids[:40]), tokens[:39][: len(ids) - 1], tokens[min(39, len(ids) - 1)]
        ),
        "carries": carries_picture(model, ids, opened, window),
        "unrolled": diagrams.unrolled(model, opened.config.training.reading.batch_size),
        "next-token": diagrams.character_model(model, ids[:8], opened.vocab.idx_to_token),
    }
    if model.shape.layers == 1:
        drawn["graph"] = diagrams.graph(model, ids[:4])
    return [str(save(figure, folder / f"{name}.svg")) for name, figure in drawn.items()]


def carries_picture(model: LanguageModel, ids: Any, opened: Run, window: int) -> Any:
    """The carries over as much text as can be read in one line, with windows that fit in it."""
    from elman import diagnostics as d
    from elman.diagnostics.carries import carries
    from elman.figures import gradients as pictures

    tokens = [str(opened.vocab.to_tokens(int(i))) for i in ids[:72]]
    letters = np.cumsum([max(len(token), 1) for token in tokens])
    tokens = tokens[: max(int(np.searchsorted(letters, 80)), 8)]
    small = max(min(window, len(tokens) // 4), 1)
    level = opened.vocab.level_used.units
    title = (
        f"What each carry lets the gradient cross, over {len(tokens)} {level}, so with windows "
        f"of {max(small // 2, 1)} to {2 * small} (this run trained with {window})"
    )
    scores = d.compare_carries(model, ids, small, draws=10)
    fresh = [
        replace(score, carry=carry)  # so that the picture shows the first draw
        for score, carry in zip(scores, carries(small), strict=True)
    ]
    return pictures.carries(fresh, tokens, title)


def _lags(steps: int) -> tuple[int, ...]:
    return tuple(k for k in (1, 2, 4, 8, 16, 32) if k <= steps)
