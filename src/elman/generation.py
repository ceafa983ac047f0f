"""Writing text: read a prompt, then draw one token after another from the model's own guesses.

    p_t ∝ exp(o_t / temperature) on the tokens that are allowed,   x_{t+1} ~ p_t

The hidden state is carried, so each token costs one step of the model however long the text
already is. Any model will do that `elman.language_model.read` can read, with a state that is None
or a nest of tensors whose last dimension but one is the batch.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from operator import index
from typing import Any, NamedTuple, TypeAlias, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from elman.errors import UserError
from elman.kernels.cpu import Steps
from elman.language_model import LanguageModel, native_writer, read, searcher, turns, writer
from elman.language_model.looking import is_hooked
from elman.language_model.loss import widened
from elman.language_model.nests import Nest, over
from elman.language_model.turns import not_numbers
from elman.options import whole_number
from elman.scoring.metrics import evaluating
from elman.text.vocab import Vocab

Ids: TypeAlias = Any
"""One-dimensional integers: a tensor, an array or a list."""

Scores: TypeAlias = NDArray[np.float64]
"""One number for each token of the vocabulary, a row for each text: (rows, vocabulary).

In NumPy, because a draw is a dozen operations on a few numbers, and PyTorch takes longer to begin.
"""

UNK = 0
"""The id of `<unk>` in every `Vocab`: what a model should not write unless asked."""

FIRST = 1
"""The id that follows `<unk>`: without reserved tokens, a `Vocab`'s most frequent token."""

FEW = 1024
"""The likeliest tokens, among which those that top-p keeps are looked for before all are sorted."""

PIECE = 1024
"""Prompts are read in pieces of this many tokens, so that a long one needs no more memory."""


@final
@dataclass(frozen=True)
class Sampling:
    """Which tokens may follow, and how likely each is.

    The rules apply in this order: `exclude` is never written; `temperature` divides the logits
    (below 1 bolder, above 1 more various, 0 always the likeliest token); `top_k` keeps the k
    likeliest tokens; `top_p` keeps the fewest likeliest tokens that hold at least p of the
    probability the rules before it left. Among equals the lower id comes first.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    exclude: Sequence[int] = (UNK,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "exclude", _ids_to_exclude(self.exclude))
        if not isinstance(self.temperature, Real) or not 0 <= self.temperature < math.inf:
            raise UserError(
                f"temperature={self.temperature} must be a number from 0 up",
                hint="0 takes the likeliest token, 1 the model's own probabilities",
            )
        if self.top_k is not None:
            whole_number("top_k", self.top_k, at_least=1, hint="1 is greedy")
        if self.top_p is not None and not (isinstance(self.top_p, Real) and 0 < self.top_p <= 1):
            raise UserError(
                f"top_p={self.top_p} must be above 0 and at most 1", hint="1 keeps every token"
            )

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution the next token is drawn from, in float64.

        >>> Sampling(top_k=2, exclude=()).probabilities(torch.tensor([[0.0, 0.0, -1.0]]))
        tensor([[0.5000, 0.5000, 0.0000]], dtype=torch.float64)
        """
        return torch.from_numpy(self.odds(logits))

    def odds(self, logits: Tensor) -> Scores:
        """The same as an array."""
        scores = allowed(logits, self.exclude)
        if self.temperature == 0:
            p = np.zeros_like(scores)
            p[np.arange(len(scores)), scores.argmax(-1)] = 1  # of equals, NumPy takes the first
            return p
        with np.errstate(over="ignore"):  # of a temperature near 0: all but the likeliest vanish
            if self.top_k is None and self.top_p is None:
                p = np.exp((scores - scores.max(-1, keepdims=True)) / self.temperature)
                return p / p.sum(-1, keepdims=True)
            p = np.zeros_like(scores)
            for row, share in zip(scores, p, strict=True):
                kept, weights = self._kept(row)
                share[kept] = weights / weights.sum()
        return p

    def _kept(self, scores: Scores) -> tuple[Ids, Scores]:
        """The tokens that top-k and then top-p leave of one row, in their order; their weights."""
        kept: Ids = slice(None)
        if self.top_k is not None and self.top_k < len(scores):
            kept = _likeliest(scores, _highest(scores, self.top_k))
            scores = scores[kept]
        highest = scores.max()
        weights = np.exp((scores - highest) / self.temperature)
        if self.top_p is None or self.top_p == 1:
            return kept, weights
        total = weights.sum()
        for looked_at in (min(FEW, len(scores)), len(scores)):
            best = _highest(scores, looked_at)
            p = np.exp((best - highest) / self.temperature) / total
            within = p.cumsum() - p < self.top_p
            if not within[-1]:
                break
        inside = _likeliest(scores, best[: within.sum()])
        return (inside if isinstance(kept, slice) else kept[inside]), weights[inside]


def _highest(scores: Scores, count: int) -> Scores:
    """The `count` highest of one row of scores, falling."""
    if count * 32 > len(scores):
        return np.sort(scores)[: -count - 1 : -1]
    return torch.from_numpy(scores).topk(count).values.numpy()


def _likeliest(scores: Scores, highest: Scores) -> Ids:
    """Where the highest of one row of scores are, in order; among equals, those of lower ids."""
    at = np.flatnonzero(scores >= highest[-1])
    if len(at) > len(highest):
        equal = at[scores[at] == highest[-1]]
        at = np.setdiff1d(at, equal[len(highest) - len(at) :], assume_unique=True)
    return at


class Continuation(NamedTuple):
    """A text found by beam search and how probable the model finds it, in natural logarithm."""

    ids: list[int]
    log_probability: float


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
    texts = [_prompt(ids, start) for ids in prompts]
    length = _checked_length(length)
    generators = [_generator(seed) for seed in seeds]
    return _write(model, texts, length, sampling, generators)


def beam_search(
    model: nn.Module,
    prompt_ids: Ids,
    length: int,
    width: int,
    *,
    exclude: Sequence[int] = (UNK,),
    start: int = FIRST,
) -> list[Continuation]:
    """The most probable continuations of `length` tokens that a beam of `width` finds, best first.

        log p(y | x) = Σ_t log p(y_t | x, y_1 … y_{t-1})

    At each step every text kept so far is continued by every token, and the `width` most probable
    results are kept. A beam of |V|^(length - 1) misses nothing. Excluded tokens are not written,
    and their probability is not handed to the others: the scores are the model's own.
    """
    width = whole_number("width", width, at_least=1, hint="1 is greedy")
    length = _checked_length(length)
    text, exclude = _prompt(prompt_ids, start), _ids_to_exclude(exclude)
    if length == 0:
        return [Continuation([], 0.0)]
    with evaluating(model):
        return _search(model, text, length, width, exclude)


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


def allowed(logits: Tensor, exclude: Sequence[int]) -> Scores:
    """The logits in float64, -∞ for the tokens that must not be written."""
    scores = logits.detach().to("cpu", torch.float64, copy=True).numpy()
    scores[..., _excluded(tuple(exclude), scores.shape[-1])] = -math.inf
    if not np.isfinite(scores.max(-1)).all():  # NaN wins every maximum
        raise not_numbers()
    return scores


@functools.lru_cache(maxsize=16)
def _excluded(exclude: tuple[int, ...], size: int) -> list[int]:
    """The tokens of a vocabulary of `size` that must not be written, checked."""
    if outside := [i for i in exclude if not 0 <= i < size]:
        raise UserError(
            f"exclude={outside} names no token of a vocabulary of {size}", hint=f"0 to {size - 1}"
        )
    if len(set(exclude)) == size:
        raise UserError("every token of the vocabulary is excluded", hint="leave at least one")
    return list(exclude)


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
        logits, state = _read_all(model, prompts)
        step = None if turns.takes(model) else _Steps(model, state, len(prompts))
    _excluded(tuple(sampling.exclude), logits.shape[-1])
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


@final
class _Steps:
    """Reads one token per row, call after call, by the quickest way the model has."""

    def __init__(self, model: nn.Module, state: Nest, rows: int) -> None:
        self.model, self.state, self.rows = model, state, rows
        self.stepper = None
        if type(model) is LanguageModel and not is_hooked(model):  # others may do more in a step
            self.stepper = model.stepper(state, rows)

    def __call__(self, tokens: Tensor) -> Tensor:
        """The logits (rows, vocabulary) after the tokens (rows,)."""
        if self.stepper is not None:
            return self.stepper(tokens)
        with evaluating(self.model):
            logits, self.state = _read(self.model, tokens[:, None], self.state)
        return logits

    @property
    def writer(self) -> Steps | None:
        """What draws and reads by itself, if anything does."""
        return None if self.stepper is None else self.stepper.writer

    def branch(self, rows: Tensor) -> "_Steps":
        """Go on from these rows, in this order, each as often as it is named."""
        if self.stepper is not None and len(rows) == self.rows:
            self.stepper.take(rows)
            return self
        state = _rows(self.state if self.stepper is None else self.stepper.state, rows)
        if self.stepper is not None:
            return _Steps(self.model, state, len(rows))
        self.state = state
        return self


def _read_all(model: nn.Module, prompts: list[tuple[int, ...]]) -> tuple[Tensor, Nest]:
    """Read each distinct prompt once; the last logits and the state, one row per prompt."""
    distinct = list(dict.fromkeys(prompts))
    readings = [_read(model, torch.tensor([text], device="cpu"), None) for text in distinct]
    rows = torch.tensor([distinct.index(text) for text in prompts], device="cpu")
    logits = torch.cat([logits for logits, _ in readings])
    return logits[rows.to(logits.device)], _rows(_join([state for _, state in readings]), rows)


def _read(model: nn.Module, ids: Tensor, state: Nest) -> tuple[Tensor, Nest]:
    """The logits after the last of `ids`, and the state there."""
    logits = torch.empty(0, device="cpu")
    for piece in ids.to(_device(model)).split(PIECE, dim=1):
        logits, state = read(model, piece, state)
    return logits[:, -1], state


def _search(
    model: nn.Module, text: tuple[int, ...], length: int, width: int, exclude: Sequence[int]
) -> list[Continuation]:
    logits, state = _read(model, torch.tensor([text], device="cpu"), None)
    size = logits.shape[-1]
    without = _excluded(tuple(exclude), size)
    width = min(width, _possible(size - len(set(without)), length, width))
    if turns.takes(model):
        own, carried = cast(Any, model), cast(Any, state)
        steps, scores = searcher.searched(own, logits, carried, length, width, without)
    else:
        alike = torch.zeros(width, dtype=torch.int64, device="cpu")
        if (native := _Steps(model, _rows(state, alike), width).writer) is not None:
            steps, scores = native_writer.searched(native, logits, length, without)
        else:
            steps, scores = _steps_of_a_beam(model, logits, state, length, width, without)
    texts = zip(_traced(steps), scores.tolist(), strict=True)
    return [Continuation(ids, score) for ids, score in texts if score > -math.inf]


def _possible(tokens: int, length: int, enough: int) -> int:
    """How many texts of this length there are, or some number above `enough`.

    >>> _possible(28, 2, 10**9), _possible(1, 10**9, 3), _possible(2, 10**9, 3)
    (784, 1, 4)
    """
    return tokens ** min(length, enough.bit_length())


def _steps_of_a_beam(
    model: nn.Module, logits: Tensor, state: Nest, length: int, width: int, exclude: list[int]
) -> tuple[searcher.Beam, Scores]:
    """For every token, which text each new one continues and with what; the last scores."""
    size, step = logits.shape[-1], None
    excluded = torch.tensor(exclude, dtype=torch.int64, device=logits.device)
    scores: Scores = np.zeros(1)
    steps: searcher.Beam = []
    for remaining in reversed(range(length)):
        log_p, ids = _likeliest_of_each(logits.detach(), excluded, width)
        reached = (scores[:, None] + log_p).ravel()
        places = (size * np.arange(len(ids))[:, None] + ids).ravel()
        best = np.lexsort((places, -reached))[:width]  # of equals, the first text and lowest id
        best = best[np.isfinite(reached[best])]
        scores, (rows, tokens) = reached[best], divmod(places[best], size)
        steps.append((rows, tokens))
        if remaining:
            chosen = torch.from_numpy(rows)
            if step is None:
                step = _Steps(model, _rows(state, chosen), len(rows))
            else:
                step = step.branch(chosen)
            logits = step(torch.from_numpy(tokens))
    return steps, scores


def _likeliest_of_each(
    logits: Tensor, excluded: Tensor, count: int
) -> tuple[NDArray[np.floating], Ids]:
    """log p of the `count` likeliest tokens of every row, and which these are.

    Among equals those of lower ids are taken; their order is open.
    """
    log_p = widened(logits).log_softmax(-1)  # one bad number makes all of its row NaN
    if len(excluded):
        log_p.index_fill_(1, excluded, -math.inf)
    found, ids = (t.cpu().numpy() for t in log_p.topk(min(count + 1, log_p.shape[1])))
    if not np.isfinite(found[:, 0]).all():  # NaN wins every maximum
        raise not_numbers()
    last = found[:, count - 1 : count]
    if ((last == found[:, count:]) & (last > -math.inf)).any():  # which of equals is torch's affair
        both = log_p.sort(descending=True, stable=True)
        found, ids = (t[:, :count].cpu().numpy() for t in both)
    return found[:, :count], ids[:, :count]


def _traced(steps: searcher.Beam) -> list[list[int]]:
    """Follow every text of the last beam back to the prompt."""
    row = np.arange(len(steps[-1][0]))
    columns = []
    for rows, tokens in reversed(steps):
        columns.append(tokens[row])
        row = rows[row]
    return np.stack(columns[::-1], -1).tolist()


def _join(states: Sequence[Nest]) -> Nest:
    """Several states of one row as one state of several rows."""
    return over(lambda *tensors: torch.cat(tensors, dim=-2), *states)


def _rows(state: Nest, rows: Tensor) -> Nest:
    """The chosen rows of a state, in the order given, as often as they are named."""
    return over(lambda tensor: tensor.index_select(-2, rows.to(tensor.device)), state)


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _prompt(ids: Ids, start: int) -> tuple[int, ...]:
    hint = "vocab.encode(tokens) makes one"
    if isinstance(ids, str | bytes):
        raise UserError(f"a prompt is a line of token ids, not the text {ids!r}", hint=hint)
    ids = list(ids) if isinstance(ids, Iterator) else ids
    text = np.asarray(ids.tolist() if isinstance(ids, Tensor) else ids)
    if text.size and (text.ndim != 1 or text.dtype.kind not in "iu"):
        raise UserError(
            f"a prompt is a line of token ids, not {text.dtype} of shape {tuple(text.shape)}",
            hint=hint,
        )
    return tuple(text.tolist()) or (start,)


def _ids_to_exclude(exclude: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(map(index, exclude))
    except TypeError as problem:
        raise UserError(
            f"exclude={exclude!r} must be several token ids", hint="exclude=(0,) excludes one"
        ) from problem


def _checked_length(length: int) -> int:
    return whole_number("length", length, at_least=0, hint="length=200 writes 200 tokens")
