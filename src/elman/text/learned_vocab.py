"""The vocabulary, or the tokenizer, of a text that is larger than memory.

Tokens are counted, on disk where there are many of them (`token_counts.py`). Those that get an id
must have room in memory; a tokenizer is learned from the most frequent words that do.
"""

from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

from elman.errors import UserError
from elman.resources import in_words
from elman.text import prepared
from elman.text.levels import Level, Subwords, level_of
from elman.text.prepared import Data
from elman.text.streaming import Step
from elman.text.token_counts import Counted, TokenCounts, most_frequent, utf8_length
from elman.text.vocab import Vocab

LEARN = 1 << 28
"""Characters of the training part that a tokenizer is learned from, at most: more change little."""
ROOM = 1 << 28
"""Bytes of memory for a vocabulary, of which there must not be more than a machine has."""
WORD, LETTER = 400, 8
"""Bytes that a word and each byte of its spelling take in a vocabulary that is read or written."""
LEARNING_ROOM = 320 << 20
"""Bytes of memory for the words that a tokenizer is learned from."""
LEARNING_LETTER = 140
"""Bytes that each byte of a word takes there."""
LONGEST_LEARNED = 1000
"""Letters of the longest word that is learned from where not all words have room."""


def learn(
    data: Data, texts: Iterable[str | bytes], folder: Path, total: int
) -> Generator[Step, None, Vocab]:
    """The vocabulary of a text that comes in pieces, `total` characters of which are to be read.

    What has no room in memory lies in files of `folder` meanwhile.
    """
    level = level_of(data.level)
    if isinstance(level, Subwords):
        return Vocab({}, level=(yield from _tokenizer(data, texts, folder, total, level)))
    counts = {}
    if level.unknown is not None:
        counts = yield from _counted(data, texts, folder, total, level)
    assert data.min_freq is not None
    vocab = Vocab(counts, data.min_freq, level=level, vocab_size=data.vocab_size)
    prepared.check_not_empty(vocab)
    return vocab


def _counted(
    data: Data, texts: Iterable[str | bytes], folder: Path, total: int, level: Level
) -> Generator[Step, None, dict[str, int]]:
    """How often each token occurs; where they are too many, of those alone that get an id."""
    with TokenCounts(folder, ROOM, word_price) as counts:
        done = 0
        for text in texts:
            counts.add(level.count(level.cut(text)))
            done += len(text)
            yield Step("counting", done, total)
        kept = counts if counts.fits else _chosen(data, counts)
        return {token: n for token, n, _ in kept}


def word_price(word: str) -> int:
    """Bytes of memory that a word of a vocabulary takes."""
    return WORD + LETTER * utf8_length(word)


def _chosen(data: Data, counts: TokenCounts) -> list[Counted]:
    """The words that get an id; those of a vocabulary that is too large are refused."""
    least = data.min_freq or 0
    prices: Counter[int] = Counter()  # of all words of a frequency
    words = 0

    def frequent() -> Iterator[Counted]:
        nonlocal words
        for counted in counts:
            if counted.n >= least:
                words += 1
                prices[counted.n] += word_price(counted.token)
                yield counted

    kept = most_frequent(frequent(), ROOM, word_price, data.vocab_size or None)
    if not words:  # one of them, for a refusal that says how frequent the most frequent is
        return most_frequent(counts, ROOM, word_price, most=1)
    if len(kept) < min(words, data.vocab_size or words):
        raise _too_many(data, words, prices, len(kept))
    return kept


def _too_many(data: Data, words: int, prices: Counter[int], fit: int) -> UserError:
    asked, mean = min(words, data.vocab_size or words), sum(prices.values()) // words
    taken, least = 0, 0
    for n in sorted(prices, reverse=True):
        taken += prices[n]
        if taken > ROOM:
            least = n + 1
            break
    return UserError(
        f"{asked:,} of the text's {data.level} tokens would get an id: at {mean} bytes each a "
        f"vocabulary of {in_words(asked * mean)}, and {in_words(ROOM)} are set apart for it",
        hint=f"--vocab-size {fit} has the most frequent ones"
        + (f", --min-freq {least} all that occur as often" if least <= max(prices) else "")
        + "; --level bpe needs no more than it is given",
    )


def _tokenizer(
    data: Data, texts: Iterable[str | bytes], folder: Path, total: int, level: Subwords
) -> Generator[Step, None, Subwords]:
    """A tokenizer; of its words, where they are too many to learn from, the most frequent."""
    if data.tokenizer:
        return level.learned("", data.vocab_size, data.tokenizer)
    with TokenCounts(folder, LEARNING_ROOM, learning_price) as counts:
        done = 0
        for text in texts:
            counts.add(level.stretches(text))
            done += len(text)
            yield Step("counting", done, total)
            if done >= LEARN:
                break
        kept: Iterable[Counted] = counts
        if not counts.fits:
            short = (counted for counted in counts if len(counted.token) <= LONGEST_LEARNED)
            kept = most_frequent(short, LEARNING_ROOM, learning_price)
        return level.learned_of(((token, n) for token, n, _ in kept), data.vocab_size)


def learning_price(word: str) -> int:
    """Bytes of memory that a word takes while a tokenizer is learned from it."""
    return LEARNING_LETTER * utf8_length(word)


def check_subwords(data: Data) -> None:
    """Refuse subwords without their library, too many or too few, before anything is read."""
    level = level_of(data.level)
    level.check_library()
    if not isinstance(level, Subwords):
        return
    if data.tokenizer:
        size = len(level.learned("", data.vocab_size, data.tokenizer).names)
    else:
        size = level.size_of(data.vocab_size)
    if size * WORD > ROOM:
        raise UserError(
            f"{size:,} subwords at {WORD} bytes each are a vocabulary of {in_words(size * WORD)}, "
            f"and {in_words(ROOM)} are set apart for it",
            hint=f"--vocab-size {ROOM // WORD} at most; a few ten thousand are usual",
        )
