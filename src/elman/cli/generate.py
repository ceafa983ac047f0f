"""`elman generate`: write text with a trained run."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elman.cli.console import emit, note
from elman.cli.device import pick, use_threads
from elman.cli.limits import LONGEST, RunFolder
from elman.errors import UserError
from elman.options import DEVICES

if TYPE_CHECKING:
    from torch import nn

    from elman.text.vocab import Vocab


def generate(
    run: RunFolder,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Text to read first; give it again for another text", show_default=False),
    ] = None,
    length: Annotated[int, typer.Option(min=1, max=LONGEST, help="Tokens to write")] = 300,
    temperature: Annotated[
        float, typer.Option(min=0, help="Below 1 bolder, above 1 wilder; 0: the likeliest token")
    ] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Only the k likeliest tokens")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Only the likeliest tokens that make up p together")
    ] = None,
    beam: Annotated[
        int | None, typer.Option(min=1, help="Search the most probable text, keeping so many")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Texts for each prompt, side by side")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same text")] = 0,
    special: Annotated[
        bool, typer.Option(help="Let it write <unk> and reserved tokens, too")
    ] = False,
    weights: Annotated[
        str | None,
        typer.Option(help="best (by validation) or last", show_default="the run's own"),
    ] = None,
    device: Annotated[str, typer.Option(help=DEVICES)] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0: as many as there are")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per text")] = False,
) -> None:
    """Write text in the voice of a trained model, each token as soon as it is drawn.

    Without a prompt it begins as after a line break. Several samples use seeds from --seed up.
    """
    from elman import generation
    from elman.runs import Run

    _refuse_endless(length, len(prompt or [""]) * (beam or samples))
    use_threads(threads)
    opened, device = Run.open(run), pick(device)
    prompts = [_read(opened, text) for text in prompt or [""]]
    choices: dict[str, Any] = {
        "exclude": () if special else generation.unwritten(opened.vocab),
        "start": generation.opening(opened.vocab),
    }
    if beam is not None:
        chance = {"temperature": temperature != 1, "top_k": top_k, "top_p": top_p is not None}
        _refuse_chance(**chance, samples=samples > 1)
        texts = _searched(opened.load_model(device, weights), prompts, length, beam, choices)
    else:
        choices |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        generation.Sampling(temperature, top_k, top_p)  # refuse before the model is loaded
        rows = [(ids, shown, seed + n) for ids, shown in prompts for n in range(samples)]
        texts = _sampled(opened.load_model(device, weights), rows, length, choices)
    if as_json:
        _write_json(texts, opened.vocab)
    else:
        _write_text(texts if beam is None else texts[::beam], opened.vocab)
    if beam is None and not as_json and temperature > 0:
        note(f"next: --seed {seed} writes this again, --seed {seed + samples} something else")


def _read(run: Any, text: str) -> tuple[Any, str]:
    """The ids of a prompt and the prompt as the model reads it; reports what it cannot read."""
    from elman.scoring import evaluation
    from elman.text import prepared

    level = run.vocab.level_used
    shown = str(prepared.prompt(run.config.data, text))
    ids = run.vocab.encode(shown)
    if unknown := evaluation.unknown(run.vocab, ids):
        strange = dict.fromkeys(t for t in level.tokens(shown) if t not in run.vocab)
        names = " ".join(repr(token) for token in strange)
        share = f"{unknown} of {len(ids)} {level.unit}s"
        note(f"note: not in this run's vocabulary, read as <unk>: {names} ({share})")
    if shown != level.open_end(text):
        note(f"note: the prompt is read as {shown!r}, cleaned like the run's own text")
    return ids, shown


def _refuse_chance(**given: Any) -> None:
    for name, value in given.items():
        if value:
            raise UserError(
                f"--{name.replace('_', '-')} belongs to sampling: beam search leaves no choice",
                hint="leave out --beam, or the other",
            )


def _refuse_endless(length: int, texts: int) -> None:
    if length * texts > LONGEST:
        raise UserError(
            f"{texts:,} texts × {length:,} tokens are {texts * length:,} tokens, more than the "
            f"{LONGEST:,} that one command writes",
            hint="a smaller --length, --samples or --beam",
        )


class Text:
    """A text in the making: what is known of it, and its tokens as they come."""

    def __init__(self, prompt: str, tokens: Iterator[int], facts: dict[str, Any]) -> None:
        self.prompt, self.tokens, self.facts = prompt, tokens, facts


def _sampled(
    model: "nn.Module", rows: list[tuple[Any, str, int]], length: int, choices: dict[str, Any]
) -> list[Text]:
    """One text streams; several are drawn together and then shown one after another."""
    from elman.generation import generate, generate_batch

    if len(rows) == 1:
        ids, shown, seed = rows[0]
        return [Text(shown, generate(model, ids, length, seed=seed, **choices), {"seed": seed})]
    prompts, seeds = [ids for ids, _, _ in rows], [seed for _, _, seed in rows]
    columns = list(generate_batch(model, prompts, length, seeds=seeds, **choices))
    return [
        Text(shown, iter(tokens), {"seed": seed})
        for (_, shown, seed), tokens in zip(rows, zip(*columns, strict=True), strict=True)
    ]


def _searched(
    model: "nn.Module",
    prompts: list[tuple[Any, str]],
    length: int,
    beam: int,
    choices: dict[str, Any],
) -> list[Text]:
    from elman.generation import beam_search

    return [
        Text(shown, iter(beam_text.ids), {"log_probability": beam_text.log_probability})
        for ids, shown in prompts
        for beam_text in beam_search(model, ids, length, beam, **choices)
    ]


def _write_json(texts: list[Text], vocab: "Vocab") -> None:
    for text in texts:
        ids = list(text.tokens)
        written = vocab.decode(ids)
        emit({"prompt": text.prompt, "text": written, "tokens": len(ids), **text.facts})


def _write_text(texts: list[Text], vocab: "Vocab") -> None:
    """Each text after its prompt, streamed; several with a line above each."""
    for number, text in enumerate(texts):
        if len(texts) > 1:
            facts = ", ".join(
                f"{name.replace('_', ' ')} {fact:.6g}" for name, fact in text.facts.items()
            )
            print(f"{chr(10) if number else ''}── {facts} ──")
        try:
            print(_visible(text.prompt), end="", flush=True)
            for piece in _pieces(text, vocab):
                print(_visible(piece), end="", flush=True)
        finally:
            print(flush=True)  # also after Ctrl-C: what was written stands on lines of its own


def _pieces(text: Text, vocab: "Vocab") -> Iterator[str]:
    """What follows the prompt, as it becomes whole."""

    level = vocab.level_used
    read = level.tokens(text.prompt)
    written = (vocab.idx_to_token[token] for token in text.tokens)
    return level.stream(written, read[-1] if read else None)


def _visible(text: str) -> str:
    """On a terminal, control characters as symbols: a model may write any it has read."""
    if not sys.stdout.isatty():
        return text
    return "".join(chr(0x2400 + ord(c)) if c < " " and c not in "\n\t" else c for c in text)
