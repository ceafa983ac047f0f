"""torch's own layers on a CPU: where they run, and that they are torch.nn's, to the bit."""

import copy

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from elman import LanguageModel, kernels, nn
from elman.errors import UserError
from elman.gradients.carry import Truncated
from elman.kernels import aten, torchs
from elman.kernels.cpu import KERNEL
from elman.kernels.torchs import Network, Whole

WAYS = {
    "projected": ("LSTM", torch.float32, {"proj_size": 3}),
    "float16": ("GRU", torch.float16, {}),
    "float16, both ways": ("RNN", torch.float16, {"bidirectional": True, "num_layers": 2}),
    "bfloat16": ("LSTM", torch.bfloat16, {"num_layers": 2}),
}


def made(kind: str, dtype: torch.dtype, options: dict) -> tuple[nn.LSTM, torch.nn.LSTM]:
    torch.manual_seed(0)
    mine = getattr(nn, kind)(4, 7, dtype=dtype, **options)
    theirs = getattr(torch.nn, kind)(4, 7, dtype=dtype, **options)
    theirs.load_state_dict(mine.state_dict())
    return mine, theirs


def states(module: torch.nn.RNNBase, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    places = module.num_layers * (2 if module.bidirectional else 1)
    sizes = [module.proj_size or 7, 7][: 2 if module.mode == "LSTM" else 1]
    return tuple(torch.randn(places, 3, n, dtype=dtype).requires_grad_() for n in sizes)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_it_is_torchs_to_the_bit_there_and_back(way, batch_first, given):
    kind, dtype, options = WAYS[way]
    mine, theirs = made(kind, dtype, {**options, "batch_first": batch_first})
    x = torch.randn(3, 5, 4, dtype=dtype) if batch_first else torch.randn(5, 3, 4, dtype=dtype)
    assert kernels.explain(mine, x).runs == "aten"
    state = states(mine, dtype) if given else None
    found = []
    for module in (mine, theirs):
        for _ in range(2):  # as it is found out, and as it is known
            module.zero_grad()
            inputs = [x.clone().requires_grad_()]
            first = None if state is None else [s.detach().clone().requires_grad_() for s in state]
            hx = None if first is None else tuple(first) if first[1:] else first[0]
            ys, last = module(inputs[0], hx)
            last = last if isinstance(last, tuple) else (last,)
            loss = (ys * torch.linspace(-1, 1, ys.numel(), dtype=dtype).view_as(ys)).sum()
            (loss + sum(s.sum() for s in last)).backward()
            pulls = [t.grad for t in (*inputs, *(first or ()), *module.parameters())]
            found.append([ys.detach(), *(s.detach() for s in last), *pulls])
    for one in found[:3]:
        for a, b in zip(one, found[3], strict=True):
            assert torch.equal(a, b)
    assert float(found[0][-1].float().abs().max()) > 0


def test_without_a_compiler_torchs_own_runs_what_it_can(monkeypatch):
    monkeypatch.setattr(KERNEL, "library", None)
    mine, theirs = made("GRU", torch.float32, {})
    x = torch.randn(5, 3, 4)
    said = kernels.explain(mine, x)
    assert said.runs == "aten"
    assert "compiler" in said.reasons["cpu"]
    assert torch.equal(mine(x)[0], theirs(x)[0])
    assert kernels.explain(nn.GRU(4, 7, carry=Truncated(2)), x).runs == "reference"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"carry": Truncated(2)}, "cuts"),
        ({"dropout": 1.0, "num_layers": 2}, "dropout"),
    ],
)
def test_what_torch_would_not_do_alike_is_left_to_the_reference(options, why):
    mine = nn.LSTM(4, 7, proj_size=3, **options)
    said = kernels.explain(mine, torch.randn(5, 3, 4))
    assert said.runs == "reference"
    assert why in said.reasons["aten"]


@pytest.mark.parametrize("way", ["projected", "float16", "float16, both ways", "bfloat16"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_dropout_between_layers_is_torchs_own(way, packed, grad):
    """The reference ran it, layer by layer: 0.58 times as fast as torch.nn, projected."""
    kind, dtype, options = WAYS[way]
    if packed and dtype is torch.bfloat16:
        pytest.skip("ours runs packed rows in bfloat16, with masks of its own")
    mine, theirs = made(kind, dtype, {**options, "num_layers": 3, "dropout": 0.5})
    x = torch.randn(5, 3, 4, dtype=dtype)
    x = pack_padded_sequence(x, [2, 5, 4], enforce_sorted=False) if packed else x
    assert kernels.explain(mine, x).runs == "aten"
    found = []
    for module in (mine, theirs):
        torch.manual_seed(1)
        with torch.set_grad_enabled(grad):
            runs = [module(x)[0] for _ in range(2)]
        runs = [ys.data if packed else ys for ys in runs]
        pulls = []
        if grad:
            pulls = torch.autograd.grad(
                sum(ys.float().square().sum() for ys in runs), [*module.parameters()]
            )
        found.append([*runs, *pulls, torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not torch.equal(*found[0][:2])  # other masks at every call
    evaluated = [module.eval()(x)[0] for module in (mine, theirs)]
    evaluated = [ys.data if packed else ys for ys in evaluated]
    assert torch.equal(*evaluated)


@pytest.mark.parametrize("way", ["projected", "float16", "bfloat16", "bfloat16, a gru"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("steps", [3, 6])
def test_dropout_of_a_checkpointed_call_is_drawn_twice_alike(way, reentrant, steps):
    """Its generator is torch's, which `checkpoint` sets back; the reference ran such calls."""
    kind, dtype, options = {**WAYS, "bfloat16, a gru": ("GRU", torch.bfloat16, {})}[way]
    mine, _ = made(kind, dtype, {**options, "num_layers": 3, "dropout": 0.5})
    x = torch.randn(steps, 3, 4, dtype=dtype).requires_grad_()
    found = []
    for again in (False, True):
        torch.manual_seed(1)
        ys = checkpoint(lambda x: mine(x)[0], x, use_reentrant=reentrant) if again else mine(x)[0]
        pulls = torch.autograd.grad if not reentrant else grad_by_backward
        found.append([ys.detach(), *pulls(ys.float().square().sum(), [x, *mine.parameters()])])
    assert found[0][1].abs().max() > 0
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def grad_by_backward(loss, leaves):
    for t in leaves:
        t.grad = None
    loss.backward()
    return [t.grad.clone() for t in leaves]


def test_a_carry_that_cuts_still_cuts():
    torch.manual_seed(0)
    full, cut = nn.LSTM(4, 7, proj_size=3), nn.LSTM(4, 7, proj_size=3, carry=Truncated(2))
    cut.load_state_dict(full.state_dict())
    x = torch.randn(6, 3, 4)
    pulls = []
    for module in (full, cut):
        h = x.clone().requires_grad_()
        module(h)[0][-1].sum().backward()
        pulls.append(h.grad)
    assert pulls[0][0].abs().max() > 0
    assert pulls[1][:4].abs().max() == 0
    assert torch.allclose(pulls[0][5], pulls[1][5])


def test_a_kernel_that_is_named_is_the_one_that_runs():
    mine, theirs = made("LSTM", torch.float32, {"proj_size": 3})
    x = torch.randn(5, 3, 4)
    with kernels.using("reference"):
        assert kernels.explain(mine, x).runs == "reference"
        ys = mine(x)[0]
    assert torch.allclose(ys, theirs(x)[0], atol=1e-6)
    assert torch.equal(mine(x)[0], theirs(x)[0])
    plain = nn.GRU(4, 7)
    with kernels.using("aten"):
        assert kernels.explain(plain, x).runs == "aten"


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_it_is_named_it_runs_what_is_ours_elsewhere(kind, dtype, packed):
    mine, theirs = made(kind, dtype, {"num_layers": 2})
    x = torch.randn(5, 3, 4, dtype=dtype)
    given = pack_padded_sequence(x, torch.tensor([5, 3, 1])) if packed else x
    with kernels.using("aten"):
        assert kernels.explain(mine, given).runs == "aten"
        found = [mine(given)[0] for _ in range(3)]  # as it is found out, and as it is known
    wanted = theirs(given)[0]
    for ys in found:
        assert torch.equal(ys.data, wanted.data)
    with kernels.using("aten"), pytest.raises(UserError, match="cannot run here, it reads no ids"):
        mine(torch.zeros(5, 3, dtype=torch.int64))


def test_weights_that_have_changed_are_read_as_they_are():
    mine, theirs = made("GRU", torch.float16, {})
    x = torch.randn(2, 3, 4).half()
    before = mine(x)[0]
    with torch.no_grad():
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            a.mul_(0.5)
            b.mul_(0.5)
    assert not torch.equal(before, mine(x)[0])
    assert torch.equal(mine(x)[0], theirs(x)[0])
    wide = copy.deepcopy(mine).float()
    assert kernels.explain(wide, x.float()).runs == "cpu"
    assert wide(x.float())[0].dtype == torch.float32


def test_a_language_model_keeps_to_kernels_of_ours():
    model = LanguageModel(9, cell="gru", hidden_size=8).bfloat16()
    module = next(m for m in model.modules() if isinstance(m, torch.nn.RNNBase))
    assert kernels.explain(module, torch.zeros(1, 2, dtype=torch.int64)).runs != "aten"


def test_a_gradient_of_a_gradient_is_torchs():
    mine, theirs = made("LSTM", torch.float32, {"proj_size": 3})
    x = torch.randn(4, 3, 4)
    found = []
    for module in (mine, theirs):
        h = x.clone().requires_grad_()
        (pull,) = torch.autograd.grad(module(h)[0].square().sum(), h, create_graph=True)
        found.append(torch.autograd.grad(pull.square().sum(), h)[0])
    assert torch.equal(*found)
    assert found[0].abs().max() > 0


def stack(mode: str, hidden: int, steps: int, keeps: bool, dtype=torch.bfloat16) -> Whole:
    return Whole(Network(mode, True, 4, hidden, 0, 1, 1), steps, 3, dtype, keeps=keeps)


def test_in_bfloat16_it_is_preferred_for_few_steps_and_onednns_lstm():
    faster = aten.KERNEL.is_faster
    assert faster(stack("GRU", 64, 1, False))
    assert not faster(stack("GRU", 64, 35, False))
    assert faster(stack("LSTM", 64, 35, False))
    assert faster(stack("LSTM", 512, 35, False))
    assert not faster(stack("LSTM", 500, 35, False))
    assert not faster(stack("LSTM", 512, 35, True))
    assert not faster(stack("LSTM", 64, 35, False, torch.float32))
    assert faster(stack("LSTM", 344, 4, False))
    assert not faster(stack("LSTM", 600, 4, False))
    assert faster(stack("RNN_TANH", 33, 6, True))
    assert not faster(stack("GRU", 33, 6, True))
    for mode, hidden, steps in (("LSTM", 370, 1), ("RNN_TANH", 896, 4)):  # masks are cheaper there
        dropped = stack(mode, hidden, steps, True)
        assert faster(dropped._replace(dropout=0.2))
        assert not faster(dropped)
    packed = stack("GRU", 64, 1, False)._replace(packed=True)
    assert faster(packed)
    assert not faster(packed._replace(steps=4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [False, True])
def test_autocast_is_torchs_but_for_the_dtype_of_what_comes_out(dtype, given):
    module, x = nn.LSTM(4, 7, 2, proj_size=3), torch.randn(5, 6, 4).to(dtype)
    zeros = tuple(torch.zeros(2, 6, n) for n in (3, 7))
    first = tuple(torch.randn(2, 6, n).bfloat16() for n in (3, 7)) if given else None
    with torch.autocast("cpu", torch.bfloat16):
        assert kernels.explain(module, x).runs == "aten"
        ys, last = module(x, first)
        wide = zeros if first is None else tuple(s.float() for s in first)
        expected, ends = module.to_torch()(x.float(), wide)
    for a, b in zip((ys, *last), (expected, *ends), strict=True):
        assert a.dtype == torch.bfloat16
        assert torch.equal(a, b.bfloat16())
    ys.float().sum().backward()
    assert {p.grad.dtype for p in module.parameters()} == {torch.float32}


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_packed_rows_that_are_projected_are_torchs_too(bidirectional, given, monkeypatch):
    aten._warn_unheard()  # a call of its own, once in a process
    calls, lstm = [], torchs.TORCHS["LSTM"]
    monkeypatch.setitem(torchs.TORCHS, "LSTM", lambda *args: calls.append(1) or lstm(*args))
    options = {"proj_size": 3, "num_layers": 2, "bidirectional": bidirectional}
    mine, theirs = made("LSTM", torch.float32, options)
    x = pack_padded_sequence(torch.randn(5, 3, 4), [2, 5, 4], enforce_sorted=False)
    state = states(mine, torch.float32) if given else None
    found = []
    for module in (mine, theirs):
        ys, last = module(x, state)
        loss = ys.data.square().sum() + last[0].sum() + last[1].square().sum()
        leaves = [*module.parameters(), *(state or ())]
        found.append([ys.data, *last, *torch.autograd.grad(loss, leaves)])
    assert len(calls) == 1  # and torch.nn's own
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_packed_rows_are_torchs_to_the_bit_too(way):
    """`explain` said so of float16 while the rows were padded and the reference ran."""
    kind, dtype, options = WAYS[way]
    mine, theirs = made(kind, dtype, options)
    rows = torch.randn(6, 3, 4, dtype=dtype)
    packed = pack_padded_sequence(rows, [2, 6, 4], enforce_sorted=False)
    if dtype is torch.bfloat16:
        assert kernels.explain(mine, packed).runs == "cpu"  # which is faster at packed rows
        return
    assert kernels.explain(mine, packed).runs == "aten"
    found = []
    for module in (mine, theirs):
        ys, last = module(packed)
        last = last if isinstance(last, tuple) else (last,)
        (ys.data.sum() + sum(s.sum() for s in last)).backward()
        pulls = [p.grad for p in module.parameters()]
        found.append([ys.data.detach(), *(s.detach() for s in last), *pulls])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_batches_without_rows_are_torchs(kind, batch_first):
    """The reference ran them step by step: 0.17 times as fast as torch.nn."""
    mine, theirs = made(kind, torch.float32, {"num_layers": 2, "batch_first": batch_first})
    x = torch.zeros(0, 5, 4) if batch_first else torch.zeros(5, 0, 4)
    assert kernels.explain(mine, x).runs == "aten"
    for module in (mine, mine, theirs):
        ys, last = module(x)
        ys.sum().backward()
        assert ys.shape == (*x.shape[:2], 7)
        assert (last[0] if kind == "LSTM" else last).shape == (2, 0, 7)
        assert not any(p.grad.any() for p in module.parameters())
    with torch.no_grad():
        assert mine(x)[0].shape == (*x.shape[:2], 7)


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("grad", [False, True])
def test_autocast_that_finds_its_own_dtype_changes_nothing(kind, grad, monkeypatch):
    """Such calls took the long way, 0.63 times as fast as torch.nn."""
    mine, theirs = made(kind, torch.bfloat16, {})
    x = torch.randn(3, 3, 4, dtype=torch.bfloat16)
    first = states(mine, torch.bfloat16)
    hx = first if kind == "LSTM" else first[0]
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
        mine(x, hx)
        with monkeypatch.context() as patch:
            patch.setattr(mine, "_run_settled", None)  # the longer ways
            found = [module(x, hx)[0] for module in (mine, theirs)]
        wide = tuple(s.float() for s in first)
        other = mine(x, wide if kind == "LSTM" else wide[0])[0]  # is cast as before
    assert torch.equal(*found)
    assert other.dtype == torch.bfloat16
    torch.testing.assert_close(other, found[0], rtol=0.05, atol=0.02)
    with torch.set_grad_enabled(grad), pytest.raises(UserError, match="dtype"):
        mine(x, wide if kind == "LSTM" else wide[0])
