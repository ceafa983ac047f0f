"""`torch.compile` around a module on a CPU: one native call each way, and graphs kept on disk."""

from __future__ import annotations

import copy
import itertools
import os
import random
import subprocess
import sys

import pytest
import torch

from elman import nn
from elman.cells import CELLS
from elman.errors import UserError
from elman.gradients.carry import Full, Randomized, Truncated
from elman.gradients.chunks import Chunked
from elman.gradients.memory import Checkpointed, Stored
from elman.kernels.cpu import KERNEL, calls
from elman.kernels.cpu.calls import Prepared, kept_count
from elman.recurrence import compiled

native = pytest.mark.skipif(KERNEL.library is None, reason="the cpu kernel was not built")
MODULES = [nn.RNN, nn.GRU, nn.LSTM]


@pytest.fixture
def made(monkeypatch):
    """The names of all native calls."""
    names = []

    def watched(name, method):
        return lambda *args: names.append(name) or method(*args)

    for name in ("forward", "backward"):
        monkeypatch.setattr(Prepared, name, watched(name, getattr(Prepared, name)))
    return names


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    return lambda module: torch.compile(module, backend="aot_eager", fullgraph=True)


def everything(run, module, x, state=()):
    """Outputs, last states and gradients of all there is, masks from one seed."""
    torch.manual_seed(1)
    module.zero_grad()
    x = x.clone().requires_grad_() if x.is_floating_point() else x
    state = [s.clone().requires_grad_() for s in state]
    ys, last = run(x, *([tuple(state)] if len(state) > 1 else state))
    last = last if isinstance(last, tuple) else (last,)
    torch.stack([t.sin().sum() for t in (ys, *last)]).sum().backward()
    leaves = [t for t in (x, *state) if t.requires_grad]
    return [ys, *last, *(t.grad for t in (*leaves, *module.parameters()))]


OPTIONS = [
    {},
    {"num_layers": 2, "bias": False, "dtype": torch.float64},
    {"num_layers": 3, "bidirectional": True, "dropout": 0.4},
    {"num_layers": 2, "batch_first": True},
]


@native
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: " ".join(o) or "plain")
@pytest.mark.parametrize("reads", ["numbers", "ids"])
def test_compiled_calls_are_eager_ones_to_the_bit(kind, options, reads, compiler, made):
    module = kind(5, 7, **options)
    whole, dtype = compiler(copy.deepcopy(module)), module.weight_hh_l0.dtype
    places = module.num_layers * (2 if module.bidirectional else 1)
    for T, B in ((1, 2), (6, 3), (20, 4)):
        shape = (B, T) if module.batch_first else (T, B)
        x = torch.randn(*shape, 5, dtype=dtype) if reads == "numbers" else torch.randint(5, shape)
        states = (T > 1) * (2 if kind is nn.LSTM else 1)
        state = [torch.randn(places, B, 7, dtype=dtype) for _ in range(states)]
        expected = everything(module, module, x, state)
        made.clear()
        found = everything(whole, whole._orig_mod, x, state)
        assert made == ["forward", "backward"]
        assert all(map(torch.equal, found, expected))


@native
@pytest.mark.parametrize("kind", MODULES)
def test_so_are_those_without_a_gradient(kind, compiler, made):
    module, x = kind(5, 7, 2, dropout=0.5).eval(), torch.randn(4, 3, 5)
    with torch.no_grad():
        expected = module(x)[0]
        made.clear()
        assert torch.equal(compiler(module)(x)[0], expected)
    assert made == ["forward"]


@native
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("how", ["bfloat16", "float16", "autocast"])
def test_narrow_numbers_are_compiled_too(kind, how, compiler):
    """They run another way, and whoever learns the shapes of what is kept must know it."""
    dtype = torch.float32 if how == "autocast" else getattr(torch, how)
    module = kind(5, 7, 2, dtype=dtype)
    x, found = torch.randn(6, 3, 5, dtype=dtype), []
    for run in (compiler(module), module):
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            module.zero_grad()
            run(x)[0].float().sin().sum().backward()
        found.append([p.grad for p in module.parameters()])
    for mine, eager in zip(*found, strict=True):
        torch.testing.assert_close(mine, eager, rtol=0.05, atol=0.05 * float(eager.abs().amax()))


@native
def test_compiled_code_refuses_ids_out_of_range_in_words(compiler):
    whole = compiler(nn.GRU(4, 5))
    whole(torch.tensor([[1, 2]]))
    with pytest.raises(UserError, match="lie between 0 and input_size - 1 = 3"):
        whole(torch.tensor([[1, 4]]))


@native
def test_weights_that_are_replaced_are_read(compiler):
    module, x = nn.LSTM(3, 4), torch.randn(5, 2, 3)
    whole = compiler(module)
    for _ in range(3):
        for p in module.parameters():
            p.data = torch.randn_like(p)
        assert torch.equal(whole(x)[0], module(x)[0])


@native
@pytest.mark.parametrize("seed", range(5))
def test_as_much_is_kept_as_compilers_are_told(seed):
    draw = random.Random(seed)
    for kind, layers, both in itertools.product(MODULES, (1, 2, 3), (False, True)):
        dtype = draw.choice((torch.float32, torch.float64))
        T, B, H = draw.randint(1, 40), draw.randint(1, 40), draw.randint(1, 70)
        module = kind(3, H, layers, bidirectional=both, dtype=dtype)
        x = module._inputs(*module._time_first(torch.zeros(T, B, 3, dtype=dtype), None))
        prepared = compiled._prepared(module._recipe(), x)
        size = layers, 1 + both, (T, B), H, dtype.itemsize
        assert kept_count(CELLS[module.cell], *size) == prepared.kept.numel()


@native
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("both", [False, True])
def test_every_byte_that_is_kept_was_written(kind, both, monkeypatch):
    """Else an operator would give other numbers for the same."""
    module = kind(3, 5, 3, bidirectional=both, dtype=torch.float64)
    x = module._inputs(*module._time_first(torch.randn(7, 3, 3, dtype=torch.float64), None))
    call, found = compiled._call(module._recipe(), x), []
    for value in (1.0, 2.0):
        monkeypatch.setattr(calls, "like", lambda t, value=value: torch.full_like(t, value))
        found.append(call.forward(keep=True))
    assert all(map(torch.equal, *found))


def test_a_number_says_what_is_kept():
    """The same in every process: compilers find graphs of other processes by it."""
    numbers = {
        compiled._number(carry, memory, chunks)
        for carry in (Full(), Truncated(3), Randomized(0.5))
        for memory in (Stored(), Checkpointed(every=3), Checkpointed(every=4))
        for chunks in (None, compiled.Chunks(Chunked()))
    }
    assert len(numbers) == 18
    assert compiled._number(Randomized(0.5, seed=1), Stored(), None) in numbers
    assert compiled._number(Full(), Stored(), None) == compiled._number(Full(), Stored(), None)


def test_other_kernels_keep_other_things(monkeypatch):
    usual = compiled._number(Full(), Stored(), None)
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    assert compiled._number(Full(), Stored(), None) != usual


PROGRAM = """
import sys, torch, elman.nn
from elman.gradients import Checkpointed
torch.manual_seed(0)
options = {"memory": Checkpointed(every=3)} if sys.argv[1] == "some" else {}
module = elman.nn.LSTM(8, 8, **options)
ys = torch.compile(module)(torch.randn(12, 4, 8))[0]
ys.sum().backward()
print(float(module.weight_hh_l0.grad.sum()))
"""


@pytest.mark.slow
def test_graphs_that_another_process_left_on_disk_are_not_mistaken(tmp_path):
    cache = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    found = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, kept], env=cache, check=True, capture_output=True
        ).stdout
        for kept in ("all", "some", "all")
    ]
    assert len({*found}) == 1
