"""The notes' own names, served by elman: paste a cell of theirs, change one import, run it.

    from elman import notes as d2l        # instead of: from d2l import torch as d2l

Signatures, shapes and defaults are the notes' (chapter 8); what runs below them is elman. Where a
function differs from the notes', its docstring says so, and the concordance has all of them in one
table. Chance comes from Python's `random` and from torch's generator, as there.
"""

import collections
import functools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from elman import nn as elman_nn
from elman import strict_json
from elman.errors import UserError
from elman.language_model.nests import over
from elman.options import whole_number
from elman.scoring.metrics import perplexity
from elman.text import batches, corpus, datasets, tokens
from elman.text.vocab import Vocab
from elman.training import optimizers
from elman.training.optimisation import clip_gradients

__all__ = [
    "DATA_HUB",
    "DATA_URL",
    "Accumulator",
    "Animator",
    "RNNModel",
    "RNNModelScratch",
    "SeqDataLoader",
    "Timer",
    "Trained",
    "Vocab",
    "count_corpus",
    "download",
    "evaluate_loss",
    "get_net",
    "get_params",
    "grad_clipping",
    "init_rnn_state",
    "init_weights",
    "load_array",
    "load_corpus_time_machine",
    "load_data_time_machine",
    "measured",
    "plot",
    "predict_ch8",
    "read_time_machine",
    "rnn",
    "seq_data_iter_random",
    "seq_data_iter_sequential",
    "sgd",
    "tokenize",
    "train",
    "train_ch8",
    "train_epoch_ch8",
    "try_gpu",
]

_DATA = Path(__file__).parent / "data"

Batch = tuple[Tensor, Tensor]
"""X and Y, each (batch, time); Y is one step ahead."""


Limits = Sequence[float]
"""Where an axis begins and ends."""


# ---------------------------------------------------------------------------- pictures


def plot(
    X: Any,
    Y: Any = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
    legend: Sequence[str] | None = None,
    xlim: Limits | None = None,
    ylim: Limits | None = None,
    xscale: str = "linear",
    yscale: str = "linear",
    figsize: tuple[float, float] = (3.5, 2.5),
) -> None:
    """Curves, each of Y over its X, or X over 0, 1, 2 …; `plt.show()` shows them.

    X and Y are one curve or a list of them, and one X serves every Y. Every call opens a figure
    of its own; the notes' draws over the one before.
    """
    ys = _curves(X if Y is None else Y)
    xs = [np.arange(len(y)) for y in ys] if Y is None else _curves(X)
    xs = xs * len(ys) if len(xs) == 1 else xs
    if len(xs) != len(ys):
        raise UserError(f"there are {len(xs)} X for {len(ys)} Y", hint="one X, or one for each Y")
    drawn = Animator(xlabel, ylabel, legend, xlim, ylim, xscale, yscale, figsize)
    drawn.draw(list(zip(xs, ys, strict=True)))


def _curves(values: Any) -> list[Any]:
    """One curve or several as flat arrays."""
    several = isinstance(values, list | tuple) and any(np.ndim(v) > 0 for v in values)
    curves = values if several else [values]
    return [np.asarray(torch.as_tensor(c).detach().cpu()).reshape(-1) for c in curves]


def _number(value: Any) -> float:
    """A number, or a loss that still has its gradient."""
    return float(value.detach() if isinstance(value, Tensor) else value)


class Animator:
    """Curves that grow a point at a time, in an open figure that `plt.show()` shows.

    The notes redraw theirs while a cell runs; this one is seen when the cell is done.
    """

    def __init__(
        self,
        xlabel: str | None = None,
        ylabel: str | None = None,
        legend: Sequence[str] | None = None,
        xlim: Limits | None = None,
        ylim: Limits | None = None,
        xscale: str = "linear",
        yscale: str = "linear",
        figsize: tuple[float, float] = (3.5, 2.5),
    ) -> None:
        import matplotlib.pyplot as plt

        from elman.figures.style import house

        with house():
            self.figure, self.axes = plt.subplots(figsize=figsize, layout="constrained")
        self.axes.set(xlabel=xlabel or "", ylabel=ylabel or "", xscale=xscale, yscale=yscale)
        for set_limits, limits in ((self.axes.set_xlim, xlim), (self.axes.set_ylim, ylim)):
            if limits is not None and limits[0] != limits[1]:  # 10 epochs, from 10 on: no width
                set_limits(limits[0], limits[1])
        self.legend = legend or ()

    def add(self, x: Any, y: Any) -> None:
        """A point on each curve: one x for all of y, or one for each."""
        ys = list(y) if isinstance(y, Sequence) else [y]
        xs = list(x) if isinstance(x, Sequence) else [x] * len(ys)
        before = [line.get_data() for line in self.axes.lines] or [((), ())] * len(ys)
        self.draw(
            [
                (np.append(at, _number(x)), np.append(was, _number(y)))
                for (at, was), x, y in zip(before, xs, ys, strict=True)
            ]
        )

    def draw(self, curves: Sequence[tuple[Any, Any]]) -> None:
        """All curves anew, as pairs of x and y."""
        from elman.figures.style import COLOURS, STYLES

        if self.legend and len(self.legend) != len(curves):
            raise UserError(
                f"legend={list(self.legend)} names {len(self.legend)} of {len(curves)} curves",
                hint="a name for each curve, or no legend",
            )
        for line in list(self.axes.lines):
            line.remove()
        for i, (x, y) in enumerate(curves):
            self.axes.plot(x, y, color=COLOURS[i % len(COLOURS)], linestyle=STYLES[i % len(STYLES)])
        if self.legend:
            self.axes.legend(self.axes.lines, self.legend)


# ---------------------------------------------------------------------------- 8.1 sequence models


def load_array(arrays: Sequence[Tensor], batch_size: int, is_train: bool = True) -> DataLoader[Any]:
    """Minibatches of rows that belong together, shuffled for training."""
    return DataLoader(TensorDataset(*arrays), batch_size, shuffle=is_train)


def init_weights(module: nn.Module) -> None:
    """Xavier for the weights of a linear layer; its bias stays torch's."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)


def get_net() -> nn.Sequential:
    """The notes' network for a window of four values: 4 → 10 → ReLU → 1."""
    net = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 1))
    return net.apply(init_weights)


def evaluate_loss(net: nn.Module, data_iter: Iterable[Batch], loss: nn.Module) -> float:
    """The mean of an unreduced loss over all of `data_iter`."""
    with torch.no_grad():
        losses = [loss(net(X), y).flatten() for X, y in data_iter]
    return float(torch.cat(losses).mean())


def train(
    net: nn.Module, train_iter: Iterable[Batch], loss: nn.Module, epochs: int, lr: float
) -> list[float]:
    """Adam on the sum of an unreduced loss; prints and returns its mean after every epoch.

    The notes print the same lines and return nothing.
    """
    trainer, losses = optimizers.Adam(net.parameters(), lr), []
    for epoch in range(1, epochs + 1):
        for X, y in train_iter:
            trainer.zero_grad()
            loss(net(X), y).sum().backward()
            trainer.step()
        losses.append(evaluate_loss(net, train_iter, loss))
        print(f"epoch {epoch}, loss: {losses[-1]:f}")
    return losses


# ---------------------------------------------------------------------------- 8.2 text

_TIME_MACHINE = datasets.DATASETS["time-machine"].download
assert _TIME_MACHINE is not None

DATA_URL = _TIME_MACHINE.url.removesuffix(_TIME_MACHINE.file)
"""Where the textbook keeps its texts."""

DATA_HUB = {"time_machine": (_TIME_MACHINE.url, _TIME_MACHINE.sha1)}
"""Name → address and SHA-1 of what `download` can find."""


def download(name: str) -> str:
    """The path of a file of `DATA_HUB`: in a folder of ELMAN_DATA, in the cache, or fetched there.

    Wherever it lay, its SHA-1 is checked (`text.datasets`).
    """
    if name not in DATA_HUB:
        raise UserError(
            f"{name!r} is not in DATA_HUB, which has {', '.join(DATA_HUB)}",
            hint="DATA_HUB[name] = (address, SHA-1)",
        )
    url, sha1 = DATA_HUB[name]
    return str(datasets.path_of(datasets.Download(url.rpartition("/")[2], url, sha1)))


def read_time_machine() -> list[str]:
    """The lines of The Time Machine, letters only, lower case (`corpus.load`, `corpus.letters`)."""
    return corpus.letters(corpus.load("time-machine"))


def tokenize(lines: Iterable[str], token: str = "word") -> list[list[str]]:
    """Lines as lists of words or characters (`tokens.tokenize`).

    An unknown kind of token is an error; the notes print a message and go on with None.
    """
    return tokens.tokenize(lines, token)


def count_corpus(tokens: Sequence[Any]) -> collections.Counter[Any]:
    """How often each token occurs in a list of tokens or of lists of them.

    >>> count_corpus([["a", "b"], ["a"]])["a"]
    2
    """
    if len(tokens) == 0 or isinstance(tokens[0], list):
        return collections.Counter(token for line in tokens for token in line)
    return collections.Counter(tokens)


def load_corpus_time_machine(max_tokens: int = -1) -> tuple[list[int], Vocab]:
    """The characters of The Time Machine as ids, and their vocabulary."""
    lines = tokenize(read_time_machine(), "char")
    vocab = Vocab(lines)
    ids = [vocab[token] for line in lines for token in line]
    return (ids[:max_tokens] if max_tokens > 0 else ids), vocab


# ---------------------------------------------------------------------------- 8.3 data sets


def seq_data_iter_random(corpus: Sequence[int], batch_size: int, num_steps: int) -> Iterator[Batch]:
    """Windows from a random offset below `num_steps`, in random order (`batches.shuffled`)."""
    offset, seed = random.randint(0, num_steps - 1), random.getrandbits(31)
    return iter(
        batches.shuffled(corpus, batch=batch_size, window=num_steps, offset=offset, seed=seed)
    )


def seq_data_iter_sequential(
    corpus: Sequence[int], batch_size: int, num_steps: int
) -> Iterator[Batch]:
    """Windows that continue one another row by row, from a random offset (`batches.streams`)."""
    offset = random.randint(0, num_steps)
    return iter(batches.streams(corpus, batch=batch_size, window=num_steps, offset=offset))


class SeqDataLoader:
    """Windows of The Time Machine; every pass over it draws another offset."""

    def __init__(
        self, batch_size: int, num_steps: int, use_random_iter: bool, max_tokens: int
    ) -> None:
        self.data_iter_fn = seq_data_iter_random if use_random_iter else seq_data_iter_sequential
        self.corpus, self.vocab = load_corpus_time_machine(max_tokens)
        self.batch_size, self.num_steps = batch_size, num_steps

    def __iter__(self) -> Iterator[Batch]:
        return self.data_iter_fn(self.corpus, self.batch_size, self.num_steps)


def load_data_time_machine(
    batch_size: int, num_steps: int, use_random_iter: bool = False, max_tokens: int = 10000
) -> tuple[SeqDataLoader, Vocab]:
    """The iterator over The Time Machine's first characters, and its vocabulary."""
    loader = SeqDataLoader(batch_size, num_steps, use_random_iter, max_tokens)
    return loader, loader.vocab


# ---------------------------------------------------------------------------- 8.5 from scratch


def try_gpu(i: int = 0) -> torch.device:
    """The i-th GPU where there is one, else the CPU."""
    return torch.device(f"cuda:{i}" if torch.cuda.device_count() > i else "cpu")


def get_params(vocab_size: int, num_hiddens: int, device: Any) -> list[Tensor]:
    """W_xh, W_hh, b_h, W_hq, b_q: weights from N(0, 0.01²), biases zero."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(size=shape, device=device) * 0.01

    def zeros(size: int) -> Tensor:
        return torch.zeros(size, device=device)

    params = [
        normal(vocab_size, num_hiddens), normal(num_hiddens, num_hiddens), zeros(num_hiddens),
        normal(num_hiddens, vocab_size), zeros(vocab_size),
    ]  # fmt: skip
    return [param.requires_grad_() for param in params]


def init_rnn_state(batch_size: int, num_hiddens: int, device: Any) -> tuple[Tensor]:
    """H_0 = 0, in a tuple, as an lstm would have two."""
    return (torch.zeros((batch_size, num_hiddens), device=device),)


def rnn(inputs: Tensor, state: tuple[Tensor], params: Sequence[Tensor]) -> tuple[Tensor, Any]:
    """The recurrence, a step at a time; inputs are (time, batch, vocabulary).

    H_t = tanh(X_t W_xh + H_{t-1} W_hh + b_h)
    O_t = H_t W_hq + b_q

    Outputs come with time and batch in one dimension, time first.
    """
    W_xh, W_hh, b_h, W_hq, b_q = params
    (H,), outputs = state, []
    for X in inputs:
        H = torch.tanh(X @ W_xh + H @ W_hh + b_h)
        outputs.append(H @ W_hq + b_q)
    return torch.cat(outputs), (H,)


class RNNModelScratch:
    """The notes' model from scratch: parameters in a list, a function for the recurrence."""

    def __init__(
        self,
        vocab_size: int,
        num_hiddens: int,
        device: Any,
        get_params: Callable[..., Sequence[Tensor]],
        init_state: Callable[..., Any],
        forward_fn: Callable[..., tuple[Tensor, Any]],
    ) -> None:
        self.vocab_size, self.num_hiddens = vocab_size, num_hiddens
        self.params = get_params(vocab_size, num_hiddens, device)
        self.init_state, self.forward_fn = init_state, forward_fn

    def __call__(self, X: Tensor, state: Any) -> tuple[Tensor, Any]:
        one_hot = F.one_hot(X.T, self.vocab_size).to(torch.float32)
        return self.forward_fn(one_hot, state, self.params)

    def begin_state(self, batch_size: int, device: Any) -> Any:
        """The state before any text."""
        return self.init_state(batch_size, self.num_hiddens, device)


def predict_ch8(prefix: str, num_preds: int, net: Any, vocab: Vocab, device: Any) -> str:
    """Read `prefix`, then write the likeliest character `num_preds` times.

    A step at a time, as any net of the notes can; `elman.generation` writes with elman's models.
    """
    if not prefix:
        raise UserError("prefix='' gives the network nothing to begin with", hint="prefix='t'")
    state = net.begin_state(batch_size=1, device=device)
    ids = [vocab[token] for token in prefix]

    def read(token: int) -> int:
        nonlocal state
        logits, state = net(torch.tensor([[token]], device=device), state)
        return int(logits.argmax(dim=1))

    with torch.no_grad():
        for token in ids[:-1]:
            read(token)
        for _ in range(num_preds):
            ids.append(read(ids[-1]))
    return "".join(vocab.to_tokens(ids))


def grad_clipping(net: Any, theta: float) -> float:
    """g ← min(1, θ/‖g‖) g over all parameters together (`training.optimisation.clip_gradients`).

    Returns ‖g‖ as it was before; the notes return nothing.
    """
    return clip_gradients([p for p in _parameters(net) if p.requires_grad], theta)


def _parameters(net: Any) -> list[Any]:
    return list(net.parameters()) if isinstance(net, nn.Module) else list(net.params)


def sgd(params: Iterable[Tensor], lr: float, batch_size: int) -> None:
    """w ← w - η g / batch_size, and g back to zero."""
    with torch.no_grad():
        for param in params:
            g = param.grad
            assert g is not None
            param -= lr * g / batch_size
            g.zero_()


class Timer:
    """Seconds since it was made or started."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin to count from now."""
        self._began = time.perf_counter()

    def stop(self) -> float:
        """The seconds since then."""
        return time.perf_counter() - self._began


class Accumulator:
    """Sums of several quantities.

    >>> sums = Accumulator(2)
    >>> sums.add(1, 2.5)
    >>> sums.add(3, 1)
    >>> sums[0], sums[1]
    (4.0, 3.5)
    """

    def __init__(self, n: int) -> None:
        self.data = [0.0] * n

    def add(self, *amounts: Any) -> None:
        """Add to each."""
        self.data = [sum_ + _number(more) for sum_, more in zip(self.data, amounts, strict=True)]

    def reset(self) -> None:
        """Back to zero."""
        self.data = [0.0] * len(self.data)

    def __getitem__(self, i: int) -> float:
        return self.data[i]


def train_epoch_ch8(
    net: Any,
    train_iter: Iterable[Batch],
    loss: nn.Module,
    updater: Any,
    device: Any,
    use_random_iter: bool,
) -> tuple[float, float]:
    """One pass: the perplexity on what it trained on, and tokens per second.

    With sequential windows the state goes on from window to window, cut off from its gradient;
    with random ones each window begins at zero. Gradients are clipped to 1 before each update.
    """
    state, timer, metric = None, Timer(), Accumulator(2)
    for X, Y in train_iter:
        if state is None or use_random_iter:
            state = net.begin_state(batch_size=X.shape[0], device=device)
        state = over(lambda s: s.detach(), state)
        X, y = X.to(device), Y.T.reshape(-1).to(device)
        y_hat, state = net(X, state)
        nats = loss(y_hat, y.long()).mean()
        if isinstance(updater, torch.optim.Optimizer):
            updater.zero_grad()
            nats.backward()
            grad_clipping(net, 1)
            updater.step()
        else:
            nats.backward()
            grad_clipping(net, 1)
            updater(batch_size=1)  # the loss is a mean already
        metric.add(nats.item() * y.numel(), y.numel())
    if metric[1] == 0:
        raise UserError(
            "the iterator has no windows",
            hint="max_tokens above batch_size × num_steps + num_steps",
        )
    return perplexity(metric[0] / metric[1]), metric[1] / timer.stop()


@dataclass(frozen=True)
class Trained:
    """What `train_ch8` found: training perplexity after each epoch, and the last epoch's speed."""

    perplexities: tuple[float, ...]
    tokens_per_second: float

    def __repr__(self) -> str:
        return f"Trained({len(self.perplexities)} epochs, perplexity {self.perplexities[-1]:.3f})"

    def figure(self) -> Figure:
        """The notes' curve: perplexity by epoch."""
        import matplotlib.pyplot as plt

        from elman.figures.style import COLOURS, house

        with house():
            figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
            epochs = range(1, len(self.perplexities) + 1)
            axes.plot(epochs, self.perplexities, color=COLOURS[0], linestyle="-", label="train")
            axes.set(xlabel="epoch", ylabel="perplexity", title="Training perplexity")
            axes.legend()
        plt.close(figure)
        return figure


def train_ch8(
    net: Any,
    train_iter: Iterable[Batch],
    vocab: Vocab,
    lr: float,
    num_epochs: int,
    device: Any,
    use_random_iter: bool = False,
) -> Trained:
    """Train, write a sample every ten epochs, print where it ended.

    The curve is drawn at the end, for `plt.show()`, and returned; the notes draw theirs meanwhile.
    """
    num_epochs = whole_number("num_epochs", num_epochs, at_least=1, hint="500, as in the notes")
    loss, parameters = nn.CrossEntropyLoss(), _parameters(net)
    by_hand = functools.partial(sgd, parameters, lr)
    updater = optimizers.SGD(parameters, lr) if isinstance(net, nn.Module) else by_hand
    perplexities: list[float] = []
    speed = math.nan
    for epoch in range(1, num_epochs + 1):
        ppl, speed = train_epoch_ch8(net, train_iter, loss, updater, device, use_random_iter)
        perplexities.append(ppl)
        if epoch % 10 == 0:
            print(predict_ch8("time traveller", 50, net, vocab, device))
    print(f"perplexity {perplexities[-1]:.1f}, {speed:.1f} tokens/s on {device}")
    for prefix in ("time traveller", "traveller"):
        print(predict_ch8(prefix, 50, net, vocab, device))
    plot(range(1, num_epochs + 1), perplexities, "epoch", "perplexity", ["train"], figsize=(5, 3))
    return Trained(tuple(perplexities), speed)


# ---------------------------------------------------------------------------- 8.6 concise


class RNNModel(nn.Module):
    """The notes' concise model: a recurrent layer (torch's or `elman.nn`'s) and a linear one."""

    def __init__(self, rnn_layer: nn.Module, vocab_size: int) -> None:
        super().__init__()
        layer: Any = rnn_layer
        self.rnn, self.vocab_size, self.num_hiddens = layer, vocab_size, layer.hidden_size
        self.num_directions = 2 if layer.bidirectional else 1
        self.linear = nn.Linear(self.num_hiddens * self.num_directions, vocab_size)

    def forward(self, inputs: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Logits of shape (time · batch, vocabulary), time first, and the state."""
        X = F.one_hot(inputs.T.long(), self.vocab_size).to(torch.float32)
        Y, state = self.rnn(X, state)
        return self.linear(Y.reshape(-1, Y.shape[-1])), state

    def begin_state(self, device: Any, batch_size: int = 1) -> Any:
        """Zeros: a tensor, or a pair of them for an lstm."""
        shape = (self.num_directions * self.rnn.num_layers, batch_size, self.num_hiddens)
        zeros = torch.zeros(shape, device=device)
        pair = isinstance(self.rnn, nn.LSTM | elman_nn.LSTM)
        return (zeros, torch.zeros_like(zeros)) if pair else zeros


# ---------------------------------------------------------------------------- what the book shows


def measured(name: str) -> Any:
    """What takes too long for a page, as `benchmarks/NAME.py` wrote it: `notes`, `carries`."""
    known = sorted(p.name.removesuffix(".json") for p in _DATA.iterdir() if p.suffix == ".json")
    if name not in known:
        raise UserError(f"nothing called {name!r} was measured", hint=" or ".join(known))
    return strict_json.loads((_DATA / f"{name}.json").read_bytes())
