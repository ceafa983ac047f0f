"""Every native entry, handed tensors of which one is wrong in one property.

The rule: the numbers of plain PyTorch on the same tensors, or an exception in words; never a
signal, never other numbers. `harness.py` says how to ask for more cases.

How far two right answers may lie apart follows from rounding: the reference is computed in float64
and once more in the type of the native answer, and the native error may be some multiple of the
reference's own.
"""

import random
from collections import Counter
from contextlib import contextmanager
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
from elman.kernels.cpu import FLOAT, KERNEL, Cpu, Ends, Steps, Windows, clip_norm, head
from elman.kernels.cpu.library import AVX2, DOUBLE, HALF, PORTABLE

DEFAULT = 60
KERNELS = [KERNEL, KERNEL, KERNEL, Cpu(AVX2), Cpu(PORTABLE)]
"""The processor's own instructions most of the time, those of older ones now and then."""
WHOLE = 0.4
"""The share of cases in which nothing is wrong, so that many are compared."""
REFUSALS = (UserError, RuntimeError, ValueError, IndexError, TypeError, UserWarning)
pytestmark = [
    pytest.mark.fuzz,
    pytest.mark.skipif(KERNEL.library is None, reason="the cpu kernel was not built"),
]


class Tally(Counter):
    """How the cases of one entry ended: compared, refused by the native code, or uncompared."""

    def agree(self, found, exact, plain, kind=torch.float32) -> None:
        """Where the native code answered, the reference answers, too, with the same numbers.

        `exact` is the reference in float64, `plain` in the types of the problem, of which `kind` is
        the coarsest.
        """
        self["compared" if found is not None else "refused"] += 1
        if found is None:
            return
        exact, plain = exact or plain, plain or exact  # one may refuse what the other never reads
        assert exact is not None, "native code answered what the reference refuses"
        scale = max(largest(t) for t in exact if t is not None)
        for a, b, c in zip(found, exact, plain, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                eps = max(torch.finfo(k).eps for k in (kind, a.dtype, torch.float32))
                close(a, b, c, 32 * eps * scale)

    def fair(self) -> None:
        """At least a third of the cases were compared, and some were refused."""
        print(dict(self))
        assert self["compared"] >= sum(self.values()) / 3, self
        assert self["refused"] or sum(self.values()) < DEFAULT, self


def largest(t: Tensor) -> float:
    """The largest finite number that is no overflow on its way."""
    sizes = t.double().abs().flatten()
    sizes = sizes[sizes < 1e30]
    return float(sizes.max()) if len(sizes) else 0.0


def close(a: Tensor, exact: Tensor, plain: Tensor, allowed: float) -> None:
    """|a - exact| within 16 times the plain version's own error, and what else is allowed.

    Sums in another order, and tanh by another formula, err by a few roundings of what they add;
    where what they add cancels, that is of the size of the rest of the answer. Allowed are 32
    roundings of the largest number in it.
    """
    a, exact, plain = a.double(), exact.double(), plain.double()
    assert a.shape == exact.shape
    finite = exact.isfinite() & plain.isfinite() & (exact.abs() < 1e30)
    if finite.any():
        allowed += 16 * float((plain - exact)[finite].abs().max())
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


def size(chance: random.Random) -> int:
    """Mostly small; sometimes around the width of a vector and of a block of them."""
    return chance.randint(1, 5) if chance.random() < 0.85 else chance.choice([8, 15, 16, 17, 33])


def kind_of(chance: random.Random) -> torch.dtype:
    """float32 mostly; bfloat16 only where the processor has it."""
    kind = chance.choices((torch.float32, torch.float64, torch.bfloat16), (8, 2, 1))[0]
    half = kind == torch.bfloat16
    return torch.float32 if half and KERNEL.variant(HALF) is None else kind


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def use_threads(chance: random.Random) -> None:
    """Now and then another number of threads."""
    wanted = 1 + (chance.random() < 0.1) + (chance.random() < 0.03)
    if wanted != torch.get_num_threads():
        torch.set_num_threads(wanted)


def problem(chance: random.Random) -> tuple[Piece, Pull]:
    use_threads(chance)
    cell = named(chance.choice(["tanh", "relu", "linear", "gru", "lstm"]))
    T, B, inputs, H = (size(chance) for _ in range(4))
    g, kind = torch.Generator().manual_seed(chance.randint(0, 2**31)), kind_of(chance)
    normal = lambda *shape: torch.randn(*shape, generator=g).to(kind)  # noqa: E731
    M = cell.gates * H
    scale = H**-0.5  # or the linear and relu cells explode
    w = Weights(normal(M, inputs), normal(M, H) * scale, normal(M), normal(M))
    ids = chance.random() < 0.4
    xs = torch.randint(inputs, (T, B), generator=g) if ids else normal(T, B, inputs)
    state = tuple(normal(B, H) for _ in cell.states)
    lengths = torch.randint(T + 1, (B,), generator=g) if chance.random() < 0.3 else None
    wide = torch.float64 if kind == torch.float64 else torch.float32
    xi = chance.choice([None, normal(T).to(wide), normal(T, B).to(wide)])
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
        kernel = chance.choice(KERNELS)
        piece = outcome(lambda: maybe(problem(chance)[0], chance))  # noqa: B023
        if piece is None or kernel.refuses(piece) is not None:
            tally["refused"] += 1
            continue
        run = lambda kernel, p: kernel.forward(p)[:2]  # noqa: E731
        found = outcome(lambda: run(kernel, piece))  # noqa: B023
        plain = outcome(lambda: run(reference.KERNEL, piece))  # noqa: B023
        exact = outcome(lambda: run(reference.KERNEL, wide(piece)))  # noqa: B023
        tally.agree(found, exact, plain, piece.w.W_hh.dtype)
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
    kernel, (piece, pull) = chance.choice(KERNELS), problem(chance)
    if kernel.refuses(piece) is not None:
        return "refused"
    if chance.random() < 0.3:
        pull = pull._replace(into=piece.w.zeros())
    traces = [k.forward(piece) for k in (kernel, reference.KERNEL)]
    wrong = chance.choices(("nothing", "piece", "pull", "trace"), (4, 2, 2, 1))[0]
    spoiled = outcome(lambda: spoil({"piece": piece, "pull": pull}.get(wrong, traces[0]), chance))
    if spoiled is None:
        return "refused"
    if wrong == "trace":  # kept in a form of the kernel's own: there is nothing to compare with
        outcome(lambda: backward(kernel, piece, spoiled, pull))
        return "only survived"
    if wrong == "piece" and spoiled.lengths is not piece.lengths:  # not those the trace was made by
        outcome(lambda: backward(kernel, spoiled, traces[0], pull))
        return "only survived"
    piece = spoiled if wrong == "piece" else piece
    pull = spoiled if wrong == "pull" else pull
    if kernel.refuses(piece) is not None:
        return "refused"
    fresh = pull if pull.into is None else pull._replace(into=pull.into.map(torch.clone))
    found = outcome(lambda: backward(kernel, piece, traces[0], pull))
    plain = outcome(lambda: backward(reference.KERNEL, piece, traces[1], fresh))
    exact = outcome(lambda: exact_backward(wide(piece), wide(pull)))
    tally.agree(found, exact, plain, piece.w.W_hh.dtype)
    return None


def test_head():
    tally = Tally()
    for chance in cases(DEFAULT):
        g = torch.Generator().manual_seed(chance.randrange(2**31))
        use_threads(chance)
        kernel, kind = chance.choice(KERNELS), kind_of(chance)
        real = torch.float64 if kind == torch.float64 else torch.float32
        T, B, H, V = (size(chance) for _ in range(4))
        normal = lambda *shape: torch.randn(*shape, generator=g).to(real)  # noqa: E731, B023
        bias = normal(V) if chance.random() < 0.7 else None
        whole = (
            normal(T, B, H).to(kind),
            normal(V, H),
            bias,
            torch.randint(V, (T, B), generator=g),
        )
        tensors = outcome(lambda: maybe(whole, chance))  # noqa: B023
        if tensors is None or not head.runs(kernel, *tensors[:3]):
            tally["refused"] += 1
            continue
        native = outcome(lambda: flat(head.mean_nats(kernel, *tensors, (True, True))))  # noqa: B023
        exact = outcome(lambda: nats_and_pulls(*wide(tensors)))  # noqa: B023
        tally.agree(native, exact, outcome(lambda: nats_and_pulls(*tensors)), kind)  # noqa: B023
    tally.fair()


def flat(result):
    """What `head.mean_nats` gives, as one list."""
    return [result[0], *result[1]]


def nats_and_pulls(hs, W, b, targets):
    """The mean nats and their pulls on hs, W and b, by autograd."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (hs, W, b)]
    rounded = leaves[1].to(hs.dtype).to(W.dtype)  # as the native code multiplies pairs of bfloat16
    (loss,) = nats(leaves[0].to(W.dtype), rounded, leaves[2], targets)
    pulls = iter(torch.autograd.grad(loss, [t for t in leaves if t is not None]))
    return [loss.detach(), *(None if t is None else next(pulls) for t in leaves)]


def nats(hs, W, b, targets):
    if targets.is_complex():
        raise TypeError("torch would only warn, and take the real part")
    return [cross_entropy(linear(hs, W, b).flatten(0, -2), targets.flatten().long())]


def test_clip():
    tally = Tally()
    for chance in cases(DEFAULT):
        g = torch.Generator().manual_seed(chance.randrange(2**31))
        use_threads(chance)
        kernel, kind = chance.choice(KERNELS), kind_of(chance)
        shapes = [(size(chance), size(chance)) for _ in range(chance.randint(1, 4))]
        whole = tuple(torch.randn(*s, generator=g).to(kind) for s in shapes)
        gradients = outcome(lambda: maybe(whole, chance))  # noqa: B023
        if gradients is None:
            tally["refused"] += 1
            continue
        before = [t.clone() if t.layout == torch.strided else t for t in gradients]
        norm = outcome(lambda: clip_norm(kernel, gradients, 0.5))  # noqa: B023
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
    use_threads(chance)
    torch.manual_seed(chance.randrange(2**31))
    cell, bias = chance.choice([nn.RNN, nn.GRU, nn.LSTM]), chance.random() < 0.8
    B, inputs, H, V = (size(chance) for _ in range(4))
    kind = chance.choice([torch.float32, torch.float32, torch.float64])
    rnn = cell(inputs, H, num_layers=chance.randint(1, 3), bias=bias, dtype=kind).eval()
    out = torch.nn.Linear(H, V, dtype=kind)
    first = torch.zeros(1, B, dtype=torch.int64)
    job = rnn.job(first)
    ids, W, b = torch.randint(inputs, (B,)), out.weight.detach(), out.bias.detach()
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
        job = outcome(lambda: rnn.job(first))
    if job is None or any(KERNEL.refuses(piece) for piece in job.pieces()):
        return "refused"
    with torch.no_grad(), only("reference"):
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
    use_threads(chance)
    torch.manual_seed(chance.randrange(2**31))
    cell, bias = chance.choice([nn.RNN, nn.GRU, nn.LSTM]), chance.random() < 0.8
    T, B, V, H = (size(chance) for _ in range(4))
    kind = chance.choice([torch.float32, torch.float32, torch.float64])
    rnn = cell(V, H, num_layers=chance.randint(1, 2), bias=bias, dtype=kind)
    W, b = torch.randn(V, H, dtype=kind), torch.randn(V, dtype=kind)
    ids, targets = torch.randint(V, (T, B)), torch.randint(V, (T, B))
    job = rnn.job(ids)
    state = tuple(torch.zeros(rnn.num_layers, B, H, dtype=kind) for _ in job.cell.states)
    wrong = chance.choices(("nothing", "ids", "weights", "data"), (4, 2, 2, 2))[0]
    if wrong == "ids":
        spoiled = outcome(lambda: spoil((ids, targets), chance))
        ids, targets = spoiled or (ids, targets)
    elif wrong == "weights":
        spoiled = outcome(lambda: spoil((state, W, b), chance))
        state, W, b = spoiled or (state, W, b)
    native = FLOAT if kind == torch.float32 else DOUBLE
    windows = outcome(lambda: Windows(KERNEL, job, list(state), Ends(None, W, b), native))
    if windows is None:
        return "refused"
    if wrong == "data":
        p = chance.choice(windows.weights)
        spoiled = outcome(lambda: wrongs(p.detach(), chance))
        if spoiled is None or outcome(lambda: setattr(p, "data", spoiled) or True) is None:
            return "refused"
    found = outcome(lambda: [torch.tensor(windows(ids, targets)), *windows.gradients])
    plain = outcome(lambda: window_gradients(rnn, W, b, ids, targets))
    exact = outcome(lambda: window_gradients(rnn.double(), W.double(), b.double(), ids, targets))
    tally.agree(found, exact, plain)
    return None


def window_gradients(rnn, W, b, ids, targets):
    """The mean nats of a window and all its gradients, in the order of `Windows.weights`."""
    W, b = (t.detach().clone().requires_grad_() for t in (W, b))
    with only("reference"):
        (loss,) = nats(rnn(ids)[0], W, b, targets)
    return [loss.detach(), *torch.autograd.grad(loss, [*rnn.parameters(), W, b])]


@contextmanager
def only(name: str):
    """The kernel of this name runs in this block, and nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELMAN_KERNELS", name)
        yield


def test_calls():
    """A module called without gradients: the second call trusts what the first has found out."""
    tally = Tally()
    for chance in cases(DEFAULT):
        tally.update([calls_case(chance, tally)])
    del tally[None]
    tally.fair()


def calls_case(chance, tally) -> str | None:
    use_threads(chance)
    torch.manual_seed(chance.randrange(2**31))
    cell = chance.choice([nn.RNN, nn.GRU, nn.LSTM])
    T, B, inputs, H = (size(chance) for _ in range(4))
    kind = chance.choice([torch.float32, torch.float32, torch.float64])
    layers, two = chance.randint(1, 3), chance.random() < 0.3
    options = {"bias": chance.random() < 0.8, "batch_first": chance.random() < 0.3, "dtype": kind}
    rnn = cell(inputs, H, num_layers=layers, bidirectional=two, **options)
    shape = (B, T) if rnn.batch_first else (T, B)
    ids = chance.random() < 0.4
    xs = torch.randint(inputs, shape) if ids else torch.randn(*shape, inputs, dtype=kind)
    states = [
        torch.randn(layers * (1 + two), B, H, dtype=kind) for _ in range(1 + (cell is nn.LSTM))
    ]
    first = chance.choice([None, tuple(states)])
    with torch.no_grad():
        call(rnn, xs, first)
        wrong = chance.choices(("nothing", "input", "state", "weight"), (4, 2, 2, 2))[0]
        try:
            if wrong == "input":
                xs = wrongs(xs, chance)
            elif wrong == "state":
                first = spoil(tuple(states), chance)
            elif wrong == "weight":
                p = chance.choice(list(rnn.parameters()))
                p.data = wrongs(p.detach(), chance)
        except REFUSALS:
            return "refused"
        found = outcome(lambda: call(rnn, xs, first))
        with only("reference"):
            plain = outcome(lambda: call(rnn, xs, first))
            exact = outcome(lambda: call(rnn.double(), *wide((xs, first))))
    tally.agree(found, exact, plain)
    return None


def call(rnn, xs, first):
    """Outputs and last states, as one list."""
    ys, last = rnn(xs, first[0] if first is not None and len(first) == 1 else first)
    return [ys, *(last if isinstance(last, tuple) else (last,))]
