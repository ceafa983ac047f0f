"""torch's own layers on a CPU: where they run, and that they are torch.nn's, to the bit."""

import copy

import pytest
import torch

from elman import LanguageModel, kernels, nn
from elman.gradients.carry import Truncated
from elman.kernels import aten
from elman.kernels.cpu import KERNEL
from elman.kernels.cudnn import Network, Whole

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
        ({"dropout": 0.5, "num_layers": 2}, "dropout"),
    ],
)
def test_what_torch_would_not_do_alike_is_left_to_the_reference(options, why):
    mine = nn.LSTM(4, 7, proj_size=3, **options)
    said = kernels.explain(mine, torch.randn(5, 3, 4))
    assert said.runs == "reference"
    assert why in said.reasons["aten"]


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
