"""`elman evaluate`: how well a run predicts a text, beside what counting does."""

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from elman.cli.console import emit, note, quiet
from elman.cli.console import progress as console_progress
from elman.cli.device import pick, use_threads
from elman.cli.limits import RunFolder, a_path
from elman.cli.source import printable, read_like
from elman.errors import UserError
from elman.options import DEVICES

if TYPE_CHECKING:
    from elman.language_model import LanguageModel
    from elman.runs import Run
    from elman.scoring.dynamic import Adaptation
    from elman.scoring.evaluation import Evaluation
    from elman.scoring.metrics import Score
    from elman.text.vocab import Vocab
    from elman.training import Processes


Source = Annotated[
    str | None,
    typer.Argument(
        help="Text to score: name, file, folder or - (default: the run's own test part)",
        show_default=False,
    ),
]
WORTH_SAYING = 0.05
"""The share of a text, seen in training, from which on its scores are not those of a new text."""
COUNTS = "counts"
"""The name of the compressor's counting."""
Baselines = Annotated[bool, typer.Option(help="Score counting models of the training text, too")]
Mix = Annotated[
    list[str] | None,
    typer.Option(
        help="Mix it with kneser-ney:7, with counts, or with another run of the same text",
        show_default=False,
    ),
]
Part = Annotated[
    str | None, typer.Option(help="Of the run's own text: test or validation", show_default="test")
]
Adapt = Annotated[
    bool, typer.Option("--adapt", help="Score it also while it learns from what it has read")
]
Rate = Annotated[float | None, typer.Option(min=0, help="How fast", show_default="by validation")]
Decay = Annotated[
    float | None,
    typer.Option(min=0, help="Back to what was trained", show_default="by validation"),
]
Cache = Annotated[
    int, typer.Option(min=0, help="Mix in a cache of so many of the latest states; 0: none")
]
Weights = Annotated[
    str | None,
    typer.Option(help="best (by validation) or last", show_default="the run's own"),
]
Chunks = Annotated[
    int,
    typer.Option(
        min=0,
        help="Read the text in so many chunks side by side, to 1e-5 of the state; 0: in order",
    ),
]
Threads = Annotated[int, typer.Option(min=0, help="Threads; 0: as many as there are")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout")]


def evaluate(
    run: RunFolder,
    source: Source = None,
    baselines: Baselines = True,
    mix: Mix = None,
    part: Part = None,
    adapt: Adapt = False,
    adapt_rate: Rate = None,
    adapt_decay: Decay = None,
    cache: Cache = 0,
    weights: Weights = None,
    chunks: Chunks = 0,
    device: Annotated[str, typer.Option(help=DEVICES)] = "auto",
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Score a text with a trained model: nats, perplexity, bits per character.

    Every token after the first is predicted once, with the state carried through the whole text.
    Under torchrun every process reads a stretch of it.
    """
    from elman.runs import Run
    from elman.training import Processes

    processes = Processes.from_environment()
    with quiet(unless=processes.first):
        use_threads(threads)
        opened, device = Run.open(run), pick(device)
    _check_together(mix, adapt, baselines, chunks)
    settings = _settings(adapt, adapt_rate, adapt_decay)
    text = _text(opened, source, part, baselines)
    mixing = _mixing(mix or [], opened)
    place = processes.place(device)
    model = opened.load_model(place, weights)
    if chunks:
        model.read_in_chunks(chunks)
    score = _together(model, text.ids, processes)
    if not processes.first:
        return
    others = {name: other.load_model(place) for name, other in mixing.runs.items()}
    scores = _scores(model, opened.vocab, text, mixing, others, settings, cache, score)
    if as_json:
        where = {"source": source or opened.config.data.source, "split": text.part}
        emit({"run": str(run), **where, **scores.json()})
        return
    if chunks:
        note(f"time: {model.recurrence.seams.forward}")
    _print(opened, scores, text.what, source)


def _scores(
    model: "LanguageModel",
    vocab: "Vocab",
    text: "Text",
    mixing: "Mixing",
    others: "Mapping[str, LanguageModel]",
    adapt: "bool | Adaptation",
    cache: int,
    score: "Score | None",
) -> "Evaluation":
    """The model, its baselines and what it is mixed with; `score` is its own, if known already."""
    from elman.compression import expectations
    from elman.scoring import evaluation

    with _progress((len(text.ids) - 1) * (1 + len(others)), bool(adapt)) as progress:
        return evaluation.evaluate(
            model,
            vocab,
            text.ids,
            train=text.train,
            mix=mixing.orders,
            characters=text.characters,
            validation=text.validation,
            adapt=adapt,
            cache=cache,
            counts=expectations if mixing.counts else None,
            others=others,
            progress=progress,
            score=score,
        )


def _print(run: "Run", scores: "Evaluation", what: str, source: str | None) -> None:
    typer.echo(printable(_table(run, scores, what)))
    if scores.unknown:
        note("note: no model has to say which unknown token it was, so bits/char flatter all")
    if (scores.seen or 0) >= WORTH_SAYING:
        note(_not_held_out(run, scores.seen or 0, source))
    note(f"next: elman generate {shlex.quote(str(run.path))}")


def _check_together(mix: list[str] | None, adapt: bool, baselines: bool, chunks: int) -> None:
    """Refuse options that contradict each other."""
    if (mix or adapt) and not baselines:
        flag, why = ("--mix", "counts") if mix else ("--adapt", "measures")
        raise UserError(f"{flag} {why} the training text, too", hint="leave out --no-baselines")
    if chunks and adapt:
        raise UserError(
            "--adapt reads a few tokens at a time, which leaves nothing to cut into --chunks",
            hint="leave out one of them",
        )


class Mixing(NamedTuple):
    """What the model is mixed with."""

    orders: list[str]  # names of counting models
    counts: bool
    runs: "dict[str, Run]"


def _mixing(names: list[str], own: "Run") -> Mixing:
    """What `--mix` names; a run must have read the same text, cut in the same way."""
    import numpy as np

    from elman.runs import Run

    paths = {name: a_path(name) for name in names if name != COUNTS}
    runs = {name: Run.open(path) for name, path in paths.items() if path.is_dir()}
    for name, other in runs.items():
        if other.vocab != own.vocab or not np.array_equal(other.splits().train, own.splits().train):
            raise UserError(
                f"{name} was not trained on the same part of the same text as {own.path}: what is "
                "scored here it may have seen",
                hint="train it with the same SOURCE, --level, --validation and --test",
            )
    rest = [name for name in names if name not in runs and name != COUNTS]
    return Mixing(rest, COUNTS in names, runs)


def _together(model: Any, ids: Any, processes: "Processes") -> "Score | None":
    """The score of several processes, each of which reads a stretch; None: there is but one."""
    from elman.scoring import metrics

    if processes.size == 1:
        return None
    mine = slice(processes.rank, processes.rank + 1)
    nats = metrics.nats_of_lanes(model, ids, processes.size, mine)
    if processes.first:
        note(f"note: {processes.size} stretches side by side, each after the 256 tokens before it")
    return metrics.Score(len(ids) - 1, sum(processes.numbers(nats)))


class Text(NamedTuple):
    """What to score, and beside what."""

    ids: Any
    characters: int | None  # of text, that all ids but the first stand for; None: to be counted
    train: Any  # what the baselines count; None: no baselines
    validation: Any  # what chooses; None: nothing is there to choose by
    part: str  # of the run's own text, or all
    what: str  # in words


def _text(run: "Run", source: str | None, part: str | None, baselines: bool) -> Text:
    """What is asked for: another text, or a part of the run's own."""
    if part not in (None, "test", "validation"):
        raise UserError(f"unknown part {part!r}", hint="test or validation")
    if source is None:
        return _own_text(run, part, baselines)
    if part is not None:
        raise UserError(
            f"--part {part} is of the run's own text", hint="leave it out, or the other text"
        )
    return _other_text(run, source, baselines)


def _other_text(run: "Run", source: str, baselines: bool) -> Text:
    from elman.text import prepared

    data, own = run.config.data, run.splits() if baselines else None
    parts = prepared.all_held_out(data, read_like(data, source), run.vocab)
    what = "stdin" if source == "-" else source
    train = None if own is None else own.train
    # a run with two parts was scored before with nothing chosen on its validation part
    choosing = own.validation if own is not None and data.test and len(own.validation) > 1 else None
    return Text(parts.validation, parts.predicted_characters, train, choosing, "all", what)


def _own_text(run: "Run", part: str | None, baselines: bool) -> Text:
    data, own = run.config.data, run.splits()
    part = part or own.part
    ids = own.test if part == "test" else own.validation
    if len(ids) < 2:
        other = f"elman evaluate {shlex.quote(str(run.path))} OTHER.txt"
        if len(own.reported) > 1:
            raise UserError(f"this run has no {part} part", hint=f"--part {own.part}, or {other}")
        raise UserError(
            "this run held nothing out: there is no text it has not trained on", hint=other
        )
    characters = own.predicted_characters if part == own.part else None
    train = own.train if baselines else None
    choosing = own.validation if part == "test" and len(own.validation) > 1 else None
    what = f"{data.source}, the {getattr(data, part):.0%} held out"
    what += f" ({part})" if data.test else ""
    return Text(ids, characters, train, choosing, part, what)


def _settings(adapt: bool, rate: float | None, decay: float | None) -> "bool | Adaptation":
    """Whether and how to adapt: True leaves the choice to the validation text."""
    from elman.scoring.dynamic import Adaptation

    if rate is None and decay is None:
        return adapt
    if not adapt:
        flag = "--adapt-decay" if rate is None else "--adapt-rate"
        raise UserError(f"{flag} belongs to --adapt", hint="add --adapt")
    usual = Adaptation()
    return Adaptation(
        rate=usual.rate if rate is None else rate, decay=usual.decay if decay is None else decay
    )


@contextmanager
def _progress(tokens: int, adapt: bool) -> Iterator["Callable[[int], None] | None"]:
    """A bar for what takes long: learning from every window."""
    if not adapt:
        yield None
        return
    with console_progress() as bar:
        task = bar.add_task("adapting", total=tokens)
        yield lambda read: bar.advance(task, read)


def _table(run: "Run", scores: "Evaluation", what: str) -> str:
    """The scores for people, worst first, the model marked."""
    from elman.scoring.evaluation import title

    level = run.vocab.level_used.unit
    unknown = f"{scores.unknown:,} of them unknown" if scores.unknown else "none of them unknown"
    rows = [(title(name), score) for name, score in scores.baselines.items()]
    rows.append((f"this run: {run.config.model['cell']}", scores.model))
    if scores.mixture is not None:
        rows.append(("mixture " + _share(scores.mixture.weights), scores.mixture.score))
    if scores.adapted is not None and scores.adaptation is not None:
        how = f"rate {scores.adaptation.rate:.2g}, decay {scores.adaptation.decay:.2g}"
        rows.append((f"this run, adapting ({how})", scores.adapted))
    if scores.online is not None:
        rows.append(("learning mixture " + _share(scores.online.weights), scores.online.score))
    if scores.bitwise is not None:
        rows.append(("bit by bit " + _sum(scores.bitwise.weights), scores.bitwise.score))
    rows.sort(key=lambda row: -row[1].nats_per_token)
    width = max(len(name) for name, _ in rows)
    lines = [
        f"{what}: {scores.model.tokens:,} {level}s predicted, {unknown}",
        "",
        f"{'':{width}}  nats/{level}  perplexity  bits/char",
    ]
    for name, score in rows:
        mark = " ←" if score is scores.model else ""
        lines.append(
            f"{name:{width}}  {score.nats_per_token:{5 + len(level)}.4f}  {score.perplexity:10,.3f}"
            f"  {scores.bits_per_char(score):9.4f}{mark}"
        )
    return "\n".join(lines)


def _not_held_out(run: "Run", seen: float, source: str | None) -> str:
    """What a text that was trained on says of a model, and of counting even more."""
    from elman.scoring.overlap import SPAN

    words = (
        f"note: {seen:.0%} of this text stands in the training text, too, {SPAN} tokens or more "
        "in a row, so its scores flatter all, and counting most"
    )
    if source is None or not run.config.data.validation:
        return words
    return f"{words}; elman evaluate {shlex.quote(str(run.path))} scores what was held out"


def _share(weights: Mapping[str, float]) -> str:
    """
    >>> _share({"model": 0.75, "kneser-ney:7": 0.25})
    '75 % model + 25 % kneser-ney:7'
    """
    return " + ".join(f"{weight:.0%} {name}".replace("%", " %") for name, weight in weights.items())


def _sum(weights: Mapping[str, float]) -> str:
    """
    >>> _sum({"model": 0.45, "counts": 0.6})
    '0.45 model + 0.60 counts'
    """
    return " + ".join(f"{weight:.2f} {name}" for name, weight in weights.items())
