"""`elman evaluate`: how well a run predicts a text, beside what counting does."""

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elman.cli.console import emit, note, quiet
from elman.cli.device import pick, use_threads
from elman.cli.limits import RunFolder
from elman.cli.source import printable
from elman.errors import UserError
from elman.options import DEVICES

if TYPE_CHECKING:
    from elman.runs import Run
    from elman.scoring.evaluation import Evaluation
    from elman.scoring.metrics import Score
    from elman.training import Processes


def evaluate(
    run: RunFolder,
    source: Annotated[
        str | None,
        typer.Argument(
            help="Text to score: name, file, folder or - (default: what the run held out)",
            show_default=False,
        ),
    ] = None,
    baselines: Annotated[
        bool, typer.Option(help="Score counting models of the training text, too")
    ] = True,
    mix: Annotated[
        list[str] | None,
        typer.Option(help="Mix the model with a counting model: kneser-ney:7", show_default=False),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="best (by validation) or last", show_default="the run's own"),
    ] = None,
    chunks: Annotated[
        int,
        typer.Option(
            min=0,
            help="Read the text in so many chunks side by side, to 1e-5 of the state; 0: in order",
        ),
    ] = 0,
    device: Annotated[str, typer.Option(help=DEVICES)] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0: as many as there are")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout")] = False,
) -> None:
    """Score a text with a trained model: nats, perplexity, bits per character.

    Every token after the first is predicted once, with the state carried through the whole text.
    Under torchrun every process reads a stretch of it.
    """
    from elman.runs import Run
    from elman.scoring import evaluation
    from elman.training import Processes

    processes = Processes.from_environment()
    with quiet(unless=processes.first):
        use_threads(threads)
        opened, device = Run.open(run), pick(device)
    if mix and not baselines:
        raise UserError("--mix counts the training text, too", hint="leave out --no-baselines")
    ids, characters, train, what = _texts(opened, source, baselines)
    model = opened.load_model(processes.place(device), weights)
    if chunks:
        model.read_in_chunks(chunks)
    score = _together(model, ids, processes)
    if not processes.first:
        return
    scores = evaluation.evaluate(
        model,
        opened.vocab,
        ids,
        train=train,
        mix=mix or (),
        characters=characters,
        score=score,
    )
    if as_json:
        where = {"source": source or opened.config.data.source}
        where["split"] = "validation" if source is None else "all"
        emit({"run": str(run), **where, **scores.json()})
        return
    if chunks:
        note(f"time: {model.recurrence.seams.forward}")
    typer.echo(printable(_table(opened, scores, what)))
    if scores.unknown:
        note("note: which unknown token it was is not asked of anyone, so bits/char flatter all")
    note(f"next: elman generate {shlex.quote(str(run))}")


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


def _texts(run: "Run", source: str | None, baselines: bool) -> tuple:
    """What to score, the characters of text that it predicts, what the baselines count (None: no
    baselines), and what to call the first."""
    from elman.text import prepared

    if source is not None:
        whole = prepared.read(run.config.data, source)
        parts = prepared.all_held_out(run.config.data, whole, run.vocab)
        what = "stdin" if source == "-" else source
        train = run.splits().train if baselines else None
        return parts.validation, parts.predicted_characters, train, what
    parts = run.splits()
    if len(parts.validation) < 2:
        raise UserError(
            "this run held nothing out: there is no text it has not trained on",
            hint=f"elman evaluate {shlex.quote(str(run.path))} OTHER.txt",
        )
    what = f"{run.config.data.source}, the {run.config.data.validation:.0%} held out"
    train = parts.train if baselines else None
    return parts.validation, parts.predicted_characters, train, what


def _table(run: "Run", scores: "Evaluation", what: str) -> str:
    """The scores for people, worst first, the model marked."""
    from elman.scoring.evaluation import title

    level = run.vocab.level_used.unit
    unknown = f"{scores.unknown:,} of them unknown" if scores.unknown else "none of them unknown"
    rows = [(title(name), score) for name, score in scores.baselines.items()]
    rows.append((f"this run: {run.config.model['cell']}", scores.model))
    if scores.mixture is not None:
        rows.append(("mixture " + _share(scores.mixture.weights), scores.mixture.score))
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


def _share(weights: Mapping[str, float]) -> str:
    """
    >>> _share({"model": 0.75, "kneser-ney:7": 0.25})
    '75 % model + 25 % kneser-ney:7'
    """
    return " + ".join(f"{weight:.0%} {name}".replace("%", " %") for name, weight in weights.items())
