"""One step of each cell: forwards as `torch.nn` has it, backwards as autograd finds it."""

import pytest
import torch

from elman import cells
from elman.cells import CELLS as TABLE
from elman.cells import Weights
from elman.cells.described import Described

BATCH, INPUT, HIDDEN, PROJECTION = 3, 4, 5, 2
CELLS = ["tanh", "relu", "linear", "gru", "lstm", "projected"]


def example(name, *, bias=True, ids=False):
    torch.manual_seed(1)
    cell = cells.named("lstm" if name == "projected" else name)
    real = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    width = PROJECTION if name == "projected" else HIDDEN
    rows = cell.gates * HIDDEN
    b_ih, b_hh = (real(rows), real(rows)) if bias else (None, None)
    W_hr = real(PROJECTION, HIDDEN) if name == "projected" else None
    w = Weights(real(rows, INPUT), real(rows, width), b_ih, b_hh, W_hr)
    x = torch.tensor([2, 0, 2]) if ids else real(BATCH, INPUT)
    state = (real(BATCH, width),)
    state += (real(BATCH, HIDDEN),) if cell is cells.named("lstm") else ()
    return cell, w, x, state


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("tanh", torch.nn.RNNCell(INPUT, HIDDEN)),
        ("relu", torch.nn.RNNCell(INPUT, HIDDEN, nonlinearity="relu")),
        ("gru", torch.nn.GRUCell(INPUT, HIDDEN)),
        ("lstm", torch.nn.LSTMCell(INPUT, HIDDEN)),
    ],
)
def test_a_step_is_pytorchs_step(name, module):
    cell, _, x, state = example(name)
    module = module.double()
    w = Weights(module.weight_ih, module.weight_hh, module.bias_ih, module.bias_hh)
    after, _ = cell.step(w, x, state)
    wanted = module(x, state if name == "lstm" else state[0])
    for a, b in zip(after, wanted if name == "lstm" else (wanted,), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


sigma, tanh = torch.sigmoid, torch.tanh


def mgu(x, y, h):
    f = sigma(x[0] + y[0])
    return ((1 - f) * h + f * tanh(x[1] + f * y[1]),)


def ugrnn(x, y, h):
    g = sigma(x[0] + y[0])
    return (g * h + (1 - g) * tanh(x[1] + y[1]),)


def janet(x, y, h):
    s = x[0] + y[0]
    return (sigma(s) * h + sigma(1 - s) * tanh(x[1] + y[1]),)


def coupled(x, y, h, c):
    i = sigma(x[0] + y[0])
    c = (1 - i) * c + i * tanh(x[1] + y[1])
    return sigma(x[2] + y[2]) * tanh(c), c


def peephole(x, y, h, c, p_i, p_f, p_o):
    i, f = sigma(x[0] + y[0] + p_i * c), sigma(x[1] + y[1] + p_f * c)
    c = f * c + i * tanh(x[2] + y[2])
    return sigma(x[3] + y[3] + p_o * c) * tanh(c), c


def indrnn(x, y, h):
    return (torch.relu(x[0] + y[0]),)


def slstm(x, y, h, c, n, m):
    """Without the running maximum: c and n are kept divided by exp(m)."""
    i, f, now = torch.exp(x[0] + y[0]), sigma(x[1] + y[1]), torch.exp(m)
    m = torch.maximum(torch.log(f) + m, x[0] + y[0])
    c = (f * c * now + i * tanh(x[2] + y[2])) / torch.exp(m)
    n = (f * n * now + i) / torch.exp(m)
    return sigma(x[3] + y[3]) * c / torch.clamp(n, min=1), c, n, m


PAPERS = {f.__name__: f for f in (mgu, ugrnn, janet, coupled, peephole, indrnn, slstm)}
SHIPPED = [c for c in TABLE.values() if isinstance(c, Described) and not c.is_users]


@pytest.mark.parametrize("cell", SHIPPED, ids=lambda c: c.name)
def test_a_described_step_is_its_papers(cell):
    torch.manual_seed(2)
    real = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    rows, own = cell.gates * HIDDEN, real(len(cell.parameters), HIDDEN)
    b_ih, b_hh = real(rows), real(rows)
    w = Weights(real(rows, INPUT), real(rows, HIDDEN), b_ih, b_hh, None, own)
    x, state = real(BATCH, INPUT), tuple(real(BATCH, n) for n in cell.state_sizes(HIDDEN))
    a_x = (x @ w.W_ih.T + b_ih).chunk(cell.gates, -1)
    a_h = (state[0] @ w.W_hh.T + b_hh).chunk(cell.gates, -1)
    after = cell.split(cell.step(w, x, state)[0])
    for a, b in zip(after, PAPERS[cell.name](a_x, a_h, *cell.split(state), *own), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_linear_cell_is_its_own_pre_activation():
    cell, w, x, state = example("linear", bias=False)
    after, _ = cell.step(w, x, state)
    torch.testing.assert_close(after[0], x @ w.W_ih.T + state[0] @ w.W_hh.T)


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CELLS)
def test_a_step_back_is_autograds(name, bias, ids):
    cell, w, x, state = example(name, bias=bias, ids=ids)
    after, gates = cell.step(w, x, state)
    pulls = tuple(torch.randn_like(a) for a in after)
    weights = [p for p in w if p is not None]
    into = [*state, *weights, *([] if ids else [x])]
    wanted = torch.autograd.grad(after, into, pulls)
    with torch.no_grad():
        dw = w.zeros()
        dx = None if ids else torch.empty_like(x)
        before = cell.step_backward(w, x, state, after, gates, pulls, dw, dx)
        found = [*before, *(p for p in dw if p is not None), *([] if dx is None else [dx])]
    for f, g in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, g, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CELLS)
def test_a_step_back_without_weight_gradients_is_the_same(name):
    cell, w, x, state = example(name)
    assert cell.spares_weights
    with torch.no_grad():
        after, gates = cell.step(w, x, state)
        pulls = tuple(torch.randn_like(a) for a in after)
        found = []
        for dw in (w.zeros(), None):
            dx = torch.empty_like(x)
            found.append(
                (*cell.step_backward(w, x, state, after, gates, pulls, dw, dx), dx.clone())
            )
    for with_weights, without in zip(*found, strict=True):
        assert torch.equal(with_weights, without)


@pytest.mark.parametrize("name", CELLS)
def test_weight_gradients_are_added_to_what_is_there(name):
    cell, w, x, state = example(name)
    with torch.no_grad():
        after, gates = cell.step(w, x, state)
        once, twice = w.zeros(), w.zeros()
        for dw in (once, twice, twice):
            cell.step_backward(w, x, state, after, gates, after, dw, None)
    for a, b in zip(once, twice, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(2 * a, b)


@pytest.mark.parametrize("name", CELLS)
def test_an_id_is_a_one_hot_row(name):
    cell, w, x, state = example(name, ids=True)
    hot = torch.nn.functional.one_hot(x, INPUT).double()
    for a, b in zip(cell.step(w, x, state)[0], cell.step(w, hot, state)[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_half_precision_gradients_are_summed_in_float32():
    w = Weights(torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.bfloat16))
    assert {p.dtype for p in w.zeros() if p is not None} == {torch.float32}


@pytest.mark.parametrize("ids", [False, True])
def test_half_precision_steps_are_added_in_float32(ids):
    """257 ones: bfloat16 holds no number between 256 and 258."""
    half = {"dtype": torch.bfloat16}
    w = Weights(*(torch.zeros(2, 2, **half) for _ in range(2)), *(torch.zeros(2, **half),) * 2)
    x = torch.ones(257, dtype=torch.int64) if ids else torch.ones(257, 2, **half)
    state, pull = torch.zeros(257, 2, **half), torch.ones(257, 2, **half)
    cell, dw = cells.named("linear"), w.zeros()
    cell.step_backward(w, x, (state,), (state,), None, (pull,), dw, None)
    assert dw.b_ih is not None
    assert dw.b_hh is not None
    assert torch.equal(dw.b_ih, torch.full((2,), 257.0))
    assert torch.equal(dw.b_hh, dw.b_ih)
    if ids:
        assert dw.W_ih.tolist() == [[0, 257], [0, 257]]
    else:  # a step's product is rounded, and added to what was there unrounded
        cell.step_backward(w, x[:1], (state[:1],), (state[:1],), None, (pull[:1],), dw, None)
        assert dw.W_ih.tolist() == [[257, 257], [257, 257]]


class Counts(cells.Cell):
    """Adds x to its state: of its weights it reads one bias alone."""

    name = "counts"

    def step(self, w, x, state):
        assert w.b_ih is not None
        return (state[0] + x + w.b_ih,), None


def test_weights_that_a_step_does_not_read_have_no_gradient():
    w = Weights(*(torch.ones(2, 2) for _ in range(2)), *(torch.ones(2) for _ in range(2)))
    x, h, dw, dx = torch.ones(3, 2), torch.ones(3, 2), w.zeros(), torch.zeros(3, 2)
    pull = torch.arange(6.0).view(3, 2)
    (dh,) = Counts().step_backward(w, x, (h,), (h,), None, (pull,), dw, dx)
    assert torch.equal(dh, pull)
    assert torch.equal(dx, pull)
    assert not any(d.any() for d in (dw.W_ih, dw.W_hh, dw.b_hh))
    assert torch.equal(dw.b_ih, pull.sum(0))
    assert not any(t.requires_grad for t in (x, h, *w[:4])), "what is the caller's stays so"
