"""`elman statistics`: which tokens, pairs and triples are frequent, and how Zipf's law fits."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elman.cli.console import emit, note
from elman.cli.limits import a_path
from elman.cli.source import (
    Clean,
    Encoding,
    Errors,
    Lower,
    Source,
    Tokenizer,
    VocabSize,
    data_of,
    follow_up,
    printable,
    read,
)
from elman.files import check_target

if TYPE_CHECKING:
    from elman.counting.statistics import Frequencies, StopWords, Zipf
    from elman.text.prepared import Data
    from elman.text.vocab import Vocab

    Row = tuple[Frequencies, Zipf | None, Zipf | None]


Level = Annotated[
    str | None,
    typer.Option(help="word, char, byte, bpe, or spaced words", show_default="word"),
]
Longest = Annotated[
    int, typer.Option("--n", min=1, max=100, help="Longest runs of tokens to count")
]
Share = Annotated[
    float, typer.Option(help="Stop words are the head that makes up this part of the text")
]
Last = Annotated[int | None, typer.Option(help="… to this rank (the last that occurs five times)")]
Figure = Annotated[
    Path | None,
    typer.Option(help="Draw to FILE.svg, .png or .pdf", parser=a_path, metavar="PATH"),
]


def statistics(
    context: typer.Context,
    source: Source = "python-reference",
    level: Level = None,
    vocab_size: VocabSize = 0,
    tokenizer: Tokenizer = "",
    clean: Clean = "newlines",
    lower: Lower = False,
    n: Longest = 3,
    top: Annotated[int, typer.Option(min=0, help="How many of the most frequent to show")] = 10,
    share: Share = 1 / 3,
    first: Annotated[int | None, typer.Option(help="Fit Zipf's law from this rank (10)")] = None,
    last: Last = None,
    figure: Figure = None,
    encoding: Encoding = "utf-8",
    errors: Errors = "strict",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count tokens and runs of tokens, and fit Zipf's law to each.

    At the word level the words count, not the punctuation and white space between them.
    """
    from elman.counting.statistics import stop_words

    data = data_of(
        context,
        "word",
        source=source,
        level=level,
        clean=clean,
        encoding=encoding,
        errors=errors,
        lower=lower,
        vocab_size=vocab_size or None,
        tokenizer=tokenizer or None,
    )
    data = replace(data, validation=0.0, test=0.0, min_freq=0)
    if figure is not None:
        check_target(figure, source)
    runs = _runs(data, n)
    rows = [_row(frequencies, first, last) for frequencies in runs]
    head = stop_words(runs[0], share)
    if figure is not None:
        _draw(rows, data.level, figure)
    if json:
        record = {"source": source, "level": data.level, "tokens": runs[0].total}
        emit(record | {"runs": [_record(row, top) for row in rows], "stop_words": head._asdict()})
    else:
        _print(rows, head, top)
    if figure is not None:
        note(f"wrote {printable(shlex.quote(str(figure)))}")
    ready = replace(data, validation=0.1, min_freq=None)
    note(f"next: {printable(follow_up('ngram', ready, order='1-5'))}")


def _runs(data: "Data", n: int) -> "list[Frequencies]":
    """Tokens, pairs, … runs of n tokens of the whole text, counted."""
    import numpy as np

    from elman.counting.statistics import frequencies
    from elman.text.prepared import prepare

    splits = prepare(data, read(data))
    ids = _content(np.asarray(splits.train), splits.vocab)
    return [frequencies(ids, k, splits.vocab) for k in range(1, n + 1)]


def _content(ids: Any, vocab: "Vocab") -> Any:
    """The tokens that are counted."""
    import numpy as np

    level = vocab.level_used
    return ids[np.array([level.is_content(token) for token in vocab.idx_to_token])[ids]]


def _row(frequencies: "Frequencies", first: int | None, last: int | None) -> "Row":
    """The two fits; none where nothing was asked for and the text is too short for them."""
    from elman.counting.statistics import zipf_least_squares, zipf_maximum_likelihood
    from elman.errors import UserError

    try:
        line = zipf_least_squares(frequencies.counts, first, last)
    except UserError:
        if first is not None or last is not None:
            raise
        return frequencies, None, None
    return frequencies, line, zipf_maximum_likelihood(frequencies.counts, first, last)


def _record(row: "Row", top: int) -> dict[str, Any]:
    frequencies, line, likely = row
    return {
        "n": frequencies.n,
        "total": frequencies.total,
        "types": frequencies.types,
        "hapaxes": frequencies.hapaxes,
        "most_common": [[list(gram), count] for gram, count in _most_common(frequencies, top)],
        "zipf": None
        if line is None or likely is None
        else {
            "first": line.first,
            "last": line.last,
            "least_squares": {"alpha": line.alpha, "c": line.c, "r2": line.r2},
            "maximum_likelihood": {"alpha": likely.alpha, "c": likely.c, "error": likely.error},
        },
    }


def _print(rows: list["Row"], head: "StopWords", top: int) -> None:
    for frequencies, line, likely in rows:
        name = {1: "tokens", 2: "pairs", 3: "triples"}.get(
            frequencies.n, f"runs of {frequencies.n}"
        )
        typer.echo(
            f"{name}: {frequencies.total:,} in all, {frequencies.types:,} different, "
            f"{frequencies.hapaxes:,} of them only once"
        )
        if line is not None and likely is not None:
            typer.echo(
                f"  Zipf, ranks {line.first} to {line.last:,}: α = {line.alpha:.3f} by least "
                f"squares (r² {line.r2:.3f}), {likely.alpha:.3f} ± {likely.error:.3f} by maximum "
                "likelihood"
            )
        for gram, count in _most_common(frequencies, top):
            typer.echo(f"  {count:>9,}  {_shown(gram)}")
    words = " ".join(_shown((word,)) for word in head.words)
    typer.echo(f"stop words, the {len(head.words)} that make up {head.share:.0%} of it: {words}")


def _most_common(frequencies: "Frequencies", top: int) -> list[tuple[tuple[Any, ...], int]]:
    return frequencies.most_common(min(top, frequencies.types))


def _shown(gram: tuple[Any, ...]) -> str:
    """Tokens with a space between them; those that are not visible as Python writes them."""
    words = [str(token) for token in gram]
    return " ".join(word if word.isprintable() and word.strip() else repr(word) for word in words)


def _draw(rows: list["Row"], level: str, path: Path) -> None:
    from elman.figures import save
    from elman.figures.zipf import zipf

    names = {"char": "character", "spaced": "word"}
    curves = [(frequencies, line) for frequencies, line, _ in rows]
    save(zipf(curves, names.get(level, level)), path)
