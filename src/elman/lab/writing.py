"""Text, token by token: a prompt, and how boldly it is continued.

Each piece that is written with one set of choices is one `elman.generation.generate`, and so one
`elman generate`; when a choice moves while text streams, the page asks for the rest anew.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from elman import generation, strict_json
from elman.errors import UserError
from elman.lab import again
from elman.runs.loaded import load
from elman.text import prepared

LONGEST = 5000
"""Tokens of one piece."""


def write(path: Path, prompt: str, length: int, seed: int, **choices: Any) -> Iterator[str]:
    """Lines of JSON: `{"again": …}`, then one for each token with the text that it adds.

    A byte or subword that ends inside a character adds nothing, the next one all of it.

    What is wrong is said at the call, not when the first token is asked for.
    """
    if not 1 <= length <= LONGEST:
        raise UserError(f"length={length} must be from 1 to {LONGEST:,}", hint="300 is a paragraph")
    generation.Sampling(**choices)
    trained = load(path)
    ids = trained.vocab.encode(prepared.prompt(trained.config.data, prompt))
    tokens = generation.generate(
        trained.model,
        ids,
        length,
        seed=seed,
        exclude=generation.unwritten(trained.vocab),
        start=generation.opening(trained.vocab),
        **choices,
    )
    command = again.generating(path, prompt, length, seed, **choices)
    return _lines(trained.vocab, np.asarray(ids), tokens, command)


def _lines(vocab: Any, ids: Any, tokens: Iterator[int], command: str) -> Iterator[str]:
    yield strict_json.dumps({"again": command}) + "\n"
    before = vocab.to_tokens(ids[-1:])[0] if len(ids) else None
    written = (vocab.to_tokens([token])[0] for token in tokens)
    for text in vocab.level_used.stream(written, before):
        yield strict_json.dumps({"text": text}) + "\n"
