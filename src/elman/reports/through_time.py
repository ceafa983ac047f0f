"""The part of a run's report that looks through time: lags, one prediction explained, carries."""

import math
from typing import Any, NamedTuple

from elman import diagnostics
from elman.diagnostics import Attribution, ByLag, CarryScore, lags
from elman.figures import gradients as pictures
from elman.reports import page
from elman.runs.folder import Run

LARGEST = 4_000_000
"""A model of more weights than this is looked at only when `elman gradients` asks for it."""
STEPS = 600
"""Tokens that are read."""
CONTEXT = 40
"""Tokens that the explained prediction is explained by."""
DRAWS = 4


class Look(NamedTuple):
    """What a finished model does over the beginning of a text."""

    by_lag: ByLag
    attribution: Attribution | None
    past: list[str]
    target: str
    carries: list[CarryScore]


def look(run: Run, ids: Any) -> Look | None:
    """Read the text with the run's best weights; None where there is nothing to see."""
    if len(ids) < 2 * lags.LEAST or not (run.path / "model.safetensors").exists():
        return None
    model = run.load_model()
    if not model.recurrent or sum(p.numel() for p in model.parameters()) > LARGEST:
        return None
    ids = ids[:STEPS]
    window = run.config.training.reading.window
    near = ids[: max(2 * window + 2, 3 * CONTEXT)]
    attribution, tokens = None, [""]
    if len(ids) > CONTEXT + 1:
        at = diagnostics.telling(model, ids[:256], CONTEXT)
        attribution = diagnostics.attribute(model, ids[at - CONTEXT : at + 1])
        tokens = [str(run.vocab.to_tokens(int(i))) for i in ids[at - CONTEXT : at + 1]]
    return Look(
        by_lag=diagnostics.by_lag(diagnostics.Passage.read(model, ids)),
        attribution=attribution,
        past=tokens[:-1],
        target=tokens[-1],
        carries=diagnostics.compare_carries(
            model, near, min(window, (len(near) - 1) // 2), draws=DRAWS
        ),
    )


def section(seen: Look, window: int) -> list[str]:
    """The section of the page."""
    words = seen.by_lag.words(window)
    parts = [
        "<h2>Through time</h2>",
        f"<p>{page.text(words[0].upper() + words[1:])}.</p>",
        page.figure(
            pictures.lags(seen.by_lag, window),
            "lags",
            "The length of ∂L/∂h, k steps before the loss, on the held-out text with the best "
            "weights; and how much of it a truncation window keeps, on average over the steps of "
            "the window.",
            narrow=pictures.lags(seen.by_lag, window, narrow=True),
        ),
    ]
    if seen.attribution is not None:
        parts += _explained(seen.attribution, seen.past, seen.target)
    return [*parts, *_carries(seen.carries)]


def _explained(found: Attribution, past: list[str], target: str) -> list[str]:
    strongest = int(abs(found.left_out).argmax())
    effect = "helped" if found.left_out[strongest] > 0 else "hindered"
    words = (
        f"How the tokens before it bear on the prediction of {shown(target)}, which came true with "
        f"P = {math.exp(found.log_probability):.2f}: the darker, the more would change without the "
        f"token. {shown(past[strongest])}, {len(past) - strongest} back, {effect} most, by "
        f"{abs(found.left_out[strongest]):.1f} nats. This prediction was chosen because the model "
        "needed what lies more than six tokens back."
    )
    return [
        "<h3>One prediction, explained</h3>",
        page.marked([visible(t) for t in past], found.left_out.tolist(), visible(target)),
        f'<p class="soft caption">{page.text(words)}</p>',
    ]


def _carries(scores: list[CarryScore]) -> list[str]:
    rows = [
        (s.name, f"{s.cosine:.3f}", f"{s.bias:.2f}", f"{s.deviation:.2f}", f"{s.steps_kept:,}")
        for s in scores
    ]
    return [
        "<h3>What other ways back would make of the gradient</h3>",
        page.table(("carry", "cosine", "bias", "noise", "states kept"), rows),
        '<p class="soft caption">The gradient of the recurrent weights by each carry, against the '
        "full one: the cosine of the angle between them, how far off it is on average (bias), how "
        "much it varies from draw to draw (noise), and how many states must be kept.</p>",
    ]


def visible(token: str) -> str:
    """A token as a reader sees it.

    >>> visible("\\n"), visible("a")
    ('↵', 'a')
    """
    return {" ": "␣", "\n": "↵", "\t": "⇥"}.get(token, token)


def shown(token: str) -> str:
    """A token in the middle of a sentence."""
    return f"“{visible(token)}”"
