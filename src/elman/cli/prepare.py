"""`elman prepare`: texts of any size to a folder of ids, which every verb takes as a SOURCE."""

import shlex
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elman.cli.console import emit, note, progress
from elman.cli.limits import a_path
from elman.cli.source import (
    Clean,
    Encoding,
    Errors,
    Lower,
    Tokenizer,
    VocabSize,
    printable,
    tell_left_out,
)

if TYPE_CHECKING:
    from elman.text.preparation import Step
    from elman.text.shards import Index


def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Files (.txt or any other, .jsonl; plain, .gz or .zst), folders of them, names.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder to write, or to go on in", parser=a_path, metavar="PATH")
    ],
    level: Annotated[str, typer.Option(help="char, word, byte, bpe, or spaced words")] = "char",
    vocab_size: VocabSize = 0,
    tokenizer: Tokenizer = "",
    min_freq: Annotated[
        int | None, typer.Option(min=0, help="Rarer tokens are <unk> (words: 2)")
    ] = None,
    validation: Annotated[float, typer.Option(help="Part held out to choose by")] = 0.1,
    test: Annotated[float, typer.Option(help="Part held out to report, at the end")] = 0.0,
    field: Annotated[str, typer.Option(help="Of .jsonl: the field that holds the text")] = "text",
    clean: Clean = "newlines",
    lower: Lower = False,
    shard_tokens: Annotated[int, typer.Option(min=64, help="Tokens in a file of ids")] = 1 << 24,
    encoding: Encoding = "utf-8",
    errors: Errors = "strict",
    force: Annotated[bool, typer.Option("--force", help="Begin again in this folder")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Turn texts of any size into a folder of ids, with little memory.

    Interrupted, the same command goes on where it was. `elman train FOLDER` trains on it.
    """
    from elman.text.preparation import Request
    from elman.text.preparation import prepare as prepared
    from elman.text.prepared import Data
    from elman.text.shards import Index
    from elman.text.streaming import files_of

    data = Data("-", level, clean, 0, min_freq, validation, encoding, errors, lower)
    data = replace(data, vocab_size=vocab_size, tokenizer=tokenizer, test=test)
    request = Request(tuple(sources), data, field, shard_tokens)
    for source in sources:
        tell_left_out(source, lambda folder: files_of([str(folder)]))
    try:
        _show(prepared(request, out, force=force), printable(", ".join(sources)))
    except KeyboardInterrupt:
        _say_how_to_go_on(out, force)
        raise
    index = Index.load(out)
    if json:
        emit(_record(index, out))
    else:
        typer.echo(_counts(index))
    note(f"next: elman train {printable(shlex.quote(str(out)))}")


def _show(steps: "Iterable[Step]", sources: str) -> None:
    """Do the work, with a line for every stage of it and a bar that moves."""
    last, stage = 0.0, ""
    with progress() as bar:
        task = bar.add_task("reading")
        for step in steps:
            if step.stage != stage:
                stage = step.stage
                note(f"{stage} {sources}")
                last = 0.0
            if (now := time.monotonic()) - last > 0.2:
                last = now
                bar.update(task, description=stage, completed=step.done, total=step.total)


def _record(index: "Index", out: Path) -> dict[str, Any]:
    """What was prepared, as JSON."""
    return {
        "folder": str(out),
        "level": index.level,
        "tokens": index.tokens,
        "train_tokens": index.train_tokens,
        "test_tokens": index.test_tokens,
        "characters": index.characters,
        "documents": index.documents,
        "shards": len(index.shards),
        "sha256": index.sha256,
    }


def _counts(index: "Index") -> str:
    """What was prepared, in words."""
    tested = f", {index.test_tokens:,} of those to test with" if index.test_tokens else ""
    documents = "1 document" if index.documents == 1 else f"{index.documents:,} documents"
    return (
        f"{index.tokens:,} tokens of {index.characters:,} characters in {documents}; "
        f"{index.tokens - index.train_tokens:,} of them held out{tested}"
    )


def _say_how_to_go_on(out: Path, force: bool) -> None:
    from elman.folders import replaced

    if not out.is_dir():
        return
    note("next: the same command goes on" + (", without --force" if force else ""))
    if (aside := out / replaced.NAME).is_dir():
        note(
            f"the text that was there before is in {printable(str(aside))} until this one is whole"
        )
