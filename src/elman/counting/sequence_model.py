"""What every model of token sequences can do: score a text, predict the next token, write.

A counting model, a Markov chain, a network and a mixture of them all answer the same four questions
(`score`, `start`, `read`, `predict`); perplexity and generation follow from the answers.

    log P(x_1 … x_T) = Σ_t log P(x_t | x_1 … x_{t-1}),    perplexity = exp(-1/T log P(x_1 … x_T))
"""

import abc
import reprlib
from collections.abc import Sequence
from numbers import Real
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError
from elman.options import whole_number
from elman.text.vocab import Vocab

Ints = NDArray[np.integer]
Floats = NDArray[np.float64]
State = TypeVar("State")


class SequenceModel(abc.ABC, Generic[State]):
    """A probability for every next token, given those before it.

    Wherever a sequence is asked for, it may be ids (an array, a tensor, a list of integers), or, if
    the model has a vocabulary, text or a list (of lists) of tokens.
    """

    vocab: Vocab | None
    vocab_size: int
    end: int | None = None
    """The id that ends a sequence, for models that predict where sentences end."""

    @abc.abstractmethod
    def score(self, ids: Ints) -> Floats:
        """log P of each id given all before it, in nats, shape (T,)."""

    @abc.abstractmethod
    def start(self) -> State:
        """The state of a model that has read nothing."""

    @abc.abstractmethod
    def read(self, state: State, ids: Ints) -> State:
        """The state after reading `ids`; the given state is left as it was."""

    @abc.abstractmethod
    def predict(self, state: State) -> Floats:
        """log P of every token that may come next, in nats, shape (vocab_size,)."""

    def log_probabilities(self, sequence: Any, context: Any = ()) -> Floats:
        """log P of each token given those before it and `context`, in nats."""
        ids, before = self.encode(sequence), self.encode(context)
        return self.score(np.concatenate([before, ids]))[len(before) :]

    def log_probability(self, sequence: Any, context: Any = ()) -> float:
        """log P of the whole sequence, in nats; -inf where the model holds it impossible."""
        return float(self.log_probabilities(sequence, context).sum())

    def perplexity(self, sequence: Any, context: Any = ()) -> float:
        """exp of the mean nats per token: the geometric mean number of choices."""
        scores = self.log_probabilities(sequence, context)
        if len(scores) == 0:
            raise UserError("perplexity of an empty sequence", hint="give at least one token")
        return float(np.exp(-scores.mean()))

    def generate(
        self, length: int, *, prompt: Any = (), temperature: float = 1.0, seed: int = 0
    ) -> list[Any]:
        """Continue `prompt` by up to `length` tokens; same seed, same tokens.

        Temperature 0 takes the likeliest token each time. Tokens where the model has a vocabulary,
        else ids; without the prompt, and without the token that ends a sequence.
        """
        length = whole_number("length", length, at_least=0, hint="length=100")
        if not isinstance(temperature, Real) or not temperature >= 0:
            raise UserError(f"temperature={temperature} must be 0 or more", hint="1 samples as is")
        rng = np.random.default_rng(whole_number("seed", seed, at_least=0, hint="seed=0"))
        state = self.read(self.start(), self.encode(prompt))
        written: list[int] = []
        while len(written) < length:
            token = choose(self.predict(state), temperature, rng)
            if token == self.end:
                break
            written.append(token)
            state = self.read(state, np.array([token]))
        return self.vocab.to_tokens(written) if self.vocab is not None else written

    def encode(self, sequence: Any) -> Ints:
        """One array of ids, all of them in the vocabulary; lists of lists are joined."""
        return encode(sequence, self.vocab, self.vocab_size)


def choose(log_p: Floats, temperature: float, rng: np.random.Generator) -> int:
    """Draw a token from P^(1/temperature), or take the likeliest where that is 0."""
    best = log_p.max()
    if best == -np.inf:
        raise UserError(
            "the model knows of no token that may come next",
            hint="an unsmoothed model ends where its text ended; epsilon=1 smooths it",
        )
    if temperature == 0:
        return int(log_p.argmax())
    with np.errstate(over="ignore"):  # of a temperature near 0: all but the likeliest vanish
        p = np.exp((log_p - best) / temperature)
    return int(rng.choice(len(p), p=p / p.sum()))


def encode(sequence: Any, vocab: Vocab | None, vocab_size: int | None) -> Ints:
    """Ids of a text, of tokens, or of ids, checked; of the smallest type there is, if it can be.

    Without a `vocab_size` any id will do.
    """
    pieces = [_encode_flat(piece, vocab) for piece in pieces_of(sequence)]
    ids = pieces[0] if len(pieces) == 1 else np.concatenate([np.zeros(0, np.uint8), *pieces])
    if len(ids) and ids.min() < 0 and vocab_size is None:
        raise UserError(f"id {ids.min()} is not in a vocabulary", hint="ids run from 0 up")
    if len(ids) and vocab_size is not None and not 0 <= ids.min() <= ids.max() < vocab_size:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise UserError(
            f"id {wrong} is not in a vocabulary of {vocab_size} tokens",
            hint=f"ids run from 0 to {vocab_size - 1}",
        )
    return ids


def vocabulary_of(
    sequence: Any, vocab: Vocab | None, vocab_size: int | None
) -> tuple[Vocab | None, int]:
    """The vocabulary a model is fitted with and its size: as given, or as the sequence has it."""
    if vocab is None and vocab_size is None:
        vocab = _vocabulary(sequence)
    if vocab is not None and vocab_size not in (None, len(vocab)):
        raise UserError(
            f"vocab_size={vocab_size} disagrees with a vocabulary of {len(vocab)} tokens",
            hint="give one of the two",
        )
    if vocab is not None:
        return vocab, len(vocab)
    if vocab_size is None:
        return None, int(encode(sequence, None, None).max(initial=0)) + 1
    return None, whole_number("vocab_size", vocab_size, at_least=1, hint="1 + the largest id")


def _vocabulary(sequence: Any) -> Vocab | None:
    """The vocabulary of a text or of tokens; none for ids."""
    if isinstance(sequence, str | bytes):
        return Vocab.from_text(sequence, "char" if isinstance(sequence, str) else "byte")
    first = next((piece[0] for piece in pieces_of(sequence) if len(piece)), None)
    return Vocab(sequence) if isinstance(first, str) else None


def pieces_of(sequence: Any) -> Sequence[Any]:
    """The sequences of a list of sequences, or the one that there is."""
    nested = isinstance(sequence, list | tuple) and sequence and not is_token(sequence[0])
    pieces = sequence if nested else [sequence]
    for piece in pieces:
        if not isinstance(piece, Sequence) and not getattr(piece, "ndim", 0):
            raise UserError(
                "a sequence is a text, bytes, a list of tokens or an array of ids, "
                f"not {reprlib.repr(piece)}",
                hint="list(tokens), if they come one by one",
            )
    return pieces


def is_token(item: Any) -> bool:
    """Whether this is a token or an id, rather than a list of them."""
    return isinstance(item, str | int | np.integer) or (hasattr(item, "ndim") and item.ndim == 0)


def _encode_flat(piece: Any, vocab: Vocab | None) -> Ints:
    if len(piece) == 0:
        return np.zeros(0, np.uint8)
    if isinstance(piece, str | bytes) or isinstance(piece[0], str):
        if vocab is None:
            raise UserError(
                f"the model knows ids only, not tokens such as {piece[0]!r}",
                hint="fit it on tokens, or give it vocab=",
            )
        return vocab.encode(piece)
    ids = np.asarray(piece.cpu() if hasattr(piece, "cpu") else piece)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UserError(
            f"a sequence of ids must be one-dimensional and integer, not {ids.shape} {ids.dtype}",
            hint="ids.flatten() or a list of sequences",
        )
    return ids
