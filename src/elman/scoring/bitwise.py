"""Models mixed bit by bit, in the logistic domain, by weights that learn as the text goes by.

Every token is written as bytes, none the beginning of another, and every byte is eight decisions. A
model of tokens says of each how likely a 1 is: the tokens that remain with a 1, over all that
remain. A model that counts bits says it directly. With stretch(p) = ln(p / (1 - p)), and squash its
inverse,

    p(1) = squash(Σ_j w_j stretch(p_j(1))),      w_j ← w_j + rate (bit - p(1)) stretch(p_j(1))

the step being taken after the bit was predicted; a decision in which the vocabulary leaves no
choice costs nothing. Unlike a weighted mean of probabilities, this lets a model that is sure
overrule one that is not. Mahoney (2005), "Adaptive weighing of context models for lossless data
compression".
"""

import bisect
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError
from elman.text.vocab import Vocab

Floats = NDArray[np.float64]
Ints = NDArray[np.integer[Any]]
Reader = Callable[[bytes, bytes], NDArray[Any]]
"""The probability of a 1 before each bit of the second text, (bytes, 8), after reading the first;
`elman.compression.expectations` is one."""

RATE = 0.001
"""Chosen on the validation part of The Time Machine, where twice or half of it is as good."""

LEAST = 1e-9
"""The least probability of a token, so that the sum over a few unlikely ones is not zero."""

SUREST = 12.0
"""No model may stretch a probability further: e^-12 is one in 160,000."""

SPECIAL = b"\xff"
"""The byte that begins a special token, such as `<unk>`: it occurs nowhere in UTF-8."""

PIECE = 1 << 16
"""Decisions that are Python's own numbers at a time, which take three times the room."""

MOST_READ = 8_000_000
"""Tokens of the training text that are counted, the last ones: what takes some two minutes."""


class Decisions(NamedTuple):
    """The bits of a text that its vocabulary leaves open, in order."""

    token: Ints  # which of the ids each belongs to
    at: Ints  # which bit of the text's bytes it is
    bit: Ints
    low: Ints  # the tokens that remain are those from low to high, by their bytes,
    middle: Ints  # those from middle on with a 1
    high: Ints

    def of(self, start: int, end: int) -> "Decisions":
        """Those of the ids from start to end."""
        first, last = np.searchsorted(self.token, (start, end)).tolist()
        return Decisions(*(column[first:last] for column in self))


@final
class Codes:
    """The tokens of a vocabulary as bytes, and the tree of their bits.

    >>> codes = Codes(Vocab("abca"))
    >>> codes.encode([1, 2, 3])
    b'abc'
    >>> codes.decisions([1]).bit.tolist(), codes.decisions([3]).bit.tolist()
    ([0, 0], [0, 1, 1])
    """

    def __init__(self, vocab: Vocab) -> None:
        self.codes = [_code(vocab, i) for i in range(len(vocab))]
        self.order = np.array(sorted(range(len(vocab)), key=self.codes.__getitem__))
        ordered = [self.codes[i] for i in self.order.tolist()]
        self._paths = [_path(code, ordered) for code in self.codes]

    def encode(self, ids: Any) -> bytes:
        """The bytes of a text."""
        return b"".join([self.codes[i] for i in np.asarray(ids).tolist()])

    def decisions(self, ids: Any) -> Decisions:
        """The bits of a text in which there is a choice."""
        listed = np.asarray(ids).tolist()
        paths = [self._paths[i] for i in listed]
        lengths = [len(path) for path in paths]
        columns = np.concatenate([*paths, np.zeros((0, 5), np.int32)]).T
        starts = np.cumsum([0, *(8 * len(self.codes[i]) for i in listed)])[:-1]
        token = np.repeat(np.arange(len(listed)), lengths)
        at = np.repeat(starts, lengths) + columns[0]
        return Decisions(token, at, *columns[1:])

    def odds(self, log_p: Floats, decisions: Decisions) -> Floats:
        """What a model of tokens says of decisions, from log P of every token, (time, tokens).

        The first row is that of the first token that is decided on.
        """
        p = np.exp(np.asarray(log_p, np.float64))[:, self.order] + LEAST
        below = np.concatenate([np.zeros((len(p), 1)), np.cumsum(p, axis=1)], axis=1)
        row = decisions.token - (decisions.token[0] if len(decisions.token) else 0)
        low, middle, high = (below[row, i] for i in decisions[3:])
        return (high - middle) / (high - low)


class Reading(NamedTuple):
    """What a model of tokens made of a text: log P of each, and the odds of its decisions."""

    log_p: Floats
    odds: Floats  # none where bits were not asked for


def read_tokens(windows: Iterable[Any], ids: Any, codes: Codes | None = None) -> Reading:
    """Every id after the first, from log P of all tokens in their place, window by window.

    Without codes nothing is said of bits.
    """
    following, scores, odds, start = np.asarray(ids)[1:], [np.zeros(0)], [np.zeros(0)], 0
    decisions = None if codes is None else codes.decisions(following)
    for log_p in windows:
        end = start + len(log_p)
        scores.append(log_p[np.arange(len(log_p)), following[start:end]])
        if codes is not None and decisions is not None:
            odds.append(codes.odds(log_p, decisions.of(start, end)))
        start = end
    return Reading(np.concatenate(scores), np.concatenate(odds))


def read_bits(reader: Reader, codes: Codes, train: Any, ids: Any) -> Floats:
    """What a model that counts bits says of the same, having read the training text before."""
    following = np.asarray(ids)[1:]
    before = codes.encode(train[-MOST_READ:]) + codes.encode(np.asarray(ids)[:1])
    odds = reader(before, codes.encode(following))
    return np.asarray(odds, np.float64).reshape(-1)[codes.decisions(following).at]


class Bitwise(NamedTuple):
    """log P of each token by the mixture, and the weights, averaged over its decisions."""

    log_p: Floats
    weights: Floats


def mix_bitwise(odds: Floats, decisions: Decisions, tokens: int, rate: float = RATE) -> Bitwise:
    """Mix models, given the odds of a 1 by each, (models, decisions), weights learnt on the way.

    The weights begin alike, and sum to one then; they need not do so later.
    """
    w = [1 / len(odds)] * len(odds)
    total, scores = [0.0] * len(odds), np.zeros(tokens)
    for start in range(0, odds.shape[1], PIECE):
        here, log_p = slice(start, start + PIECE), []
        xs, bits = stretch(odds[:, here]).T.tolist(), decisions.bit[here].tolist()
        for x, bit in zip(xs, bits, strict=True):
            z = sum(map(float.__mul__, w, x))
            z = min(max(z, -SUREST), SUREST)
            p = 1 / (1 + math.exp(-z))
            log_p.append(math.log(p if bit else 1 - p))
            total = list(map(float.__add__, total, w))
            step = rate * (bit - p)
            w = [w_j + step * x_j for w_j, x_j in zip(w, x, strict=True)]
        np.add.at(scores, decisions.token[here], log_p)
    return Bitwise(scores, np.array(total) / max(odds.shape[1], 1))


def stretch(p: Floats) -> Floats:
    """ln(p / (1 - p)), at most `SUREST` either way.

    >>> stretch(np.array([0.5, 1.0])).tolist()
    [0.0, 12.0]
    """
    with np.errstate(divide="ignore"):
        return np.clip(np.log(p) - np.log1p(-p), -SUREST, SUREST)


def _code(vocab: Vocab, i: int) -> bytes:
    """A token's bytes: a character's in UTF-8; for a special token, three that are not text."""
    code = vocab.level_used.code(vocab.idx_to_token[i])
    if code is None:
        raise UserError(
            f"{vocab.level_used.unit}s are not mixed bit by bit: one may be the beginning of "
            "another",
            hint="a run of --level char or byte; or mix with kneser-ney:3",
        )
    if vocab.unk is not None and i <= len(vocab.reserved_tokens):
        return SPECIAL + i.to_bytes(2, "big")
    return code


def _path(code: bytes, ordered: list[bytes]) -> Ints:
    """(which bit, 0 or 1, low, middle, high) of every bit of a code that others might have."""
    rows, low, high = [], 0, len(ordered)
    for at in range(8 * len(code)):
        byte, shift = at // 8, 7 - at % 8
        with_one = code[:byte] + bytes([(code[byte] >> shift | 1) << shift])
        middle = bisect.bisect_left(ordered, with_one, low, high)
        bit = code[byte] >> shift & 1
        if low < middle < high:
            rows.append((at, bit, low, middle, high))
        low, high = (middle, high) if bit else (low, middle)
    return np.array(rows, np.int32).reshape(-1, 5)
