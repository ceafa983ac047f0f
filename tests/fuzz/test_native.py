"""Every native entry, handed tensors of which one is wrong in one property.

The rule: the numbers of plain PyTorch on the same tensors, or an exception in words; never a
signal, never other numbers. `harness.py` says how to ask for more cases.

How far two right answers may lie apart follows from rounding: the reference is computed in float64
and once more in the type of the native answer, and the native error may be some multiple of the
reference's own.
"""

import random
from collections import Counter
from typing import Any

import pytest
import torch
from harness import cases
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from elman import nn
from elman.cells import Weights, named
from elman.errors import UserError
from elman.kernels import Piece, Pull, reference
from elman.kernels.cpu import FLOAT, KERNEL, Steps, Windows, clip_norm, head

DEFAULT = 60
WHOLE = 0.4
"""The share of cases in which nothing is wrong, so that many are compared."""
REFUSALS = (UserError, RuntimeError, ValueError, IndexError, TypeError, UserWarning)
pytestmark = [
    pytest.mark.fuzz,
    pytest.mark.skipif(KERNEL.library is None, reason="the cpu kernel was not built"),
]


class Tally(Counter):
    """How the cases of one entry ended: compared, refused by the native code, or uncompared."""

    def agree(self, found, exact, plain) -> None:
        """Where the native code answered, the reference answers, too, with the same numbers."""
        self["compared" if found is not None else "refused"] += 1
        if found is None:
            return
        exact, plain = exact or plain, plain or exact  # one may refuse what the other never reads
        assert exact is not None, "native code answered what the reference refuses"
        for a, b, c in zip(found, exact, plain, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                close(a, b, c)

    def fair(self) -> None:
        """At least a third of the cases were compared, and some were refused."""
        print(dict(self))
        assert self["compared"] >= sum(self.values()) / 3, self
        assert self["refused"] or sum(self.values()) < DEFAULT, self


def close(a: Tensor, exact: Tensor, plain: Tensor) -> None:
    """|a - exact| within 16 times the plain version's own error, and 32 roundings of the largest.

    Sums in another order, and tanh by another formula, err by a few roundings of what they add.
    """
    eps = max(torch.finfo(kind).eps for kind in (a.dtype, torch.float32))  # most inputs are float32
    a, exact, plain = a.double(), exact.double(), plain.double()
    assert a.shape == exact.shape
    finite = exact.isfinite() & plain.isfinite() & (exact.abs() < 1e30)
    if not finite.any():
        return
    largest = exact[finite].abs().max()
    allowed = 16 * (plain - exact)[finite].abs().max() + 32 * eps * largest
    assert (a - exact)[finite].abs().max() <= allowed, (a, exact, allowed)


def wide(structure):
    """A nest with every real tensor in float64."""
    if isinstance(structure, Tensor):
        return structure.double() if structure.is_floating_point() else structure
    if isinstance(structure, tuple):
        items = [wide(x) for x in structure]
        return type(structure)(*items) if hasattr(structure, "_fields") else tuple(items)
    return structure


def wrongs(t: Tensor, chance: random.Random) -> Tensor:
    """The same tensor with one property changed: where it lies, its type, shape or layout."""
    kinds = [
        lambda: t.to("meta"),
        lambda: t.to(torch.float16 if t.is_floating_point() else torch.int32),
        lambda: t.to(torch.float64),
        lambda: t.to(torch.complex64),
        lambda: t[:0],
        lambda: t[..., :1],
        lambda: t[None],
        lambda: t.flatten(),
        lambda: torch.cat([t, t]),
        lambda: torch.stack([t, t], -1)[..., 0],
        lambda: t.transpose(0, -1),
        lambda: t.flatten()[:1].expand(t.shape),
        lambda: torch._neg_view(t) if t.is_floating_point() else t.flip(0),
        lambda: t.to_sparse() if t.dim() else t,
        lambda: t.to_mkldnn() if t.dtype == torch.float32 and t.numel() else t,
        lambda: t if t.is_floating_point() else t + 1000,
        lambda: t if t.is_floating_point() else -t - 1,
    ]
    return chance.choice(kinds)()


def problem(chance: random.Random) -> tuple[Piece, Pull]:
    cell = named(chance.choice(["tanh", "relu", "linear", "gru", "lstm"]))
    T, B, inputs, H = (chance.randint(1, 5) for _ in range(4))
    g = torch.Generator().manual_seed(chance.randint(0, 2**31))
    normal = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    M = cell.gates * H
    w = Weights(normal(M, inputs), normal(M, H), normal(M), normal(M))
    ids = chance.random() < 0.4
    xs = torch.randint(inputs, (T, B), generator=g) if ids else normal(T, B, inputs)
    state = tuple(normal(B, H) for _ in cell.states)
    lengths = torch.randint(T + 1, (B,), generator=g) if chance.random() < 0.3 else None
    xi = chance.choice([None, normal(T), normal(T, B)])
    pull = Pull(normal(T, B, H), tuple(normal(B, H) for _ in state), xi)
    return Piece(cell, w, xs, state, lengths), pull


def spoil(structure, chance) -> Any:
    """One tensor of a nest of named tuples and tuples, spoiled."""
    leaves = []

    def collect(x, path):
        if isinstance(x, Tensor):
            leaves.append(path)
        elif isinstance(x, tuple):
            for i, y in enumerate(x):
                collect(y, (*path, i))

    def rebuild(x, path):
        if not path:
            return wrongs(x, chance)
        items = list(x)
        items[path[0]] = rebuild(items[path[0]], path[1:])
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)

    collect(structure, ())
    return rebuild(structure, chance.choice(leaves))


def outcome(run):
    """What comes out, or None for a refusal."""
    try:
        return run()
    except REFUSALS:
        return None


def maybe(structure, chance):
    """The nest as it is, or spoiled."""
    return structure if chance.random() < WHOLE else spoil(structure, chance)


def test_forward():
    tally = Tally()
    for chance in cases(DEFAULT):
        piece = outcome(lambda: maybe(problem(chance)[0], chance))  # noqa: B023
        if piece is None or KERNEL.refuses(piece) is not None:
            tally["refused"] += 1
            continue
        run = lambda kernel, p: kernel.forward(p)[:2]  # noqa: E731
        found = outcome(lambda: run(KERNEL, piece))  # noqa: B023
        plain = outcome(lambda: run(reference.KERNEL, piece))  # noqa: B023
        exact = outcome(lambda: run(reference.KERNEL, wide(piece)))  # noqa: B023
        tally.agree(found, exact, plain)
    tally.fair()


def backward(kernel, piece, trace, pull):
    dxs, dw, dstate = kernel.backward(piece, trace, pull)
    return [dxs, *dw[:4], *dstate]


def test_backward():
    tally = Tally()
    for chance in cases(DEFAULT):
        tally.update([backward_case(chance, tally)])
    del tally[None]
    tally.fair()


def exact_backward(piece, pull):
    pull = pull if pull.into is None else pull._replace(into=piece.w.zeros())
    return backward(reference.KERNEL, piece, reference.KERNEL.forward(piece), pull)


def backward_case(chance, tally) -> str | None:
    piece, pull = problem(chance)
    if chance.random() < 0.3:
        pull = pull._replace(into=piece.w.zeros())
    traces = [kernel.forward(piece) for kernel in (KERNEL, reference.KERNEL)]
    wrong = chance.choices(("nothing", "piece", "pull", "trace"), (4, 2, 2, 1))[0]
    spoiled = outcome(lambda: spoil({"piece": piece, "pull": pull}.get(wrong, traces[0]), chance))
    if spoiled is None:
        return "refused"
    if wrong == "trace":  # kept in a form of the kernel's own: there is nothing to compare with
        outcome(lambda: backward(KERNEL, piece, spoiled, pull))
        return "only survived"
    piece = spoiled if wrong == "piece" else piece
    pull = spoiled if wrong == "pull" else pull
    if KERNEL.refuses(piece) is not None:
        return "refused"
    fresh = pull if pull.into is None else pull._replace(into=pull.into.map(torch.clone))
    found = outcome(lambda: backward(KERNEL, piece, traces[0], pull))
    plain = outcome(lambda: backward(reference.KERNEL, piece, traces[1], fresh))
    exact = outcome(lambda: exact_backward(wide(piece), wide(pull)))
    tally.agree(found, exact, plain)
    return None


def test_head():
    tally = Tally()
    for chance in cases(DEFAULT):
        g = torch.Generator().manual_seed(chance.randrange(2**31))
        T, B, H, V = (chance.randint(1, 6) for _ in range(4))
        normal = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731, B023
        bias = normal(V) if chance.random() < 0.7 else None
        whole = (normal(T, B, H), normal(V, H), bias, torch.randint(V, (T, B), generator=g))
        tensors = outcome(lambda: maybe(whole, chance))  # noqa: B023
        if tensors is None or not head.runs(KERNEL, *tensors[:3]):
            tally["refused"] += 1
            continue
        native = outcome(lambda: [head.mean_nats(KERNEL, *tensors, (True, True))[0]])  # noqa: B023
        tally.agree(native, outcome(lambda: nats(*wide(tensors))), outcome(lambda: nats(*tensors)))  # noqa: B023
    tally.fair()


def nats(hs, W, b, targets):
    if targets.is_complex():
        raise TypeError("torch would only warn, and take the real part")
    return [cross_entropy(linear(hs, W, b).flatten(0, -2), targets.flatten().long())]


def test_clip():
    tally = Tally()
    for chance in cases(DEFAULT):
        g = torch.Generator().manual_seed(chance.randrange(2**31))
        shapes = [(chance.randint(1, 6), chance.randint(1, 6)) for _ in range(3)]
        whole = tuple(torch.randn(*s, generator=g) for s in shapes)
        gradients = outcome(lambda: maybe(whole, chance))  # noqa: B023
        if gradients is None:
            tally["refused"] += 1
            continue
        before = [t.clone() if t.layout == torch.strided else t for t in gradients]
        norm = outcome(lambda: clip_norm(KERNEL, gradients, 0.5))  # noqa: B023
        tally["refused" if norm is None else "compared"] += 1
        if norm is not None:
            exact = torch.stack([t.double().norm() for t in before]).norm()
            torch.testing.assert_close(norm, float(exact), rtol=1e-6, atol=0)
            for t, old in zip(gradients, before, strict=True):
                torch.testing.assert_close(t, old * min(1.0, 0.5 / max(norm, 1e-9)))
    tally.fair()


def test_steps():
    tally = Tally()
    for chance in cases(DEFAULT):
        tally.update([steps_case(chance, tally)])
    del tally[None]
    tally.fair()


def steps_case(chance, tally) -> str | None:
    torch.manual_seed(chance.randrange(2**31))
    kind = chance.choice([nn.RNN, nn.GRU, nn.LSTM])
    rnn, out = kind(5, 4, num_layers=chance.randint(1, 2)).eval(), torch.nn.Linear(4, 3)
    job = rnn.job(torch.zeros(1, 2, dtype=torch.int64))
    ids, W, b = torch.randint(5, (2,)), out.weight.detach(), out.bias.detach()
    if chance.random() < 0.7:
        inputs = outcome(lambda: maybe((ids, W, b), chance))
        if inputs is None:
            return "refused"
        ids, W, b = inputs
    else:
        name = chance.choice([n for n, _ in rnn.named_parameters()])
        spoiled = outcome(lambda: wrongs(getattr(rnn, name).detach(), chance))
        if spoiled is None:
            return "refused"
        rnn._parameters[name] = torch.nn.Parameter(spoiled, requires_grad=False)
        job = outcome(lambda: rnn.job(torch.zeros(1, 2, dtype=torch.int64)))
    if job is None or any(KERNEL.refuses(piece) for piece in job.pieces()):
        return "refused"
    with torch.no_grad():
        native = outcome(lambda: [Steps(KERNEL, job, W, b)(ids)])
        plain = outcome(lambda: [linear(rnn(ids[None].long())[0], W, b)[0]])
        exact = outcome(
            lambda: [linear(rnn.double()(ids[None].long())[0], W.double(), b.double())[0]]
        )
    tally.agree(native, exact, plain)
    return None


def test_windows():
    tally = Tally()
    for chance in cases(DEFAULT):
        tally.update([windows_case(chance, tally)])
    del tally[None]
    tally.fair()


def windows_case(chance, tally) -> str | None:
    torch.manual_seed(chance.randrange(2**31))
    kind = chance.choice([nn.RNN, nn.GRU, nn.LSTM])
    rnn = kind(5, 4, num_layers=chance.randint(1, 2))
    W, b = torch.randn(5, 4), torch.randn(5)
    ids, targets = torch.randint(5, (3, 2)), torch.randint(5, (3, 2))
    job = rnn.job(ids)
    state = tuple(torch.zeros(rnn.num_layers, 2, 4) for _ in job.cell.states)
    wrong = chance.choices(("nothing", "ids", "weights", "data"), (4, 2, 2, 2))[0]
    if wrong == "ids":
        spoiled = outcome(lambda: spoil((ids, targets), chance))
        ids, targets = spoiled or (ids, targets)
    elif wrong == "weights":
        spoiled = outcome(lambda: spoil((state, W, b), chance))
        state, W, b = spoiled or (state, W, b)
    windows = outcome(lambda: Windows(KERNEL, job, list(state), W, b, FLOAT))
    if windows is None:
        return "refused"
    if wrong == "data":
        p = chance.choice(windows.weights)
        spoiled = outcome(lambda: wrongs(p.detach(), chance))
        if spoiled is None or outcome(lambda: setattr(p, "data", spoiled) or True) is None:
            return "refused"
    found = outcome(lambda: [torch.tensor(windows(ids, targets))])
    with torch.no_grad():
        plain = outcome(lambda: nats(rnn(ids)[0], W, b, targets))
        exact = outcome(lambda: nats(rnn.double()(ids)[0], W.double(), b.double(), targets))
    tally.agree(found, exact, plain)
    return None
