"""Inside a model: how surprised it is, what its units follow, what it expects, what it remembers.

All of it is `elman.load(RUN)` and `elman.diagnostics.following`.
"""

import math
import threading
from pathlib import Path
from typing import Any, final

import numpy as np

from elman.diagnostics import following
from elman.errors import UserError
from elman.lab import again
from elman.lab.shown import alone, short, token_texts
from elman.runs import Run
from elman.runs.loaded import Loaded, load
from elman.scoring.evaluation import baselines, kneser_ney
from elman.text import prepared
from elman.text.levels import level_of

LONGEST = 20_000
"""Characters of a text that the page may ask about."""
SHOWN = 12
"""Tokens of a distribution, units of a search."""
EXCERPT, PROMPT = 300, 16
"""Characters of the text that is shown at first, and about so many of a prompt."""


@final
class Inside:
    """One run, loaded; loaded again when it has better weights."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mutex = threading.Lock()
        self._loaded: tuple[int, Loaded] | None = None
        self._counts = threading.Lock()  # of a large text that takes a while: nothing else waits
        self._counting: Any = None
        self._rivals: dict[str, Any] | None = None

    def loaded(self) -> Loaded:
        """The run with its weights of now; several may ask at once."""
        with self._mutex:
            files = [self.path / name for name in ("model.safetensors", "state.safetensors")]
            stamp = max((f.stat().st_mtime_ns for f in files if f.exists()), default=0)
            if not stamp:
                raise UserError("there are no weights yet", hint="wait for the first checkpoint")
            if self._loaded is None or self._loaded[0] != stamp:
                self._loaded = (stamp, load(self.path))
            return self._loaded[1]

    def counting(self) -> Any:
        """Kneser–Ney of the training text, of the order that suits its tokens."""
        with self._counts:
            if self._counting is None:
                run = Run.open(self.path)
                order = level_of(run.vocab.level).counting_orders[-1]
                self._counting = kneser_ney(run.splits().train, len(run.vocab), order)
            return self._counting

    def rivals(self) -> dict[str, Any]:
        """What counting the training text scores on the held-out text, weakest first."""
        with self._counts:
            if self._rivals is None:
                self._rivals = self._scored()
            return self._rivals

    def _scored(self) -> dict[str, Any]:
        run = Run.open(self.path)
        parts = run.splits()
        if len(parts.validation) < 2:
            return {}
        scores = baselines(parts.train, parts.validation, run.vocab)
        return {
            n: {"nats": s.nats_per_token, "perplexity": s.perplexity} for n, s in scores.items()
        }

    def excerpt(self) -> dict[str, Any]:
        """The beginning of the held-out text, to look at first, and its first words as a prompt."""
        run = Run.open(self.path)
        parts = run.splits()
        ids = parts.validation if len(parts.validation) > 1 else parts.train
        known = ids if run.vocab.unk is None else ids[ids != run.vocab.unk]  # none of its letters
        text = run.vocab.decode(known[: 2 * EXCERPT])
        head, _, rest = text.partition("\n")  # a part may begin in the middle of a line
        text = (rest if len(head) < EXCERPT < len(rest) else text)[:EXCERPT].strip()
        first = text[:PROMPT].split("\n")[0]
        return {
            "text": text,
            "prompt": first.rsplit(" ", 1)[0] + " " if " " in first else first[:4],
        }

    def surprise(self, text: str) -> dict[str, Any]:
        """Every token with its nats; the first has nothing before it, so none."""
        trained = self.loaded()
        tokens = self._tokens(trained, text)
        nats = trained.score(text).nats if len(tokens) > 1 else np.zeros(0)
        return {
            "tokens": tokens,
            "nats": [None, *short(nats)],
            "mean": float(nats.mean()) if len(nats) else None,
            "units": trained.model.shape.hidden_size,
            "scale": 1.5 * math.log(len(trained.vocab)),  # well beyond a guess among all tokens
            "again": again.python(self.path, f"trained.score({text!r}).nats"),
        }

    def unit(self, text: str, unit: int) -> dict[str, Any]:
        """h_t of one unit of the last layer after each token."""
        trained = self.loaded()
        hs = trained.hidden(text)
        if not 0 <= unit < hs.shape[1]:
            raise UserError(f"there is no unit {unit}", hint=f"0 to {hs.shape[1] - 1}")
        return {
            "tokens": self._tokens(trained, text),
            "values": short(hs[:, unit].numpy()),
            "again": again.python(self.path, f"trained.hidden({text!r})[:, {unit}]"),
        }

    def following(self, text: str, what: str, pattern: str) -> dict[str, Any]:
        """The units most correlated with a signal, or with a pattern typed by the user."""
        trained = self.loaded()
        tokens = self._tokens(trained, text)
        read = "".join(tokens)
        if what == "pattern":
            signal, made = following.occurrences(read, pattern), f"occurrences(text, {pattern!r})"
        elif what in following.SIGNALS:
            signal, made = following.SIGNALS[what](read), f"SIGNALS[{what!r}](text)"
        else:
            known = ", ".join(("pattern", *following.SIGNALS))
            raise UserError(f"units cannot be searched by {what!r}", hint=f"one of {known}")
        signal = following.by_token(signal, tokens)
        if np.ptp(signal) == 0:
            raise UserError(
                "that does not occur in this text, or everywhere in it", hint="try more text"
            )
        r = following.correlations(trained.hidden(text).numpy(), signal)
        order = np.argsort(-np.abs(r), kind="stable")[:SHOWN]
        call = (
            "from elman.diagnostics import following\n"
            f"text = {text!r}\n"
            f"following.correlations(trained.hidden(text).numpy(), following.{made})"
        )
        return {
            "tokens": tokens,
            "signal": short(signal),
            "units": [{"unit": int(i), "r": float(r[i])} for i in order],
            "again": again.python(self.path, call),
        }

    def expects(self, text: str) -> dict[str, Any]:
        """P(next token | text) of the model, beside Kneser–Ney's."""
        trained, counted = self.loaded(), self.counting()
        ours = list(trained.next_token(text).items())[:SHOWN]
        ids = trained.encode(text) if text else np.zeros(0, np.int64)
        theirs = np.exp(counted.predict(counted.read(counted.start(), np.asarray(ids))))
        order = np.argsort(-theirs, kind="stable")[:SHOWN]
        names = trained.vocab.to_tokens(order)
        return {
            "model": [{"token": alone(trained.vocab, t), "p": p} for t, p in ours],
            "counting": [
                {"token": alone(trained.vocab, t), "p": float(theirs[i])}
                for t, i in zip(names, order, strict=True)
            ],
            "again": again.python(self.path, f"trained.next_token({text!r})"),
        }

    def similar(self, text: str, at: int) -> dict[str, Any]:
        """Where else in the text the state points the same way."""
        trained = self.loaded()
        tokens = self._tokens(trained, text)
        found = following.most_similar(trained.hidden(text).numpy(), at)
        call = f"diagnostics.most_similar(trained.hidden({text!r}).numpy(), {at})"
        return {
            "positions": [
                {
                    "at": step,
                    "cosine": cosine,
                    "text": "".join(tokens[max(0, step - 20) : step + 1]),
                }
                for step, cosine in found
            ],
            "again": again.python(self.path, f"from elman import diagnostics\n{call}"),
        }

    def _tokens(self, trained: Loaded, text: str) -> list[str]:
        """The text as the model reads it, token by token, joined as it was."""
        if len(text) > LONGEST:
            raise UserError(
                f"{len(text):,} characters are too many for the page", hint=f"at most {LONGEST:,}"
            )
        level = trained.vocab.level_used  # which cuts as it has learned to
        tokens = level.tokens(prepared.cleaned(trained.config.data, text))  # unknown ones as well
        if len(tokens) == 0:
            raise UserError("there is no token in that text", hint="type a few words")
        return token_texts(trained.vocab, tokens)
