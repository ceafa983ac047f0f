"""Writing text: read a prompt, then draw one token after another from the model's own guesses.

    p_t ∝ exp(o_t / temperature) on the tokens that are allowed,   x_{t+1} ~ p_t

`sampling.py` has which tokens may follow and how likely each is, `reading.py` how a model reads
what was chosen, `beams.py` the most probable texts. Here the two meet.
"""

from collections.abc import Iterator, Sequence
from operator import index
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from elman.errors import UserError
from elman.generation.beams import Continuation, beam_search
from elman.generation.reading import FIRST, Steps, checked_length, prompt_of, read_all
from elman.generation.sampling import UNK, Ids, Sampling, Scores, allowed, excluded
from elman.language_model import native_writer, turns, writer
from elman.scoring.metrics import evaluating
from elman.text.vocab import Vocab

__all__ = [
    "FIRST",
    "UNK",
    "Continuation",
    "Sampling",
    "allowed",
    "beam_search",
    "generate",
    "generate_batch",
    "opening",
    "specimen",
    "unwritten",
]


def generate(
    model: nn.Module,
    prompt_ids: Ids,
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    exclude: Sequence[int] = (UNK,),
    start: int = FIRST,
) -> Iterator[int]:
    """Read `prompt_ids`, then write `length` tokens, yielding each as soon as it is drawn.

    The same seed gives the same tokens. An empty prompt reads the token `start` instead (by
    default the most frequent token of a `Vocab`: in a text of characters, the space). The
    prompt is not repeated in what is yielded. `Sampling` explains the other choices.
    """
    columns = generate_batch(
        model,
        [prompt_ids],
        length,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seeds=[seed],
        exclude=exclude,
        start=start,
    )
    return (token for (token,) in columns)


def generate_batch(
    model: nn.Module,
    prompts: Sequence[Ids],
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seeds: Sequence[int] | None = None,
    exclude: Sequence[int] = (UNK,),
    start: int = FIRST,
) -> Iterator[list[int]]:
    """Continue several prompts at once, yielding one token for each at every step.

    Row b is what `generate(model, prompts[b], length, seed=seeds[b])` writes (seeds are 0, 1, 2, …
    unless given). The two do the same arithmetic in a different order, so they can only part
    where a draw falls within a rounding error of the edge between two tokens.
    """
    sampling = Sampling(temperature, top_k, top_p, exclude)
    seeds = range(len(prompts)) if seeds is None else seeds
    if len(seeds) != len(prompts):
        raise UserError(f"{len(seeds)} seeds for {len(prompts)} prompts", hint="one seed per row")
    texts = [prompt_of(ids, start) for ids in prompts]
    length = checked_length(length)
    generators = [_generator(seed) for seed in seeds]
    return _write(model, texts, length, sampling, generators)


def specimen(
    model: nn.Module, vocab: Vocab, length: int = 240, prompt: str = "", temperature: float = 0.8
) -> str:
    """A short text, prompt and all, always with the same seed: what a model can do by now."""
    choices = {"exclude": unwritten(vocab), "start": opening(vocab), "temperature": temperature}
    ids = vocab.encode(prompt).tolist()
    return vocab.decode(ids + list(generate(model, ids, length, seed=1, **choices)))


def unwritten(vocab: Vocab) -> tuple[int, ...]:
    """What to `exclude` so that no `<unk>` and no reserved token is written; nothing for bytes."""
    return () if vocab.unk is None else tuple(range(1 + len(vocab.reserved_tokens)))


def opening(vocab: Vocab) -> int:
    """What an empty prompt should `start` from: a line break, else the most frequent token."""
    line_break = vocab.level_used.line_end
    if line_break in vocab:
        return vocab[line_break]
    special = unwritten(vocab)
    by_frequency = (vocab[token] for token, _ in vocab.token_freqs)
    return next((i for i in by_frequency if i not in special), UNK)


def _write(
    model: nn.Module,
    prompts: list[tuple[int, ...]],
    length: int,
    sampling: Sampling,
    generators: list[torch.Generator],
) -> Iterator[list[int]]:
    if length == 0 or not prompts:
        return
    chances = [_uniform(generator) for generator in generators]
    with evaluating(model):
        logits, state = read_all(model, prompts)
        step = None if turns.takes(model) else Steps(model, state, len(prompts))
    excluded(tuple(sampling.exclude), logits.shape[-1])
    if step is None:
        own, carried = cast(Any, model), cast(Any, state)
        yield from writer.written(own, logits, carried, length, sampling, chances)
        return
    if (native := step.writer) is not None:
        yield from native_writer.written(native, logits, length, sampling, chances)
        return
    for remaining in reversed(range(length)):
        if sampling.temperature == 0:
            tokens = allowed(logits, sampling.exclude).argmax(-1).tolist()
        else:
            tokens = _draw(sampling.odds(logits), chances)
        yield tokens
        if remaining:
            logits = step(torch.tensor(tokens, device="cpu"))


def _draw(p: Scores, chances: list[Iterator[float]]) -> list[int]:
    """One token per row, by the inverse of the cumulative distribution: one number per draw."""
    tokens = []
    for row, chance in zip(p, chances, strict=True):
        possible = np.flatnonzero(row)
        reached = row[possible].cumsum()
        reached /= reached[-1]  # ends at exactly 1, which no chance reaches
        tokens.append(int(possible[reached.searchsorted(next(chance), side="right")]))
    return tokens


def _generator(seed: int) -> torch.Generator:
    try:
        return torch.Generator().manual_seed(index(seed))
    except (TypeError, ValueError, RuntimeError) as problem:
        raise UserError(
            f"seed={seed!r} must be a whole number of 64 bits", hint="seed=1"
        ) from problem


def _uniform(generator: torch.Generator) -> Iterator[float]:
    """Numbers from 0 up to 1, drawn many at a time, since one costs as much."""
    while True:
        yield from torch.rand(256, dtype=torch.float64, generator=generator, device="cpu").tolist()
