"""The report of a run: one page with what happened, how good it is, and what to type next."""

import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from elman import __version__
from elman.figures import training as figures
from elman.files import write_text
from elman.reports import page, through_time
from elman.runs.folder import Config, Run, fresh_model
from elman.runs.shown import Shown
from elman.scoring import evaluation, metrics
from elman.scoring.evaluation import title
from elman.scoring.metrics import Score
from elman.text.levels import level_of

Record = dict[str, Any]

SAMPLES = 8
"""How many samples the page shows, from the first to the last."""


class Story(NamedTuple):
    """What a run's record says, sorted by kind."""

    updates: list[Record]
    validations: list[Record]
    samples: list[Record]
    diagnoses: list[Record]
    result: Record | None  # the score of the run's weights, once the training has ended
    epochs: list[Record]

    @classmethod
    def of(cls, records: Iterable[Record]) -> "Story":
        """Sort the lines of metrics.jsonl."""
        by_kind: dict[str, list[Record]] = {}
        for record in records:
            by_kind.setdefault(record["kind"], []).append(record)
        results = by_kind.get("result", [])
        return cls(
            by_kind.get("update", []),
            by_kind.get("validation", []),
            by_kind.get("sample", []),
            by_kind.get("diagnosis", []),
            results[-1] if results else None,
            by_kind.get("epoch", []),
        )


def write(run: Run) -> Path:
    """Write report.html into the run's folder, from its files alone; returns its path."""
    parts = run.splits()
    baselines = {}
    if len(parts.reported) > 1:
        baselines = evaluation.baselines(parts.train, parts.reported, run.vocab)
    seen = through_time.look(run, parts.validation if len(parts.validation) else parts.train)
    path = run.path / "report.html"
    write_text(path, render(run, Story.of(run.metrics()), baselines, len(parts.train), seen))
    return path


def render(
    run: Run,
    story: Story,
    baselines: dict[str, Score],
    trained_on: int,
    seen: through_time.Look | None = None,
) -> str:
    """The page itself."""
    config = run.config
    heading = f"{run.path.absolute().name}: {_model_words(config.model)}"
    body = [
        f"<h1>{page.text(heading)}</h1>",
        f'<p class="soft">{page.text(_lead(config, trained_on, story))}</p>',
        *([f'<p class="soft">Ran with {page.text(config.ran)}.</p>'] if config.ran else ()),
        page.tiles(_tiles(run, story)),
        _figure(partial(_perplexity, story, baselines), "perplexity", _perplexity_words(story)),
        *_scores(story, baselines),
        "<h2>Gradients</h2>",
        _figure(partial(_norms, story, config), "gradients", _norm_words(story, config)),
        *_horizons(story, config),
        *(through_time.section(seen, config.training.reading.window) if seen else ()),
        *_samples(story, config.shown),
        "<h2>Settings</h2>",
        page.settings(_settings(config)),
        "<h2>Commands</h2>",
        *_commands(run),
        f"<footer>Written by elman {page.text(__version__)}.</footer>",
    ]
    return page.page(heading, body)


# ---------------------------------------------------------------------- words and numbers


def _model_words(model: dict[str, Any]) -> str:
    units = f"{model['hidden_size']} units"
    if model["layers"] > 1:
        units = f"{model['layers']} layers of {units}"
    return f"{model['cell']}, {units}"


def _lead(config: Config, trained_on: int, story: Story) -> str:
    level = level_of(config.data.level).units
    updates = story.updates[-1]["step"] if story.updates else 0
    text = (
        f"A model of {config.data.source}, trained on {trained_on:,} {level} in {updates:,} updates"
    )
    if (
        story.result is None
        and not config.data.holds_out
        and _passes(story) >= config.training.epochs
    ):
        return f"{text}; nothing was held out."
    if story.result is None:
        return f"{text}; the training has not come to its end yet."
    where = "right after them" if config.data.train_tokens else "held out at the end"
    if config.data.test and config.data.validation:
        where = "held out after those that chose its weights"
    return f"{text} and measured on the {story.result['tokens'] + 1:,} {level} {where}."


def _passes(story: Story) -> int:
    """How often the whole text was read: an update that ends the last pass has progress 1."""
    last = story.updates[-1] if story.updates else {"epoch": 0, "progress": 0.0}
    return last["epoch"] + (last["progress"] == 1.0)


def _tiles(run: Run, story: Story) -> dict[str, str]:
    weights = sum(p.numel() for p in fresh_model(run.config).parameters())
    tiles = {}
    if story.result is not None:
        tiles[f"{story.result['part']} perplexity"] = f"{story.result['perplexity']:.3f}"
        tiles["bits per character"] = f"{story.result['bits_per_char']:.3f}"
    elif story.validations:
        best = min(record["perplexity"] for record in story.validations)
        tiles["best validation perplexity"] = f"{best:.3f}"
    tiles["weights"] = f"{weights:,}"
    if story.updates:
        seconds = sum(r["tokens"] / r["tokens_per_second"] for r in story.updates)
        speed = float(np.median([r["tokens_per_second"] for r in story.updates]))
        tiles["spent on updates"] = _duration(seconds)
        tiles["tokens per second"] = f"{speed:,.0f}"
    return tiles


def _duration(seconds: float) -> str:
    """
    >>> _duration(9.4), _duration(75), _duration(7300)
    ('9 s', '1 min 15 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


# ---------------------------------------------------------------------- perplexity


def _curve(records: Sequence[Record], name: str) -> figures.Curve:
    return figures.Curve([r["step"] for r in records], [r[name] for r in records])


def _figure(draw: Callable[..., Figure], name: str, caption: str) -> str:
    """A drawing for wide screens and one for narrow ones."""
    return page.figure(draw(), name, caption, narrow=draw(narrow=True))


def _perplexity(story: Story, baselines: dict[str, Score], *, narrow: bool = False) -> Figure:
    lines = {title(name): score.perplexity for name, score in baselines.items()}
    return figures.perplexity(
        _curve(story.updates, "perplexity"),
        _curve(story.validations, "perplexity"),
        lines,
        narrow=narrow,
    )


def _perplexity_words(story: Story) -> str:
    text = "Training perplexity is measured on the fly, with whatever dropout the model trains with"
    if story.validations:
        text += "; validation is on the text held out to choose by"
    if story.result is not None:
        text += f", the dashed baselines are on the {story.result['part']} text"
    return text + ". The band is the range of what each point averages."


def _scores(story: Story, baselines: dict[str, Score]) -> list[str]:
    """The table of the held-out text: the model among its baselines, worst first."""
    if story.result is None:
        return []
    result = story.result
    characters = result["nats_per_token"] * result["tokens"] / result["bits_per_char"] / math.log(2)
    rows = [
        (title(name), score.nats_per_token, score.bits_per_char(round(characters)))
        for name, score in baselines.items()
    ]
    rows.append(("this model", result["nats_per_token"], result["bits_per_char"]))
    rows.sort(key=lambda row: -row[1])
    own = next(i for i, row in enumerate(rows) if row[0] == "this model")
    cells = [(name, f"{n:.4f}", f"{metrics.perplexity(n):,.3f}", f"{b:.4f}") for name, n, b in rows]
    head = (f"{result['part']} text", "nats per token", "perplexity", "bits per character")
    return ["<h2>Beside counting</h2>", page.table(head, cells, own)]


# ---------------------------------------------------------------------- gradients


def _norms(story: Story, config: Config, *, narrow: bool = False) -> Figure:
    clip = config.training.optimisation.clip
    return figures.gradient_norms(_curve(story.updates, "gradient_norm"), clip, narrow=narrow)


def _norm_words(story: Story, config: Config) -> str:
    clip = config.training.optimisation.clip
    if clip is None:
        return "The length of the gradient at each update; this run never clips it."
    share = figures.clipped_share(_curve(story.updates, "gradient_norm"), clip)
    return (
        f"The length of the gradient at each update, before it is clipped to θ = {clip:g}: "
        f"g ← min(1, θ/‖g‖) g. {share:.0%} of the updates were clipped."
    )


def _horizons(story: Story, config: Config) -> list[str]:
    """How far back the gradient reached, where the training looked."""
    if not story.diagnoses:
        return []
    last, window = story.diagnoses[-1], config.training.reading.window
    words = (
        "How many steps back half, and 90 %, of the gradient lies, measured on a short passage, "
        "at most 48 steps back. "
        f"After {last['step']:,} updates half lay within {_steps(last['half_within'])} and 90 % "
        f"within {_steps(last['ninety_within'])}; a window of {window} keeps "
        f"{100 * last['window_keeps']:.0f} % of it, and {100 * last['saturation']:.1f} % of the "
        "states were saturated."
    )
    if len(story.diagnoses) == 1:  # one point does not make a curve
        return [f'<p class="soft">{page.text(words)}</p>']
    half, ninety = (_curve(story.diagnoses, f"{part}_within") for part in ("half", "ninety"))
    return [_figure(partial(figures.horizons, half, ninety), "horizons", words)]


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


# ---------------------------------------------------------------------- samples


def _samples(story: Story, shown: Shown) -> list[str]:
    """What the model wrote along the way, always from the same beginning."""
    if not story.samples:
        return []
    scores = {r["step"]: f"validation perplexity {r['perplexity']:.2f}" for r in story.validations}
    if shown.sample_every:
        scores = {r["step"]: f"training perplexity {r['perplexity']:.2f}" for r in story.epochs}
    parts = [
        "<h2>What it wrote along the way</h2>",
        f'<p class="soft">{page.text(shown.words())}</p>',
    ]
    for index in spaced(len(story.samples), SAMPLES):
        sample = story.samples[index]
        score = scores.get(sample["step"])
        beside = f", {score}" if score is not None else ""
        heading = f"after {sample['step']:,} updates{beside}"
        parts.append(
            f'<div class="sample"><h3>{page.text(heading)}</h3>'
            f"<pre>{page.text(sample['text'])}</pre></div>"
        )
    return parts


def spaced(count: int, wanted: int) -> list[int]:
    """At most `wanted` of 0 … count-1, the first and the last among them, evenly spread.

    >>> spaced(20, 5), spaced(3, 6)
    ([0, 5, 10, 14, 19], [0, 1, 2])
    """
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, wanted)).tolist()})


# ---------------------------------------------------------------------- settings and commands


def _settings(config: Config) -> dict[str, dict[str, object]]:
    """Every option of the run, by what it belongs to."""
    model = dict(config.model)
    dropout = model.pop("dropout")
    training = asdict(config.training)
    reading, optimisation = training.pop("reading"), training.pop("optimisation")
    groups = {
        "text": asdict(config.data) | {"sha256": config.sha256},
        "model": model | {f"dropout of {name}": p for name, p in dropout.items()},
        "reading": reading,
        "updates": optimisation,
        "training": training | {"device": config.device, "threads": config.threads},
        "samples": asdict(config.shown),
    }
    return {
        group: {name.replace("_", " "): _value(value) for name, value in values.items()}
        for group, values in groups.items()
    }


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None or value == "" else str(value)


def _commands(run: Run) -> list[str]:
    where = shlex.quote(str(run.path))
    commands = {
        "Make this run again, in another folder:": again(run.config.command, run.path),
        "Train it further, from exactly where it stopped:": f"elman train --resume {where} "
        f"--epochs {2 * run.config.training.epochs}",
        "Score it on the held-out text, or on any other:": f"elman evaluate {where}\n"
        f"elman evaluate {where} OTHER.txt",
        "Let it write:": f"elman generate {where} --length 500 --temperature 0.8 --seed 1",
    }
    return [
        f"<p>{page.text(words)}</p><pre>{page.text(line)}</pre>" for words, line in commands.items()
    ]


def again(command: str, path: Path) -> str:
    """The command that made a run, writing beside it instead of over it.

    >>> again("elman train book.txt --out runs/a --force", Path("runs/a"))
    'elman train book.txt --out runs/a-again'
    """
    kept, skip = [], False
    for word in shlex.split(command):
        if not skip and word != "--force" and word != "--out" and not word.startswith("--out="):
            kept.append(word)
        skip = word == "--out"
    return shlex.join([*kept, "--out", f"{path}-again"])
