"""A cell of one's own with every carry and memory, against autograd through a bare loop."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_sequence,
    pad_packed_sequence,
    unpack_sequence,
)
from torch.utils import _pytree as pytree

import elman.nn
from elman.cells import custom
from elman.errors import UserError
from elman.gradients import (
    Checkpointed,
    Full,
    Randomized,
    Sliding,
    Stored,
    Truncated,
    backward_through_time,
)
from elman.recurrence.custom import Recurrent
from elman.recurrence.replay import Autocast
from elman.recurrence.walk import Walk

BATCH, INPUT, HIDDEN, OUTPUT = 2, 3, 4, 5


def orthogonal(linear: nn.Linear) -> nn.Linear:
    """So that gradients are still alive when they reach the first step."""
    nn.init.orthogonal_(linear.weight)
    return linear


class Plain(nn.Module):
    """h -> h, the state itself the output."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(INPUT, HIDDEN), orthogonal(nn.Linear(HIDDEN, HIDDEN))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.x(x) / 4 + self.h(h))

    def initial_state(self, batch: int) -> Tensor:
        return self.h.weight.new_zeros(batch, HIDDEN)


class Nested(nn.Module):
    """A dict of a tuple and a counter in, an output of another size out; one parameter unused."""

    def __init__(self) -> None:
        super().__init__()
        self.read = orthogonal(nn.Linear(INPUT + HIDDEN, 2 * HIDDEN))
        self.write = nn.Linear(HIDDEN, OUTPUT)
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        h, slow = state["pair"]
        a, b = self.read(torch.cat([x, h], 1)).chunk(2, 1)
        slow = torch.sigmoid(b + 1) * slow.flatten(1) + torch.tanh(a)
        after = {"pair": (torch.tanh(slow), slow.view(-1, 2, 2)), "count": state["count"] + 1}
        return self.write(torch.tanh(slow) * state["count"].sqrt()[:, None]), after

    def initial_state(self, batch: int) -> dict[str, Any]:
        zeros = self.idle.new_zeros(batch, HIDDEN)
        return {"pair": (zeros, zeros.view(-1, 2, 2)), "count": torch.ones(batch).long()}


CELLS = [Plain, Nested]
MEMORIES = [
    Stored(),
    Checkpointed(every=1),
    Checkpointed(every=3),
    Checkpointed(budget=1100),
    Checkpointed(budget=1500),
]


def bare(
    cell: nn.Module, xs: Tensor, state: Any, between: Callable[[int, Any], Any]
) -> tuple[Tensor, Any]:
    """The loop anyone would write; `between(t, state)` is what step t is given to read."""
    ys = []
    for t, x in enumerate(xs):
        y, state = custom.step(cell, x, between(t, state))
        ys.append(y)
    return torch.stack(ys), state


class Scaled(torch.autograd.Function):
    """The identity whose gradient is multiplied by ξ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, xi: Tensor) -> Tensor:
        ctx.xi = xi
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.xi.reshape(-1, *[1] * (grads[0].dim() - 1)), None


def scaled_by(xi: Tensor) -> Callable[[int, Any], Any]:
    def scale(t: int, state: Any) -> Any:
        return pytree.tree_map(
            lambda s: Scaled.apply(s, xi[t]) if s.is_floating_point() else s, state
        )

    return scale


def uncut(t: int, state: Any) -> Any:
    return state


def problem(build: Callable[[], nn.Module], steps: int, seed: int):
    torch.manual_seed(seed)
    cell = build().double()
    xs = torch.randn(steps, BATCH, INPUT, dtype=torch.float64, requires_grad=True)
    first = pytree.tree_map(
        lambda s: torch.randn_like(s).div_(4).requires_grad_() if s.is_floating_point() else s,
        cell.initial_state(BATCH),
    )
    return cell, xs, first


def loss(ys: Tensor, last: Any) -> Tensor:
    """Every output and the last state pull, each differently, late ones harder."""
    t = torch.arange(1, len(ys) + 1, dtype=ys.dtype, device=ys.device)[:, None, None]
    pulls = [torch.sin(s).sum() for s in pytree.tree_leaves(last) if s.is_floating_point()]
    return (t * torch.sin(ys + t)).sum() + 3 * sum(pulls)


def wanted(cell: nn.Module, xs: Tensor, first: Any) -> dict[str, Tensor]:
    """All that is differentiated, by name."""
    leaves = [s for s in pytree.tree_leaves(first) if s.is_floating_point()]
    named = {name: p for name, p in cell.named_parameters() if name != "idle"}
    return {"xs": xs, **{f"state {i}": s for i, s in enumerate(leaves)}, **named}


def gradients(total: Tensor, into: dict[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(
        total, list(into.values()), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return dict(zip(into, found, strict=True))


def agree(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert want[name].norm() > 1e-6, f"{name}: a vanished gradient proves nothing"
        error = (got[name] - want[name]).norm() / want[name].norm()
        assert error <= 1e-10, f"{name}: {error}"


@pytest.mark.parametrize("memory", MEMORIES, ids=repr)
@pytest.mark.parametrize("build", CELLS)
@settings(max_examples=15)
@given(data=st.data())
def test_every_carry_and_memory_equals_a_bare_loop(build, memory, data):
    steps = data.draw(st.integers(1, 11), "steps")
    window = data.draw(st.integers(1, 12), "window")
    cell, xs, first = problem(build, steps, data.draw(st.integers(0, 2**31), "seed"))
    seed = data.draw(st.integers(0, 2**31), "draw")
    per_row = data.draw(st.booleans(), "per row")
    carry = data.draw(
        st.sampled_from([
            Full(),
            Truncated(window),
            Randomized(keep=0.6, seed=seed, per_row=per_row),
            Randomized.polynomial(mean=3, seed=seed, per_row=per_row),
        ]),
        "carry",
    )  # fmt: skip
    module = Recurrent(cell, carry=carry, memory=memory)
    ys, last = module(xs, first)
    got = gradients(loss(ys, last), wanted(cell, xs, first))
    xi = copy.deepcopy(carry)
    if isinstance(xi, Randomized):
        xi.restore({"seed": seed, "draws": 0})
    bare_ys, bare_last = bare(cell, xs, first, scaled_by(xi.weights(steps, BATCH)))
    torch.testing.assert_close((ys, last), (bare_ys, bare_last), rtol=0, atol=0)
    agree(got, gradients(loss(bare_ys, bare_last), wanted(cell, xs, first)))


@pytest.mark.parametrize("memory", MEMORIES, ids=repr)
@pytest.mark.parametrize("build", CELLS)
@settings(max_examples=10)
@given(data=st.data())
def test_sliding_is_a_pass_per_block_of_losses_from_a_constant_state(build, memory, data):
    steps = data.draw(st.integers(1, 9), "steps")
    every = data.draw(st.integers(1, 5), "every")
    reach = data.draw(st.integers(every, 10), "steps back")
    cell, xs, first = problem(build, steps, data.draw(st.integers(0, 2**31), "seed"))
    module = Recurrent(cell, carry=Sliding(every=every, steps=reach), memory=memory)
    into = wanted(cell, xs, first)
    got = gradients(loss(*module(xs, first)), into)

    want = {name: torch.zeros_like(tensor) for name, tensor in into.items()}
    for last in [*range(every, steps, every), steps]:
        begin, start = (last - 1) // every * every, max(0, last - reach)

        def constant_before_the_window(t: int, state: Any, start: int = start) -> Any:
            return pytree.tree_map(Tensor.detach, state) if t == start > 0 else state

        ys, state = bare(cell, xs[:last], first, constant_before_the_window)
        ys = torch.cat([ys[:begin].detach(), ys[begin:]])
        if last < steps:
            state = pytree.tree_map(Tensor.detach, state)
        for name, d in gradients(loss(ys, state), into).items():
            want[name] += d
    agree(got, want)


def test_the_budgets_above_really_make_the_memory_recompute():
    cell, xs, first = problem(Nested, 11, 0)
    leaves, structure = pytree.tree_flatten(first)
    for memory, slots in ((Checkpointed(budget=1100), 0), (Checkpointed(budget=1500), 3)):
        walk = Walk(cell, structure, Full(), memory, Autocast.now("cpu"), needs_dxs=True)
        plan = memory.plan(len(xs), lambda walk=walk: walk.sizes(xs[0], leaves))
        assert (plan.pieces, plan.slots) == (11, slots)


@pytest.mark.parametrize("build", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("batch_first", [False, True])
def test_torch_cells_give_what_torch_layers_give(build, batch_first):
    torch.manual_seed(0)
    layer = build(INPUT, HIDDEN, batch_first=batch_first, dtype=torch.float64)
    cell = getattr(nn, build.__name__ + "Cell")(INPUT, HIDDEN, dtype=torch.float64)
    cell.load_state_dict({n.removesuffix("_l0"): p for n, p in layer.state_dict().items()})
    xs = torch.randn(6, 6, INPUT, dtype=torch.float64)
    want, want_last = layer(xs)
    got, got_last = Recurrent(cell, batch_first=batch_first)(xs)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    want_last = pytree.tree_map(lambda s: s.squeeze(0), want_last)
    torch.testing.assert_close(got_last, want_last, rtol=1e-12, atol=1e-12)
    loss(want, want_last).backward()
    loss(got, got_last).backward()
    agree(
        {f"{name}_l0": p.grad for name, p in cell.named_parameters()},
        {name: p.grad for name, p in layer.named_parameters()},
    )


ROWS = [4, 7, 1]
"""Lengths out of order: packing sorts them, and what comes back is in this order."""


def packed_rows(seed: int = 0) -> tuple[list[Tensor], PackedSequence]:
    torch.manual_seed(seed)
    rows = [torch.randn(n, INPUT, dtype=torch.float64, requires_grad=True) for n in ROWS]
    return rows, pack_sequence(rows, enforce_sorted=False)


@pytest.mark.parametrize("memory", [Stored(), Checkpointed(every=3)], ids=repr)
@pytest.mark.parametrize("carry", [Full(), Truncated(3)], ids=repr)
@pytest.mark.parametrize("build", CELLS)
def test_packed_rows_go_as_each_would_alone(build, carry, memory):
    rows, packed = packed_rows()
    cell, _, _ = problem(build, 1, 0)
    random = cell.initial_state(len(ROWS))
    first = pytree.tree_map(
        lambda s: torch.randn_like(s).div_(4).requires_grad_() if s.is_floating_point() else s,
        random,
    )
    module = Recurrent(cell, carry=carry, memory=memory)
    ys, last = module(packed, first)
    assert isinstance(ys, PackedSequence)
    unpacked, total, want = unpack_sequence(ys), torch.zeros(()), torch.zeros(())
    for i, row in enumerate(rows):
        own = pytree.tree_map(lambda s, i=i: s[i : i + 1], first)
        y, end = module(row[:, None], own)
        torch.testing.assert_close(unpacked[i], y[:, 0], rtol=1e-12, atol=1e-12)
        mine = pytree.tree_map(lambda s, i=i: s[i : i + 1], last)
        torch.testing.assert_close(mine, end, rtol=1e-12, atol=1e-12)
        total, want = total + loss(unpacked[i][:, None], mine), want + loss(y, end)
    into = wanted(cell, rows[0], first)
    into |= {f"row {i}": row for i, row in enumerate(rows)}
    agree(gradients(total, into), gradients(want, into))


@pytest.mark.parametrize("carry", [Truncated(2), Sliding(every=2, steps=3)], ids=repr)
def test_packed_rows_are_cut_where_the_layers_of_elman_cut_them(carry):
    """A cut is a moment in time; the steps that a row has ended before carry it uncut."""
    rows, packed = packed_rows()
    layer = elman.nn.LSTM(INPUT, HIDDEN, carry=carry, dtype=torch.float64)
    cell = nn.LSTMCell(INPUT, HIDDEN, dtype=torch.float64)
    for name, p in layer.named_parameters():
        setattr(cell, name.removesuffix("_l0"), p)
    (ys, last), (want, want_last) = Recurrent(cell, carry=carry)(packed), layer(packed)
    torch.testing.assert_close(ys.data, want.data, rtol=1e-12, atol=1e-12)
    into = dict(layer.named_parameters()) | {f"row {i}": row for i, row in enumerate(rows)}

    def pull(ys: PackedSequence, last: Any) -> Tensor:
        return loss(pad_packed_sequence(ys)[0], pytree.tree_map(lambda s: s.view(3, HIDDEN), last))

    agree(gradients(pull(ys, last), into), gradients(pull(want, want_last), into))


def test_packed_rows_one_loss_at_a_time_are_refused():
    _, packed = packed_rows()
    with pytest.raises(UserError, match="packed"):
        backward_through_time(Recurrent(Plain().double()), packed, lambda ys, start: ys.sum())


class Noisy(Plain):
    """Zoneout: each unit keeps its old value with probability 1/3, drawn at each step."""

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.where(torch.rand_like(h) < 1 / 3, h, super().forward(x, h))


# The state of torch's generator, 5 KB, is kept with each state where random numbers are drawn.
@pytest.mark.parametrize("memory", [*MEMORIES[:3], Checkpointed(budget=26_000)], ids=repr)
def test_random_numbers_repeat_when_a_step_is_run_again(memory):
    cell, xs, first = problem(Noisy, 11, 0)
    torch.manual_seed(7)
    total = loss(*Recurrent(cell, memory=memory)(xs, first))
    after = torch.rand(3)
    got = gradients(total, wanted(cell, xs, first))
    torch.manual_seed(7)
    want = loss(*bare(cell, xs, first, uncut))
    assert torch.equal(after, torch.rand(3)), "the caller's random numbers were disturbed"
    agree(got, gradients(want, wanted(cell, xs, first)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("memory", [Stored(), Checkpointed(every=3)], ids=repr)
def test_random_numbers_repeat_on_the_gpu_too(memory):
    cell, xs, first = problem(Noisy, 11, 0)
    cell, xs = cell.cuda(), xs.detach().cuda().requires_grad_()
    first = first.detach().cuda().requires_grad_()
    torch.manual_seed(7)
    got = gradients(loss(*Recurrent(cell, memory=memory)(xs, first)), wanted(cell, xs, first))
    torch.manual_seed(7)
    want = gradients(loss(*bare(cell, xs, first, uncut)), wanted(cell, xs, first))
    agree(got, want)


@pytest.mark.parametrize("memory", [Stored(), Checkpointed(every=4)], ids=repr)
def test_a_second_backward_over_a_retained_graph_gives_the_same(memory):
    cell, xs, first = problem(Noisy, 9, 0)
    total = loss(*Recurrent(cell, memory=memory)(xs, first))
    once, twice = (gradients(total, wanted(cell, xs, first)) for _ in range(2))
    agree(twice, once)


def test_each_backward_draws_anew():
    cell, xs, first = problem(Plain, 9, 0)
    total = loss(*Recurrent(cell, carry=Randomized(keep=0.5, seed=0))(xs, first))
    once, twice = (gradients(total, wanted(cell, xs, first)) for _ in range(2))
    assert not torch.equal(once["xs"], twice["xs"])


def test_a_cut_stops_even_an_infinite_gradient():
    class Explodes(nn.Module):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return 1e200 * h + x

    xs = torch.zeros(6, 1, 1, dtype=torch.float64, requires_grad=True)
    ys, _ = Recurrent(Explodes(), carry=Truncated(window=2))(xs, xs.new_zeros(1, 1))
    (dxs,) = torch.autograd.grad(ys.sum(), xs)
    assert dxs.flatten().tolist() == [1e200, 1.0] * 3


class Watched(Plain):
    """Keeps a weak eye on everything it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        after = super().forward(x, h)
        self.made.append(weakref.ref(after))
        return after

    def alive(self) -> int:
        """Counted without a garbage collection: what is let go of is gone at once."""
        return sum(one() is not None for one in self.made)


@pytest.mark.parametrize("carry", [Full(), Truncated(7), Sliding(every=3, steps=7)], ids=repr)
def test_what_is_kept_follows_the_memory_and_goes_with_the_backward_pass(carry):
    cell = Watched()
    xs = torch.randn(20, BATCH, INPUT)
    total = Recurrent(cell, carry=carry)(xs)[0].sum()
    assert cell.alive() == 20
    total.backward()
    assert cell.alive() == 0, "the graph outlives its backward pass"
    cell.made.clear()
    total = Recurrent(cell, carry=carry, memory=Checkpointed(every=5))(xs)[0].sum()
    assert cell.alive() == 0
    total.backward()
    assert len(cell.made) == 20 + 20, "each step runs forward, and once more for the backward pass"
    cell.made.clear()
    with torch.no_grad():
        Recurrent(cell)(xs)
    assert cell.alive() == 0


# The compiler warns of its own doings where it meets an autograd function, and leaves it alone.
@pytest.mark.filterwarnings("ignore")
def test_compiled_it_runs_as_it_is():
    cell, xs, first = problem(Plain, 4, 0)
    want = gradients(loss(*Recurrent(cell)(xs, first)), wanted(cell, xs, first))
    compiled = torch.compile(Recurrent(cell), backend="eager")
    agree(gradients(loss(*compiled(xs, first)), wanted(cell, xs, first)), want)


def piecewise(ys: Tensor, start: int) -> Tensor:
    t = torch.arange(start + 1, start + 1 + len(ys), dtype=ys.dtype)[:, None, None]
    return (t * torch.sin(ys + t)).sum()


@pytest.mark.parametrize("memory", MEMORIES, ids=repr)
@pytest.mark.parametrize("carry", [Full(), Truncated(3), Sliding(every=2, steps=5)], ids=repr)
def test_the_loss_can_be_taken_piece_by_piece(carry, memory):
    cell, xs, first = problem(Nested, 11, 0)
    module = Recurrent(cell, carry=carry, memory=memory)
    ys, last = module(xs, first)
    want = gradients(piecewise(ys, 0), wanted(cell, xs, first))
    total, state = backward_through_time(module, xs, piecewise, first)
    torch.testing.assert_close(total, piecewise(ys, 0).detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(state, pytree.tree_map(Tensor.detach, last), rtol=0, atol=0)
    agree({name: x.grad for name, x in wanted(cell, xs, first).items()}, want)


def test_piece_by_piece_no_more_is_alive_than_the_memory_keeps():
    cell = Watched()
    most = 0

    def watching(ys: Tensor, start: int) -> Tensor:
        nonlocal most
        most = max(most, cell.alive())
        return ys.sum()

    module = Recurrent(cell, batch_first=True, memory=Checkpointed(every=5))
    backward_through_time(module, torch.randn(BATCH, 40, INPUT), watching)
    assert most == 5
    assert cell.get_parameter("h.weight").grad is not None
    with pytest.raises(UserError, match=r"shape \(2,\); it must return one number"):
        backward_through_time(module, torch.randn(2, 9, INPUT), lambda ys, start: ys.sum((1, 2)))


def test_a_weight_changed_before_the_backward_pass_is_noticed():
    cell, xs, first = problem(Plain, 4, 0)
    total = loss(*Recurrent(cell, memory=Checkpointed(every=2))(xs, first))
    with torch.no_grad():
        cell.get_parameter("h.weight").mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_a_gradient_of_the_gradient_is_refused_not_wrong():
    cell, xs, first = problem(Plain, 4, 0)
    (dxs,) = torch.autograd.grad(loss(*Recurrent(cell)(xs, first)), [xs], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dxs.sum().backward()


def test_a_learned_first_state_learns():
    class Learned(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.h0 = nn.Parameter(torch.zeros(HIDDEN))

        def initial_state(self, batch: int) -> Tensor:
            return self.h0.expand(batch, HIDDEN)

    cell, xs, _ = problem(Learned, 5, 0)
    got = gradients(loss(*Recurrent(cell, memory=Checkpointed(every=2))(xs)), {"h0": cell.h0})
    want = loss(*bare(cell, xs, cell.initial_state(BATCH), uncut))
    agree(got, gradients(want, {"h0": cell.h0}))


def test_frozen_parameters_and_integer_inputs_have_no_gradient():
    class Reads(Plain):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return super().forward(nn.functional.one_hot(x, INPUT).to(h), h)

    cell = Reads()
    cell.x.requires_grad_(False)
    ids = torch.randint(INPUT, (6, BATCH))
    Recurrent(cell)(ids)[0].sum().backward()
    assert cell.x.weight.grad is None
    assert cell.h.weight.grad is not None


def test_autocast_is_in_force_on_the_way_back_too():
    cell, xs, _ = problem(Plain, 8, 0)
    cell, xs = cell.float(), xs.detach().float()
    found = []
    for memory in (Stored(), Checkpointed(every=3)):
        with torch.autocast("cpu", torch.bfloat16):
            ys, _ = Recurrent(cell, memory=memory)(xs)
        assert ys.dtype == torch.bfloat16
        found.append(gradients(ys.float().sum(), dict(cell.named_parameters())))
    for name, d in found[0].items():
        assert torch.equal(d, found[1][name])


@pytest.mark.parametrize("memory", [Stored(), Checkpointed(every=3)], ids=repr)
def test_copies_and_state_dicts_work_as_for_any_module(memory):
    cell, xs, first = problem(Nested, 7, 0)
    module = Recurrent(cell, carry=Truncated(3), memory=memory)
    twin = copy.deepcopy(module)
    assert [*module.state_dict()] == [f"cell.{name}" for name in cell.state_dict()]
    with torch.no_grad():
        cell.get_parameter("write.weight").mul_(3)
    assert not torch.equal(twin(xs, first)[0], module(xs, first)[0])
    twin.load_state_dict(module.state_dict())
    torch.testing.assert_close(twin(xs, first), module(xs, first), rtol=0, atol=0)
    assert "Truncated(window=3)" in repr(twin)


class Wrong(Plain):
    def forward(self, x: Tensor, h: Tensor) -> Any:
        return [h, h, h]


def test_what_cannot_be_served_is_refused_with_a_reason():
    rnn = Recurrent(Plain())
    with pytest.raises(
        UserError, match="for 2 rows; every tensor of the state has the batch first"
    ):
        rnn(torch.zeros(3, 2, INPUT), torch.zeros(HIDDEN))
    with pytest.raises(UserError, match="no time steps"):
        rnn(torch.zeros(0, 2, INPUT))
    with pytest.raises(UserError, match="at least"):
        rnn(torch.zeros(3))
    for cell in (nn.GRUCell(1, 1), nn.LSTMCell(1, 1)):  # torch's LSTMCell would crash
        with pytest.raises(UserError, match=r"reads \(time, batch, 1\); .*xs.unsqueeze\(1\)"):
            Recurrent(cell)(torch.zeros(5, 1))
        with pytest.raises(UserError, match=rf"{type(cell).__name__} reads"):
            Recurrent(cell)(pack_sequence([torch.zeros(2), torch.zeros(1)]))
    with pytest.raises(UserError, match=r"reads \(batch, time, 1\); .*xs.unsqueeze\(0\)"):
        Recurrent(nn.LSTMCell(1, 1), batch_first=True)(torch.zeros(5, 1))
    with pytest.raises(UserError, match="must nest tensors only"):
        rnn(torch.zeros(3, 2, INPUT), (torch.zeros(2, HIDDEN), 1.5))
    with pytest.raises(UserError, match=r"Linear has no initial_state\(batch\)"):
        Recurrent(nn.Linear(2, 2))(torch.zeros(3, 2, 2))
    with pytest.raises(UserError, match="Wrong was given a state of structure"):
        Recurrent(Wrong())(torch.zeros(3, 2, INPUT))
    with pytest.raises(UserError, match="carry must be a Carry, got 3"):
        Recurrent(Plain(), carry=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="budget=10 bytes is too small"):
        Recurrent(Plain(), memory=Checkpointed(budget=10))(torch.zeros(3, 2, INPUT))


@pytest.mark.parametrize(
    "made", [lambda: elman.nn.GRU(3, 4), lambda: elman.nn.Recurrent(nn.GRUCell(3, 4))]
)
def test_what_is_no_carry_or_memory_is_refused_after_the_module_was_made_too(made):
    module = made()
    for name in ("carry", "memory"):
        with pytest.raises(UserError, match=f"{name} must be a"):
            setattr(module, name, 3)
    assert (module.carry, module.memory) == (Full(), Stored())


def test_sizes_that_are_missing_or_too_many_are_refused_in_words():
    for sizes, missing in (((), "input_size and hidden_size"), ((3,), "hidden_size")):
        with pytest.raises(UserError, match=rf"Recurrent\('gru'\) needs {missing}"):
            elman.nn.Recurrent("gru", *sizes)
    assert elman.nn.Recurrent("gru", 3, hidden_size=4).hidden_size == 4
    with pytest.raises(UserError, match=r"Recurrent\(module, 3, 4\): a module has its own sizes"):
        elman.nn.Recurrent(nn.GRUCell(3, 4), 3, 4)
