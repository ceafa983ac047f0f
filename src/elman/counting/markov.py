"""Markov chains over a finite alphabet, worked out exactly.

A chain of order τ predicts each symbol from the τ before it, which are called its window:

    P(x_1, …, x_T) = P(x_1, …, x_τ) ∏_{t>τ} P(x_t | x_{t-τ}, …, x_{t-1})

Because the alphabet is finite, everything about it is a finite sum, found by carrying the
distribution of the window forward one symbol at a time (dynamic programming). For τ = 1 the notes'

    P(x_{t+1} | x_{t-1}) = Σ_{x_t} P(x_{t+1} | x_t) P(x_t | x_{t-1})

is `chain.ahead(2)`.
"""

import reprlib
from bisect import bisect_right
from numbers import Real
from typing import Any, Self, final

import numpy as np

from elman.counting.sequence_model import Floats, Ints, SequenceModel, encode, vocabulary_of
from elman.errors import UserError, counted
from elman.options import whole_number
from elman.text.vocab import Vocab

Context = tuple[int, ...]
"""The last τ symbols; fewer at the beginning."""

LIMIT = 1 << 26
"""The largest transition table that is kept, in numbers."""

WINDOWS = 2048
"""The most windows whose stationary distribution is solved for (in seconds)."""

PRODUCTS = 1 << 40
"""The most products that looking ahead step by step may take (an hour or so)."""


@final
class MarkovChain(SequenceModel[Context]):
    """A chain of any order: `transition[x_1, …, x_τ, y]` = P(y | x_1, …, x_τ).

    `initial[x_1, …, x_τ]` is the distribution of the first τ symbols; if it is not given, the
    stationary one.

    >>> weather = MarkovChain([[0.9, 0.1], [0.5, 0.5]])            # 0 is sun, 1 is rain
    >>> weather.stationary().round(3).tolist()
    [0.833, 0.167]
    >>> weather.ahead(2)[1].round(3).tolist()                      # in two days, if it rains today
    [0.7, 0.3]
    """

    def __init__(self, transition: Any, initial: Any = None, *, vocab: Vocab | None = None) -> None:
        self.transition = _distributions("transition", transition)
        if self.transition.ndim < 2 or len({*self.transition.shape, 0}) != 2:
            raise UserError(
                f"a transition table of shape {self.transition.shape} must have one side for each "
                "symbol of the past and one for the next, all equal",
                hint="(2, 2) for two symbols and order 1",
            )
        self.vocab_size = len(self.transition)
        self.order = self.transition.ndim - 1
        self.vocab = vocab
        if not isinstance(vocab, Vocab | None):
            raise UserError(
                f"vocab must be a Vocab, not {reprlib.repr(vocab)}",
                hint="Vocab.from_text makes one",
            )
        if vocab is not None and len(vocab) != self.vocab_size:
            raise UserError(
                f"a vocabulary of {len(vocab)} does not fit a chain over {self.vocab_size} symbols"
            )
        shape = self.transition.shape[1:]
        start = self.stationary() if initial is None else _distributions("initial", initial, shape)
        self.initial = start

    def __repr__(self) -> str:
        return f"<MarkovChain of order {self.order} over {self.vocab_size} symbols>"

    @classmethod
    def fit(
        cls,
        sequence: Any,
        order: int = 1,
        *,
        epsilon: float = 0.0,
        vocab: Vocab | None = None,
        vocab_size: int | None = None,
    ) -> Self:
        """Count a text: P(y | window) = (n(window, y) + ε/m) / (n(window) + ε).

        The first window is distributed as all windows of the text are. After a window that is never
        followed by anything every symbol is equally likely.
        """
        vocab, m = vocabulary_of(sequence, vocab, vocab_size)
        ids = encode(sequence, vocab, m).astype(np.int64)
        order = _checked_order(order, epsilon, m, len(ids))
        windows = _codes(ids, order, m)
        n = np.bincount(windows[:-1] * m + ids[order:], minlength=m ** (order + 1))
        n = n.reshape(-1, m) + epsilon / m
        total = n.sum(1, keepdims=True)
        transition = np.divide(n, total, out=np.full(n.shape, 1 / m), where=total > 0)
        initial = np.bincount(windows, minlength=m**order) / len(windows)
        shape = (m,) * order
        return cls(transition.reshape(*shape, m), initial.reshape(shape), vocab=vocab)

    # The questions every sequence model answers

    def score(self, ids: Ints) -> Floats:
        ids = self.encode(ids).astype(np.int64)
        m, head = self.vocab_size, ids[: self.order]
        scores = [self.predict(tuple(head[:t].tolist()))[head[t]] for t in range(len(head))]
        windows = _codes(ids, self.order, m)[:-1]
        with np.errstate(divide="ignore"):
            rest = np.log(self.transition.reshape(-1, m)[windows, ids[self.order :]])
        return np.concatenate([np.array(scores, np.float64), rest])

    def start(self) -> Context:
        return ()

    def read(self, state: Context, ids: Ints) -> Context:
        return (*state, *self.encode(ids).tolist())[-self.order :]

    def predict(self, state: Context) -> Floats:
        if len(state) == self.order:
            p = self.transition[state]
        else:
            joint = _marginal(self.initial, len(state) + 1)[state]
            p = np.divide(joint, joint.sum(), out=np.zeros_like(joint), where=joint.sum() > 0)
        with np.errstate(divide="ignore"):
            return np.log(p)

    # What only a chain can do

    def ahead(self, steps: int) -> Floats:
        """P(x_{t+steps} | window up to t), exactly: shape (m, …, m), the window's symbols first.

        P_1 is the transition; P_k(y | w_1, rest) = Σ_x P(x | w_1, rest) P_{k-1}(y | rest, x). Where
        that takes longer, P_k = Q^{k-1} P_1 by squares, Q being the step from window to window.
        """
        steps = whole_number("steps", steps, at_least=1, hint="steps=1 is the transition")
        m, n = self.vocab_size, self.vocab_size**self.order
        if n <= WINDOWS and 2 * steps.bit_length() * n * n < steps * m * m:
            later = _power(self._step(np.eye(n)), steps - 1) @ self.transition.reshape(n, m)
            return later.reshape(self.transition.shape)
        if steps * n * m * m > PRODUCTS:
            raise UserError(
                f"steps={steps} of {n} windows of {m} symbols are too much to work out",
                hint=f"up to {max(1, PRODUCTS // (n * m * m))} steps, or a lower order",
            )
        table = self.transition.reshape(m, -1, m)
        later = table
        for _ in range(steps - 1):
            later = np.einsum("wrx,rxy->wry", table, later.reshape(-1, m, m))
        return later.reshape(self.transition.shape)

    def _step(self, windows: Floats) -> Floats:
        """Carry distributions over windows, the last axis, one symbol on."""
        m = self.vocab_size
        joint = windows[..., None] * self.transition.reshape(-1, m)
        return joint.reshape(*windows.shape[:-1], m, -1).sum(-2)  # forget the oldest symbol

    def stationary(self) -> Floats:
        """The distribution of windows that one more step leaves as it is, shape (m, …, m).

        Solves π = π Q together with Σ π = 1, Q being the step from window to window.
        """
        n = self.vocab_size**self.order
        if n > WINDOWS:
            raise UserError(
                f"the stationary distribution of {n} windows is too much to solve for",
                hint=f"up to {WINDOWS}: a lower order, or give initial=",
            )
        Q = self._step(np.eye(n))
        system = np.vstack([Q.T - np.eye(n), np.ones(n)])
        pi, _, rank, _ = np.linalg.lstsq(system, np.append(np.zeros(n), 1.0), rcond=None)
        if rank < n:
            raise UserError(
                "the chain falls apart into pieces that never meet, each with its own stationary "
                "distribution",
                hint="give initial=, or fit with epsilon above 0",
            )
        pi = np.maximum(pi, 0)
        return (pi / pi.sum()).reshape((self.vocab_size,) * self.order)

    def entropy_rate(self) -> float:
        """Nats per symbol that no model can go below: -Σ π(w) Σ_y P(y | w) log P(y | w)."""
        T = self.transition
        surprise = -(T * np.log(np.where(T > 0, T, 1))).sum(-1)
        return float((self.stationary() * surprise).sum())

    def reversed(self) -> "MarkovChain":
        """The stationary chain read backwards: P(x | what follows it) by Bayes' rule."""
        pi = self.stationary()
        joint = pi[..., None] * self.transition  # of τ+1 symbols in a row
        backwards = joint.transpose(*reversed(range(joint.ndim)))
        total = backwards.sum(-1, keepdims=True)
        rows = np.divide(
            backwards, total, out=np.full_like(backwards, 1 / self.vocab_size), where=total > 0
        )
        return MarkovChain(rows, pi.transpose(*reversed(range(pi.ndim))), vocab=self.vocab)

    def backward_log_probabilities(self, sequence: Any) -> Floats:
        """log P(x_t | x_{t+1}, …, x_T) for each t: the same joint, factored from the end.

        By the Markov property only the next τ symbols matter, and with μ_t the distribution of the
        window that begins at t

            P(x_t | x_{t+1} …) = μ_t(x_t …) P(x_{t+τ} | x_t …) / μ_{t+1}(x_{t+1} …)

        Sums to log P(x_1, …, x_T), as the forward factors do; -inf before what cannot come.
        """
        ids = self.encode(sequence).astype(np.int64)
        joint = self._window_log_probabilities(ids)  # log μ_t of each window, then of shorter ends
        steps = max(0, len(ids) - self.order)
        both, given = joint[:-1].copy(), joint[1:]
        both[:steps] += self.score(ids)[self.order :]
        return np.subtract(both, given, out=both, where=both > -np.inf)

    def _window_log_probabilities(self, ids: Ints) -> Floats:
        """log μ_t(x_t …) for each whole window, then for what remains of the last one, to log 1."""
        tau, m = self.order, self.vocab_size
        windows = max(1, len(ids) - tau + 1)
        mu, p = self.initial.reshape(-1), []
        for t in range(windows):
            mu = self._step(mu) if t else mu
            if len(ids) >= tau:
                p.append(mu[_codes(ids[t : t + tau], tau, m)[0]])
        last = _marginal(mu.reshape(self.initial.shape), min(tau, len(ids)))
        tail = ids[windows - 1 :]
        if len(ids) < tau:
            p.append(last[tuple(tail)])
        for gone in range(1, len(tail) + 1):
            last = last.sum(0)
            p.append(last[tuple(tail[gone:])])
        with np.errstate(divide="ignore"):
            return np.log(np.array(p))

    def sample(self, length: int, seed: int = 0) -> Ints:
        """Draw `length` symbols, as ids; same seed, same symbols."""
        length = whole_number("length", length, at_least=0, hint="length=1000")
        rng = np.random.default_rng(whole_number("seed", seed, at_least=0, hint="seed=0"))
        m, size = self.vocab_size, self.vocab_size**self.order
        window = int(rng.choice(size, p=self.initial.reshape(-1)))
        head = np.unravel_index(window, self.initial.shape)
        edges = np.cumsum(self.transition.reshape(-1, m), axis=1)
        edges[:, -1] = 1.0
        rows = edges.tolist()
        symbols = [int(x) for x in head[:length]]
        for u in rng.random(max(0, length - self.order)).tolist():
            symbols.append(bisect_right(rows[window], u))
            window = (window * m + symbols[-1]) % size
        return np.array(symbols, np.min_scalar_type(m - 1))


def _power(Q: Floats, exponent: int) -> Floats:
    """Q^exponent of a matrix whose rows sum to one, by squares; so do those of every product, or
    what is lost in rounding would double with each square."""
    power = np.eye(len(Q))
    while exponent:
        if exponent & 1:
            power = power @ Q
            power /= power.sum(1, keepdims=True)
        Q = Q @ Q
        Q /= Q.sum(1, keepdims=True)
        exponent >>= 1
    return power


def _codes(ids: Ints, order: int, m: int) -> Ints:
    """Each window of `order` ids as one number in base m; one for each place a window fits."""
    n = max(0, len(ids) - order + 1)
    codes = np.zeros(n, np.int64)
    for j in range(order):
        codes = codes * m + ids[j : j + n]
    return codes


def _marginal(joint: Floats, length: int) -> Floats:
    """The distribution of the first `length` of the symbols that `joint` is over."""
    return joint.sum(tuple(range(length, joint.ndim)))


def _distributions(name: str, values: Any, shape: tuple[int, ...] | None = None) -> Floats:
    """Checked: nowhere negative, and summing to one (transition: along its last axis)."""
    try:
        table = np.array(values, np.float64)
    except (TypeError, ValueError) as problem:
        raise UserError(
            f"{name} must be a table of numbers: {problem}", hint="rows of one length"
        ) from problem
    if shape is not None and table.shape != shape:
        raise UserError(f"{name} of shape {table.shape} must be of shape {shape}")
    sums = table.sum(-1) if shape is None and table.ndim else table.sum()
    if not (table >= 0).all() or not np.allclose(sums, 1, rtol=0, atol=1e-9):
        raise UserError(
            f"{name} must hold probabilities that sum to one", hint="divide each row by its sum"
        )
    return table


def _checked_order(order: int, epsilon: float, m: int, length: int) -> int:
    order = whole_number("order", order, at_least=1, hint="order=1 looks one symbol back")
    if not isinstance(epsilon, Real) or not 0 <= epsilon < float("inf"):
        raise UserError(f"epsilon={epsilon!r} must be 0 or more and finite", hint="epsilon=1")
    if length <= order:
        raise UserError(
            f"a text of {counted(length, 'symbols')} is too short for a chain of order {order}",
            hint=f"at least {order + 1} symbols",
        )
    if m ** (order + 1) > LIMIT:
        raise UserError(
            f"order {order} over {m} symbols needs a table of {m}^{order + 1} numbers",
            hint="NgramModel keeps only what occurs",
        )
    return order
