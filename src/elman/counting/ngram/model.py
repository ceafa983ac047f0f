"""`NgramModel`: fit, score, generate, save.

A saved model is one safetensors file: the arrays of its table, and in the header its vocabulary,
what it is, and the seal (`elman.files`) that tells whether any of it has changed.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from elman.counting.ngram import arpa
from elman.counting.ngram.backoff import BackoffTable, Context, Floats
from elman.counting.ngram.counts import Ints, count
from elman.counting.ngram.smoothing import chosen
from elman.counting.sequence_model import SequenceModel, encode, is_token, pieces_of, vocabulary_of
from elman.errors import UserError, counted
from elman.files import BLANK_SEAL, check_seal, has_seal, read_bytes, write_sealed
from elman.options import whole_number
from elman.text.vocab import Vocab

_FORMATS = {"elman n-gram model, version 1": 1, "elman n-gram model, version 2": 2}
"""Version 1 has no seal, and words of its vocabulary were cut at white space."""


@final
class NgramModel(SequenceModel[Context]):
    """Predicts each token from the `order - 1` before it, by counting.

    >>> model = NgramModel.fit("abracadabra", order=2, smoothing="laplace", epsilon=0)
    >>> model.probability("b", "a")                      # 2 of the 5 times that a occurs
    0.4
    >>> model.perplexity("abc")
    inf
    """

    def __init__(
        self, table: BackoffTable, vocab: Vocab | None, *, boundaries: bool, about: str = ""
    ) -> None:
        self.table = table
        self.vocab = vocab
        self.boundaries = boundaries
        self.vocab_size = table.base - 1  # all but the mark of beginning
        self.end = table.base - 2 if boundaries else None
        self.about = about

    @property
    def order(self) -> int:
        """The n of its n-grams: a token is predicted from the n - 1 before it."""
        return self.table.order

    def __repr__(self) -> str:
        grams = ", ".join(f"{len(keys):,}" for keys in self.table.keys)
        return f"<NgramModel of order {self.order}, {self.about}: {grams} k-grams>"

    @classmethod
    def fit(
        cls,
        sequence: Any,
        order: int = 3,
        smoothing: str = "kneser-ney",
        epsilon: float | Sequence[float] | None = None,
        *,
        chain: bool = False,
        boundaries: bool = False,
        vocab: Vocab | None = None,
        vocab_size: int | None = None,
    ) -> Self:
        """Count a text: a `str`, `bytes`, a list (of lists) of tokens, or an array of ids.

        `smoothing` is one of `smoothing.SMOOTHINGS`: "kneser-ney", "laplace" (the notes' formula)
        or "laplace-open" (which gives `<unk>` a share). `epsilon` (one number, or one for each
        order; 1 if not given) and `chain` belong to Laplace smoothing.

        With `boundaries` each list of a list of lists is a sentence whose beginning is known and
        whose end is predicted; without, they are read as one text.
        """
        order = whole_number("order", order, at_least=1, hint="order=1 counts tokens")
        kind = chosen(smoothing, order, epsilon, chain)
        vocab, size = vocabulary_of(sequence, vocab, vocab_size)
        base = size + 1 + boundaries
        ids, starts = _marked(sequence, vocab, size, boundaries)
        _check_length(len(ids) - 1, order, boundaries)
        counts = count(ids, order, base, starts)
        table = kind.estimate(counts, _special(vocab), sentences=boundaries)
        return cls(table, vocab, boundaries=boundaries, about=kind.about)

    def probability(self, token: Any, context: Any = ()) -> float:
        """P(token | context) of one token; only the last order-1 tokens of the context matter.

        The context is read as any sequence is: text, tokens or ids. Models with sentence boundaries
        also know the tokens "</s>" and, in a context, "<s>".
        """
        ids = [*self._context(context), self._id(token)]
        return float(np.exp(self.table.score(np.array(ids))[-1]))

    def _context(self, context: Any) -> list[int]:
        is_text = isinstance(context, str) and not self._is_mark(context)
        if is_text or not (self.boundaries or is_token(context)):
            return self.encode(context).tolist()
        return [self._id(token) for token in ([context] if is_token(context) else context)]

    def _is_mark(self, token: Any) -> bool:
        return self.boundaries and token in ("<s>", "</s>")

    def _id(self, token: Any) -> int:
        if self._is_mark(token):
            return self.table.base - 1 if token == "<s>" else self.table.base - 2
        ids = self.encode([token])
        if len(ids) != 1:
            raise UserError(
                f"{token!r} is {len(ids)} tokens of this model, not one",
                hint="log_probability(tokens, context) takes any number",
            )
        return int(ids[0])

    # The questions every sequence model answers

    def score(self, ids: Ints) -> Floats:
        return self.table.score(self.encode(ids))

    def start(self) -> Context:
        return (self.table.base - 1,)[: self.order - 1] if self.boundaries else ()

    def read(self, state: Context, ids: Ints) -> Context:
        ids = self.encode(ids)
        for token in ids[-(self.order - 1) :] if len(ids) >= self.order > 1 else ids:
            state = self.table.advance(state, int(token))
        return state

    def predict(self, state: Context) -> Floats:
        return self.table.next(state)

    def log_probabilities(self, sequence: Any, context: Any = ()) -> Floats:
        """log P of each token, in nats; with boundaries, also of the end of each sentence."""
        if not self.boundaries:
            return super().log_probabilities(sequence, context)
        if len(context):
            raise UserError("a sentence has no context before its beginning", hint="context=()")
        ids, starts = _marked(sequence, self.vocab, self.table.base - 2, boundaries=True)
        assert starts is not None
        return self.table.score(ids, starts)[~starts]

    # Files

    def to_arpa(self, path: Path | str) -> None:
        """Write the model in the format that KenLM, SRILM and others read (docs/counting.md)."""
        tokens = range(self.table.base - 1 - self.boundaries)
        words = tokens if self.vocab is None else self.vocab.idx_to_token
        arpa.write(path, self.table, words, self.boundaries)

    @classmethod
    def from_arpa(cls, path: Path | str, vocab: Vocab | None = None) -> Self:
        """Read an ARPA file; with `vocab` its words get the ids they have there."""
        table, words, boundaries = arpa.read(path, vocab)
        return cls(table, words, boundaries=boundaries, about="read from an ARPA file")

    def save(self, path: Path | str) -> None:
        """Write everything into one sealed safetensors file, atomically."""
        from safetensors.numpy import save

        tensors = {f"keys.{k}": keys for k, keys in enumerate(self.table.keys, 1)}
        tensors |= {f"log_p.{k}": p for k, p in enumerate(self.table.log_p, 1)}
        tensors |= {f"log_backoff.{k}": w for k, w in enumerate(self.table.log_backoff, 1)}
        about = {"about": self.about, "base": self.table.base, "boundaries": self.boundaries}
        about |= {"order": self.order, "to_unigram": self.table.to_unigram}
        about |= {"vocab": None if self.vocab is None else self.vocab.record()}
        header = {"format": list(_FORMATS)[-1], "seal": BLANK_SEAL, "model": json.dumps(about)}
        write_sealed(path, save(tensors, header))

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read what `save` wrote; refuse anything else, and what has changed since."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        data = read_bytes(path)
        try:
            about, version = _header(data)
            if version > 1 or has_seal(data):
                check_seal(data, path)
            table = _table(load(data), about)
            vocab = None if about["vocab"] is None else Vocab.from_record(about["vocab"], version)
            return cls(table, vocab, boundaries=about["boundaries"], about=about["about"])
        except UserError:
            raise
        except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as problem:
            raise UserError(
                f"{path} is not an n-gram model that elman wrote: {problem}",
                hint="NgramModel.from_arpa reads ARPA files",
            ) from problem


def _special(vocab: Vocab | None) -> Ints:
    """The ids of a vocabulary that stand for no word of a text."""
    if vocab is None or vocab.unk is None:
        return np.arange(0)
    return np.arange(1 + len(vocab.reserved_tokens))


def _check_length(length: int, order: int, boundaries: bool) -> None:
    if length == 0:
        raise UserError("there is nothing to count: the text is empty", hint="give it some tokens")
    if order > length and not boundaries:
        raise UserError(
            f"order={order} is longer than the text of {counted(length, 'tokens')}",
            hint=f"order={length}",
        )


def _marked(
    sequence: Any, vocab: Vocab | None, size: int, boundaries: bool
) -> tuple[Ints, NDArray[np.bool_] | None]:
    """The ids with a mark of beginning before them; or, with `boundaries`, a mark before and an
    end after each sentence, and where those marks are."""
    dtype = np.min_scalar_type(size + boundaries)
    begin, end = np.array([size + boundaries], dtype), np.array([size], dtype)
    if not boundaries:
        return np.concatenate([begin, encode(sequence, vocab, size).astype(dtype)]), None
    pieces = [encode(piece, vocab, size).astype(dtype) for piece in pieces_of(sequence)]
    ids = np.concatenate([part for piece in pieces for part in (begin, piece, end)])
    return ids, ids == begin[0]


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """What the header of a safetensors file says of the model, and the version of the format."""
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= len(data) - 8:
        raise ValueError("it is not a safetensors file")
    metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    version = _FORMATS.get(metadata.get("format"))
    if version is None:
        raise ValueError(f"its header does not say {list(_FORMATS)[-1]!r}")
    return json.loads(metadata["model"]), version


def _table(arrays: dict[str, NDArray[Any]], about: dict[str, Any]) -> BackoffTable:
    """The arrays of a file, checked to fit together, so that no lookup can leave them."""
    orders = range(1, int(about["order"]) + 1)
    keys, log_p, weights = (
        tuple(arrays[f"{name}.{k}"] for k in ks)
        for name, ks in (("keys", orders), ("log_p", orders), ("log_backoff", orders[:-1]))
    )
    sizes = [len(k) for k in keys]
    fits = sizes[0] == about["base"]
    fits &= all(len(p) == size for p, size in zip(log_p, sizes, strict=True))
    fits &= all(len(w) == size + 1 for w, size in zip(weights, sizes, strict=False))
    fits &= all(k.dtype == np.int64 and (np.diff(k) > 0).all() and (k >= 0).all() for k in keys)
    if not fits:
        raise ValueError("its arrays do not fit together")
    return BackoffTable(about["base"], keys, log_p, weights, about["to_unigram"])
