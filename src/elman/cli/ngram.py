"""`elman ngram`: what counting can do, in the units in which networks are measured."""

import math
import re
import shlex
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
from elman.errors import UserError
from elman.files import check_target
from elman.options import Beside

if TYPE_CHECKING:
    from elman.counting.ngram import NgramModel
    from elman.text.prepared import Data, Splits

WRITING = Beside("generate", such_as=200)
HIGHEST = 100
"""The highest order: each one keeps a table of up to as many n-grams as the text has tokens."""


Order = Annotated[str, typer.Option(help="How many tokens make an n-gram; 1-8 fits each of them")]
Smoothing = Annotated[
    str, typer.Option(help="kneser-ney, laplace (the notes' formula) or laplace-open")
]
Epsilon = Annotated[
    str | None, typer.Option(help="Laplace's ε (1), or one for each order: 1,0.5,0.1")
]
Chain = Annotated[
    bool, typer.Option("--chain", help="Laplace: back off to the order below, not the unigram")
]
Level = Annotated[
    str | None,
    typer.Option(help="char, word, byte, bpe, or spaced words", show_default="char"),
]
MinFreq = Annotated[int | None, typer.Option(min=0, help="Rarer tokens are <unk> (words: 2)")]
Arpa = Annotated[
    Path | None,
    typer.Option(help="Write the model as an ARPA file", parser=a_path, metavar="PATH"),
]
Out = Annotated[
    Path | None,
    typer.Option(help="Write the model for NgramModel.load", parser=a_path, metavar="PATH"),
]
Temperature = Annotated[float, typer.Option(min=0, help="0 takes the likeliest token"), WRITING]


def ngram(
    context: typer.Context,
    source: Source = "python-reference",
    order: Order = "5",
    smoothing: Smoothing = "kneser-ney",
    epsilon: Epsilon = None,
    chain: Chain = False,
    level: Level = None,
    vocab_size: VocabSize = 0,
    tokenizer: Tokenizer = "",
    clean: Clean = "newlines",
    lower: Lower = False,
    validation: Annotated[float, typer.Option(help="Part held out, at the end")] = 0.1,
    min_freq: MinFreq = None,
    arpa: Arpa = None,
    out: Out = None,
    generate: Annotated[int, typer.Option(min=0, max=10**7, help="Tokens of text to write")] = 0,
    prompt: Annotated[str, typer.Option(help="Text that the written text continues"), WRITING] = "",
    temperature: Temperature = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same text")] = 0,
    encoding: Encoding = "utf-8",
    errors: Errors = "strict",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Fit n-gram models to the first part of a text and score the rest.

    Every token of the held-out part is predicted from the tokens before it.
    """
    from elman.text.prepared import prepare

    orders = _orders(order)
    _check_written(source, order, orders, arpa, out, generate)
    data = data_of(
        context,
        "char",
        source=source,
        level=level,
        clean=clean,
        min_freq=min_freq,
        validation=validation,
        encoding=encoding,
        errors=errors,
        lower=lower,
        vocab_size=vocab_size or None,
        tokenizer=tokenizer or None,
    )
    weights = _epsilon(epsilon, orders[-1])
    splits = prepare(data, read(data))
    rows, model = _fitted(splits, orders, smoothing, weights, chain)
    record = {"source": source, "level": data.level, "smoothing": smoothing, "models": rows}
    record |= {"train_tokens": len(splits.train), "vocabulary": len(splits.vocab)}
    if generate:
        record["text"] = _text(model, splits, data, prompt, generate, temperature, seed)
    if json:
        emit(record | {"models": [_finite(row) for row in rows]})
    else:
        _print(record)
    _write(model, arpa, out)
    note(f"next: {printable(follow_up('train', data))}")


def _orders(order: str) -> list[int]:
    """5, or 1-8."""
    digits = re.fullmatch(r"0*([1-9][0-9]{0,2})(?:-0*([1-9][0-9]{0,2}))?", order, re.ASCII)
    first = int(digits[1]) if digits else 0
    last = int(digits[2] or first) if digits else 0
    if not 1 <= first <= last <= HIGHEST:
        raise UserError(
            f"--order {printable(order)[:40]} must be a number from 1 to {HIGHEST}, or a range",
            hint="--order 1-8",
        )
    return list(range(first, last + 1))


def _check_written(
    source: str,
    order: str,
    orders: list[int],
    arpa: Path | None,
    out: Path | None,
    generate: int,
) -> None:
    """Refuse, before anything is read, what could not be written."""
    for target in (arpa, out):
        if target is not None:
            check_target(target, source)
    if len(orders) > 1 and (arpa or out or generate):
        raise UserError(
            f"--order {order} fits {len(orders)} models, and only one can be written",
            hint=f"--order {orders[-1]}",
        )


def _epsilon(epsilon: str | None, order: int) -> list[float] | None:
    """One number for each of so many orders, or one for all of them."""
    if epsilon is None:
        return None
    try:
        values = [float(value) for value in epsilon.split(",")]
    except ValueError:
        raise UserError(
            f"--epsilon {epsilon} must be numbers with commas between them", hint="--epsilon 1,0.5"
        ) from None
    if len(values) not in (1, order):
        raise UserError(
            f"--epsilon {epsilon} must be one number, or one for each of {order} orders",
            hint="--epsilon 1",
        )
    return values * order if len(values) == 1 else values


def _fitted(
    splits: "Splits", orders: list[int], smoothing: str, epsilon: list[float] | None, chain: bool
) -> tuple[list[dict[str, Any]], "NgramModel"]:
    """What a model of each order scores, and the last of them: no two are kept at once."""
    from elman.counting.ngram import NgramModel

    def fit(k: int) -> NgramModel:
        eps = epsilon and epsilon[:k]
        return NgramModel.fit(splits.train, k, smoothing, eps, chain=chain, vocab=splits.vocab)

    rows = [_score(fit(k), splits) for k in orders[:-1]]
    model = fit(orders[-1])
    return [*rows, _score(model, splits)], model


def _text(
    model: "NgramModel",
    splits: "Splits",
    data: "Data",
    prompt: str,
    length: int,
    temperature: float,
    seed: int,
) -> str:
    """The prompt, read as the text was, and what the model goes on to write."""
    from elman.text.prepared import prompt as prompt_of

    start = splits.vocab.encode(prompt_of(data, prompt))
    written = model.generate(length, prompt=start, temperature=temperature, seed=seed)
    ids = splits.vocab[written]
    return splits.vocab.decode([*start, *ids])


def _score(model: "NgramModel", splits: "Splits") -> dict[str, Any]:
    """How the model does on the part that is reported, which continues the part before it."""
    row: dict[str, Any] = {"order": model.order, "ngrams": len(model.table.keys[-1]) - 1}
    tokens = len(splits.reported)
    if tokens == 0:
        return row | {"tokens": 0}
    before = splits.validation if len(splits.test) and len(splits.validation) else splits.train
    context = before[max(0, len(before) - model.order + 1) :]
    nats = -model.log_probability(splits.reported, context) / tokens
    row |= {"tokens": tokens, "nats_per_token": nats, "perplexity": math.exp(nats)}
    return row | {"bits_per_char": nats * tokens / math.log(2) / splits.characters}


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: an unsmoothed model's is written as a word."""
    return {key: "Infinity" if value == math.inf else value for key, value in row.items()}


def _print(record: dict[str, Any]) -> None:
    rows = record["models"]
    typer.echo(
        f"{record['smoothing']} on {record['train_tokens']:,} tokens of "
        f"{printable(record['source'])}, "
        f"{record['vocabulary']:,} different; {rows[0]['tokens']:,} held out"
    )
    typer.echo(f"{'order':>5}  {'n-grams':>12}  {'nats':>8}  {'perplexity':>10}  {'bits/char':>9}")
    for row in rows:
        line = f"{row['order']:>5}  {row['ngrams']:>12,}"
        if row["tokens"]:
            line += f"  {row['nats_per_token']:>8.4f}  {row['perplexity']:>10.3f}"
            line += f"  {row['bits_per_char']:>9.4f}"
        typer.echo(line)
    if "text" in record:
        typer.echo(f"\n{printable(record['text'])}")


def _write(model: "NgramModel", arpa: Path | None, out: Path | None) -> None:
    if arpa is not None:
        model.to_arpa(arpa)
        note(f"wrote {printable(shlex.quote(str(arpa)))}, which KenLM and SRILM read")
    if out is not None:
        model.save(out)
        note(f"wrote {printable(shlex.quote(str(out)))}, which NgramModel.load reads")
