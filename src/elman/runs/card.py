"""README.md of a run: what the model is, what it read, how well it does, how to use it."""

import shlex
from typing import TYPE_CHECKING

from elman import __version__
from elman.text.prepared import Data
from elman.training import Epoch, Result

if TYPE_CHECKING:
    from elman.runs.folder import Run


def model_card(run: "Run") -> str:
    """The text of README.md, from the run's own files."""
    config, where = run.config, shlex.quote(str(run.path))
    model = ", ".join(f"{k} {v}" for k, v in config.model.items() if k != "dropout")
    return (
        f"# {run.path.name}\n\n"
        f"A {config.data.level}-level language model made with elman {__version__}.\n\n"
        f"- model: {model}\n"
        f"- text: {config.data.source}, SHA-256 {config.sha256}, {_held_out(config.data)}\n"
        f"- seed: {config.training.seed}; every option is in config.json\n"
        f"{f'- ran with: {config.ran}{chr(10)}' if config.ran else ''}\n"
        f"{_score(run)}\n\n"
        "```sh\n"
        f"elman evaluate {where}{'' if config.data.holds_out else ' OTHER.txt'}\n"
        f"elman generate {where}\n"
        f"elman train --resume {where}\n"
        "```\n"
    )


def _held_out(data: Data) -> str:
    parts = "" if not data.test else f" ({data.validation:.0%} to choose by, {data.test:.0%} test)"
    if not data.train_tokens:
        return f"the last {data.validation + data.test:.0%} held out{parts}"
    first = f"trained on at most the first {data.train_tokens:,} tokens"
    return f"{first}, the text right after them held out{parts}" if data.holds_out else first


def _unscored(run: "Run") -> str:
    """What can be said without a held-out score: the training is over, or not yet."""
    last = run.latest(Epoch)
    if last is None or last.epoch < run.config.training.epochs or run.config.data.holds_out:
        return "Not finished yet: there is no held-out score."
    return (
        f"Nothing was held out. Perplexity of the training text in the last of {last.epoch} "
        f"passes: {last.perplexity:.3f}."
    )


def _score(run: "Run") -> str:
    result = run.latest(Result)
    if result is None:
        return _unscored(run)
    return (
        f"Held-out text ({result.part}), {result.tokens:,} tokens, {run.config.shown.weights} "
        "weights: "
        f"{result.nats_per_token:.4f} nats per token, "
        f"perplexity {result.perplexity:.3f}, {result.bits_per_char:.4f} bits per character."
    )
