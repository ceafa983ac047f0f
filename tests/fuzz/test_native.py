"""Every native entry, handed tensors of which one is wrong in one property.

The rule: the numbers of plain PyTorch on the same tensors, or an exception in words; never a
signal, never other numbers. `harness.py` says how to ask for more cases.

How far two right answers may lie apart follows from rounding: the reference is computed in float64
and once more in the type of the native answer, and the native error may be some multiple of the
reference's own.
"""

import copy
import itertools
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
from elman.cells import Slopes, Weights, named
from elman.errors import UserError
from elman.kernels import Piece, Pull, Trace, described, reference
from elman.kernels.cpu import (
    FLOAT,
    KERNEL,
    Cpu,
    Ends,
    Steps,
    Windows,
    clip_norm,
    head,
    norms_by_lag,
)
from elman.kernels.cpu.library import AVX2, DOUBLE, HALF, PORTABLE
from elman.language_model import LanguageModel
from elman.language_model.masks import NO_MASKS

DEFAULT = 60
BUILT_IN = ("tanh", "relu", "linear", "gru", "lstm")
DESCRIBED = ("mgu", "ugrnn", "janet", "coupled", "peephole", "slstm")
FAMILIES = ("built-in", "described")
TYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
KERNELS = [KERNEL, KERNEL, KERNEL, Cpu(AVX2), Cpu(PORTABLE)]
"""The processor's own instructions most of the time, those of older ones now and then."""
WHOLE = 0.4
"""The share of cases in which nothing is wrong, so that many are compared."""
SAME_SIZE = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.float16,
    torch.int64: torch.float64,
}
"""As which other type the same memory can be read."""
OPTIONAL = (Weights, Trace)
"""Whose tensors, but the first two, may be missing."""
REFUSALS = (UserError, RuntimeError, ValueError, IndexError, TypeError, UserWarning)
pytestmark = [
    pytest.mark.fuzz,
    pytest.mark.skipif(KERNEL.library is None, reason="the cpu kernel was not built"),
]


class Tally(Counter):
    """How the cases of one entry ended: compared, refused by the native code, or uncompared."""

    def agree(self, found, exact, plain, kind=torch.float32) -> None:
        """Where the native code answered, the reference answers, too, with the same numbers.

        `exact` runs the reference in float64, `plain` in the types of the problem, of which `kind`
        is the coarsest; each is only run where its answer is needed.
        """
        self["compared" if found is not None else "refused"] += 1
        if found is None:
            return
        exact, again = by_reference(exact), None
        if exact is None:  # one may refuse what the other never reads
            exact = again = by_reference(plain)
        assert exact is not None, "native code answered what the reference refuses"
        scale = max(largest(t) for t in exact if t is not None)
        for i, (a, b) in enumerate(zip(found, exact, strict=True)):
            assert (a is None) == (b is None)
            if a is None:
                continue
            eps = max(torch.finfo(k).eps for k in (kind, a.dtype, torch.float32))
            if not is_close(a, b, 32 * eps * scale):
                again = again or by_reference(plain) or exact
                assert is_close(a, b, 32 * eps * scale, again[i]), (i, a, b, again[i])

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


SMALLEST = {
    kind: torch.finfo(kind).smallest_normal * torch.finfo(kind).eps
    for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


def is_close(a: Tensor, exact: Tensor, allowed: float, plain: Tensor | None = None) -> bool:
    """|a - exact| within what is allowed, and 16 times the plain version's own error.

    Sums in another order, and tanh by another formula, err by a few roundings of what they add;
    where what they add cancels, that is of the size of the rest of the answer. Allowed are 32
    roundings of the largest number in it, and a few of the smallest numbers there are.
    """
    allowed += 64 * SMALLEST[a.dtype]
    a, exact = a.double(), exact.double()
    plain = exact if plain is None else plain.double()
    assert a.shape == exact.shape
    finite = exact.isfinite() & plain.isfinite() & (exact.abs() < 1e30)
    if not finite.any():
        return True
    allowed += 16 * float((plain - exact)[finite].abs().max())
    return bool((a - exact)[finite].abs().max() <= allowed)


def by_reference(run):
    """What the reference makes of it, or None where that refuses."""
    with only("reference"):
        return outcome(run)


def wide(structure):
    """A nest with every real tensor in float64, and every integer in 64 bits."""
    if isinstance(structure, Tensor):
        if structure.is_complex() or structure.dtype == torch.bool:
            return structure
        return structure.double() if structure.is_floating_point() else structure.long()
    if isinstance(structure, tuple):
        items = [wide(x) for x in structure]
        return type(structure)(*items) if hasattr(structure, "_fields") else tuple(items)
    return structure


def wrongs(t: Tensor, chance: random.Random) -> Tensor:
    """The same tensor with one property changed: where it lies, its type, shape or layout."""
    kinds = [
        lambda: t.to("meta"),
        *[lambda: t.to(chance.choice(TYPES))] * 4,
        lambda: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
        lambda: unaligned(t, chance.randint(1, 7)),
        lambda: t.view(SAME_SIZE.get(t.dtype, t.dtype)),
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


def unaligned(t: Tensor, by: int) -> Tensor:
    """The same numbers at an address that no vector, and no number, would begin at."""
    memory = bytearray(t.numel() * t.itemsize + by)
    copy = torch.frombuffer(memory, dtype=t.dtype, offset=by, count=t.numel()).view(t.shape)
    return copy.copy_(t)


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


def kernel_of(family: str, chance: random.Random) -> Any:
    return described.KERNEL if family == "described" else chance.choice(KERNELS)


def problem(chance: random.Random, family: str) -> tuple[Piece, Pull]:
    use_threads(chance)
    cell = named(chance.choice(DESCRIBED if family == "described" else BUILT_IN))
    T, B, inputs, H = (size(chance) for _ in range(4))
    g, kind = torch.Generator().manual_seed(chance.randint(0, 2**31)), kind_of(chance)
    normal = lambda *shape: torch.randn(*shape, generator=g).to(kind)  # noqa: E731
    M = cell.gates * H
    scale = H**-0.5  # or the linear and relu cells explode
    b_ih, b_hh = (normal(M), normal(M)) if chance.random() < 0.9 else (None, None)
    own = normal(len(cell.parameters), H) if cell.parameters else None
    w = Weights(normal(M, inputs), normal(M, H) * scale, b_ih, b_hh, None, own)
    ids = chance.random() < 0.4
    xs = torch.randint(inputs, (T, B), generator=g) if ids else normal(T, B, inputs)
    state = tuple(normal(B, n) for n in cell.state_sizes(H))
    lengths = torch.randint(T + 1, (B,), generator=g) if chance.random() < 0.3 else None
    wide = torch.float64 if kind == torch.float64 else torch.float32
    xi = chance.choice([None, normal(T).to(wide), normal(T, B).to(wide)])
    pull = Pull(normal(T, B, H), tuple(normal(*s.shape) for s in state), xi)
    return Piece(cell, w, xs, state, lengths), pull


def spoil(structure, chance) -> Any:
    """One tensor of a nest of named tuples and tuples, spoiled, or left out where that may be."""
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
        if len(path) == 1 and isinstance(x, OPTIONAL) and chance.random() < 0.1:
            return x._replace(**{x._fields[path[0]]: None}) if path[0] > 1 else x
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


@pytest.mark.parametrize("family", FAMILIES)
def test_forward(family):
    tally = Tally()
    for chance in cases(DEFAULT):
        kernel = kernel_of(family, chance)
        piece = outcome(lambda: maybe(problem(chance, family)[0], chance))  # noqa: B023
        if piece is None or kernel.refuses(piece) is not None:
            tally["refused"] += 1
            continue
        run = lambda kernel, p: kernel.forward(p)[:2]  # noqa: E731
        found = outcome(lambda: run(kernel, piece))  # noqa: B023
        plain = lambda: run(reference.KERNEL, piece)  # noqa: E731, B023
        exact = lambda: run(reference.KERNEL, wide(piece))  # noqa: E731, B023
        tally.agree(found, exact, plain, piece.w.W_hh.dtype)
    tally.fair()


def backward(kernel, piece, trace, pull):
    dxs, dw, dstate = kernel.backward(piece, trace, pull)
    return [dxs, *dw, *dstate]


@pytest.mark.parametrize("family", FAMILIES)
def test_backward(family):
    tally = Tally()
    for chance in cases(DEFAULT):
        tally.update([backward_case(chance, tally, family)])
    del tally[None]
    tally.fair()


def exact_backward(piece, pull):
    pull = pull if pull.into is None else pull._replace(into=piece.w.zeros())
    return backward(reference.KERNEL, piece, reference.KERNEL.forward(piece), pull)


def backward_case(chance, tally, family) -> str | None:
    kernel, (piece, pull) = kernel_of(family, chance), problem(chance, family)
    if kernel.refuses(piece) is not None:
        return "refused"
    if chance.random() < 0.3:
        pull = pull._replace(into=piece.w.zeros())
    trace, source = kernel.forward(piece), piece
    wrong = chance.choices(("nothing", "piece", "pull", "trace"), (4, 2, 2, 1))[0]
    spoiled = outcome(lambda: spoil({"piece": piece, "pull": pull}.get(wrong, trace), chance))
    if spoiled is None:
        return "refused"
    if wrong == "trace":  # kept in a form of the kernel's own: there is nothing to compare with
        outcome(lambda: backward(kernel, piece, spoiled, pull))
        return "only survived"
    if wrong == "piece" and spoiled.lengths is not piece.lengths:  # not those the trace was made by
        outcome(lambda: backward(kernel, spoiled, trace, pull))
        return "only survived"
    piece = spoiled if wrong == "piece" else piece
    pull = spoiled if wrong == "pull" else pull
    if kernel.refuses(piece) is not None:
        return "refused"
    if wrong == "piece" and family == "described":
        unread = pull if pull.into is None else pull._replace(into=pull.into.map(torch.clone))
        outcome(lambda: backward(kernel, piece, trace, unread))
        # the reference reads its gates off the weights again, which must be those of the trace
        trace, source = outcome(lambda: kernel.forward(piece)), piece
        if trace is None:
            return "refused"
    fresh = pull if pull.into is None else pull._replace(into=pull.into.map(torch.clone))
    found = outcome(lambda: backward(kernel, piece, trace, pull))
    plain = lambda: backward(  # noqa: E731
        reference.KERNEL, piece, reference.KERNEL.forward(source), fresh
    )
    exact = lambda: exact_backward(wide(piece), wide(pull))  # noqa: E731
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
        exact = lambda: nats_and_pulls(*wide(tensors))  # noqa: E731, B023
        tally.agree(native, exact, lambda: nats_and_pulls(*tensors), kind)  # noqa: B023
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


def travelled(W, slopes, pulls, first, lags):
    """‖∂L_t/∂S_{t+1-k}‖, loss by loss and lag by lag."""
    _, states, gates, H = slopes.a_h.shape
    W, norms = W.reshape(gates, H, H), []
    for t in range(first, len(pulls)):
        G = torch.cat([pulls[t : t + 1], pulls.new_zeros(states - 1, H)])
        row = [G.norm()]
        for s in range(t, t - lags, -1):
            on_gates = torch.einsum("jh,jgh->gh", G, slopes.a_h[s])
            G = torch.einsum("jh,jkh->kh", G, slopes.before[s])
            G[0] += torch.einsum("gh,ghi->i", on_gates, W)
            row.append(G.norm())
        norms.append(torch.stack(row))
    return (torch.stack(norms),)


def test_travel():
    tally = Tally()
    for chance in cases(DEFAULT):
        g = torch.Generator().manual_seed(chance.randrange(2**31))
        use_threads(chance)
        kernel, kind = chance.choice(KERNELS), kind_of(chance)
        lags, H, states, gates = size(chance), size(chance), *chance.choices((1, 2, 3), k=2)
        first = lags + chance.randint(0, 2)
        T = first + size(chance)
        shapes = [(gates * H, H), (T, states, gates, H), (T, states, states, H), (T, H)]
        normal = [torch.randn(*s, generator=g).mul(0.5).to(kind) for s in shapes]
        given = outcome(lambda: maybe(tuple(normal), chance))  # noqa: B023
        if given is None:
            tally["refused"] += 1
            continue

        def run(kernel=kernel, given=given, first=first, lags=lags):
            W, a_h, before, pulls = given
            norms = norms_by_lag(kernel, W, Slopes(a_h, before), pulls, first, lags)
            return None if norms is None else (norms,)

        def plainly(given=given, first=first, lags=lags):
            W, a_h, before, pulls = given
            return travelled(W, Slopes(a_h, before), pulls, first, lags)

        tally.agree(outcome(run), lambda given=given: plainly(wide(given)), plainly, kind)
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
    kind = coarsest(rnn)
    with torch.no_grad():
        native = outcome(lambda: [Steps(KERNEL, job, W, b)(ids)])
        plain = lambda: [linear(rnn(ids[None].long())[0], W, b)[0]]  # noqa: E731
        exact = lambda: steps_exactly(rnn, ids, W, b)  # noqa: E731
        tally.agree(native, exact, plain, kind)
    return None


def steps_exactly(rnn, ids, W, b):
    return [linear(copy.deepcopy(rnn).double()(ids[None].long())[0], W.double(), b.double())[0]]


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
    plain = lambda: window_gradients(rnn, W, b, ids, targets)  # noqa: E731
    exact = lambda: window_gradients(  # noqa: E731
        copy.deepcopy(rnn).double(), W.double(), b.double(), ids, targets
    )
    tally.agree(found, exact, plain)
    return None


def window_gradients(rnn, W, b, ids, targets):
    """The mean nats of a window and all its gradients, in the order of `Windows.weights`."""
    W, b = (t.detach().clone().requires_grad_() for t in (W, b))
    (loss,) = nats(rnn(ids)[0], W, b, targets)
    return [loss.detach(), *torch.autograd.grad(loss, [*rnn.parameters(), W, b])]


@contextmanager
def only(name: str):
    """The kernel of this name runs in this block, and nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELMAN_KERNELS", name)
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_calls(family):
    """A module called again, with a gradient wanted or not, once something about it has changed.

    Without a gradient the second call trusts what the first has found out.
    """
    tally = Tally()
    for chance in cases(DEFAULT):
        tally.update([calls_case(chance, tally, family)])
    del tally[None]
    tally.fair()


def module(chance, family, kind) -> Any:
    """Layers of any cell and of any options."""
    cell = chance.choice(DESCRIBED if family == "described" else BUILT_IN)
    inputs, H, layers = size(chance), size(chance), chance.randint(1, 3)
    H = -H % 4 + H if cell == "slstm" else H  # which falls into four heads
    options = {"bias": chance.random() < 0.8, "batch_first": chance.random() < 0.3}
    return nn.of(
        cell, inputs, H, layers, bidirectional=chance.random() < 0.3, dtype=kind, **options
    )


def states_of(rnn, rows) -> tuple[Tensor, ...]:
    places = rnn.num_layers * (1 + rnn.bidirectional)
    sizes = named(rnn.cell).state_sizes(rnn.hidden_size)
    return tuple(torch.randn(places, rows, n, dtype=rnn.weight_ih_l0.dtype) for n in sizes)


CHANGES = ("nothing", "input", "state", "weight", "module")


def calls_case(chance, tally, family) -> str | None:
    use_threads(chance)
    torch.manual_seed(chance.randrange(2**31))
    kind, T, B = kind_of(chance), size(chance), size(chance)
    rnn = module(chance, family, kind)
    shape = (B, T) if rnn.batch_first else (T, B)
    ids = chance.random() < 0.4
    inputs = rnn.input_size
    xs = torch.randint(inputs, shape) if ids else torch.randn(*shape, inputs, dtype=kind)
    states = states_of(rnn, B)
    first = chance.choice([None, states])
    wants = chance.random() < 0.5
    rnn.requires_grad_(wants or chance.random() < 0.5)
    with torch.set_grad_enabled(wants):
        call(rnn, xs, first)
        wrong = chance.choices(CHANGES, (4, 2, 2, 3, 1))[0]
        try:
            if wrong == "input":
                xs = wrongs(xs, chance)
            elif wrong == "state":
                first = spoil(states, chance)
            elif wrong == "weight":
                p = chance.choice(list(rnn.parameters()))
                p.data = wrongs(p.detach(), chance)
            elif wrong == "module":
                kind = chance.choice(TYPES[:4])
                rnn, xs = rnn.to(kind), xs if ids else xs.to(kind)
                first = None if first is None else tuple(s.to(kind) for s in first)
        except REFUSALS:
            return "refused"
        return compare_calls(rnn, xs, first, tally, wants)


def compare_calls(rnn, xs, first, tally, wants) -> str | None:
    """One call by the kernels that would run it, against the reference."""
    kind = coarsest(rnn)
    found = outcome(lambda: call(rnn, xs, first, wants))
    exact = lambda: call(copy.deepcopy(rnn).double(), *wide((xs, first)), wants)  # noqa: E731
    tally.agree(found, exact, lambda: call(rnn, xs, first, wants), kind)
    return None


def coarsest(model: torch.nn.Module) -> torch.dtype:
    """The type of a module's weights that rounds most."""
    kinds = [p.dtype for p in model.parameters() if p.is_floating_point()]
    return max(kinds, key=lambda kind: torch.finfo(kind).eps)


def call(rnn, xs, first, wants=False):
    """Outputs, last states and, where wanted, the gradient of a loss of them, as one list."""
    ys, last = rnn(xs, first[0] if first is not None and len(first) == 1 else first)
    found = [ys, *(last if isinstance(last, tuple) else (last,))]
    if not wants:
        return found
    loss = sum((t * torch.linspace(-1, 1, t.numel()).view(t.shape).to(t)).sum() for t in found)
    return [t.detach() for t in found] + list(torch.autograd.grad(loss, list(rnn.parameters())))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_type_of_every_weight(family):
    """Each weight in each type, with and without gradients, before the first call and after it."""
    tally = Tally()
    for cell in DESCRIBED if family == "described" else BUILT_IN:
        names = [name for name, _ in nn.of(cell, 3, 8, dtype=torch.float32).named_parameters()]
        for kind, wants, again in itertools.product(TYPES[:4], (False, True), (False, True)):
            for name in (*names, "all"):
                torch.manual_seed(0)
                rnn, xs = nn.of(cell, 3, 8), torch.randn(4, 2, 3)
                with torch.set_grad_enabled(wants):
                    if again:
                        call(rnn, xs, None)
                    if name == "all":
                        rnn, xs = rnn.to(kind), xs.to(kind)
                    else:
                        p = rnn.get_parameter(name)
                        p.data = p.detach().to(kind)
                    compare_calls(rnn, xs, None, tally, wants)
    tally.fair()


@pytest.mark.parametrize("family", FAMILIES)
def test_language_models(family):
    """The nats of a window and all gradients; then one weight, the ids or the targets are wrong."""
    tally = Tally()
    for chance in cases(DEFAULT):
        tally.update([language_model_case(chance, tally, family)])
    del tally[None]
    tally.fair()


def language_model_case(chance, tally, family) -> str | None:
    use_threads(chance)
    torch.manual_seed(chance.randrange(2**31))
    T, B, V = (size(chance) for _ in range(3))
    cell = named(chance.choice(DESCRIBED if family == "described" else BUILT_IN)).model
    embedding = chance.choice([None, size(chance)])
    model = LanguageModel(
        V, cell=cell, hidden_size=4 * size(chance), layers=1, embedding_size=embedding
    ).to(chance.choice([torch.float32, torch.float32, torch.float64]))
    ids, targets = torch.randint(V, (B, T)), torch.randint(V, (T, B))
    wrong = chance.choices(("nothing", "ids", "weight"), (4, 2, 3))[0]
    try:
        if wrong == "ids":
            ids, targets = spoil((ids, targets), chance)
        elif wrong == "weight":
            p = chance.choice(list(model.parameters()))
            p.data = wrongs(p.detach(), chance)
    except REFUSALS:
        return "refused"
    kind = coarsest(model)
    found = outcome(lambda: window_of(model, ids, targets))
    exact = lambda: window_of(copy.deepcopy(model).double(), *wide((ids, targets)))  # noqa: E731
    tally.agree(found, exact, lambda: window_of(model, ids, targets), kind)
    return None


def window_of(model, ids, targets):
    """The mean nats, and their gradient for every parameter."""
    if targets.is_complex() or targets.is_floating_point():
        raise TypeError("targets are ids")
    nats = model.mean_nats(model.states(ids)[0], targets, NO_MASKS)
    return [nats.detach(), *torch.autograd.grad(nats, list(model.parameters()))]
