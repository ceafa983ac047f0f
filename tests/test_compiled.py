"""`torch.compile` around a module on a CPU: one native call each way, and graphs kept on disk."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils.checkpoint import checkpoint

import paper_gpu
from elman import LanguageModel, nn
from elman.cells import CELLS, Weights
from elman.errors import UserError
from elman.gradients.carry import Full, Randomized, Truncated
from elman.gradients.chunks import Chunked
from elman.gradients.memory import Checkpointed, Stored
from elman.kernels import Piece, cuda, reference, using
from elman.kernels.cpu import KERNEL, calls, masks
from elman.kernels.cpu.calls import Prepared, kept_count
from elman.kernels.cuda import wider
from elman.kernels.cuda.widths import STAY_ZERO
from elman.recurrence import compiled, compiled_calls, operator

native = pytest.mark.skipif(KERNEL.library is None, reason="the cpu kernel was not built")
MODULES = [nn.RNN, nn.GRU, nn.LSTM]
OPEN = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC])


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


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: " ".join(o) or "plain")
@pytest.mark.parametrize("reads", ["numbers", "ids"])
def test_a_cell_whose_derivative_is_autograds_has_it_when_compiled(options, reads, compiler):
    module = nn.Layers("layer_norm_lstm", 5, 7, **options)
    dtype = module.weight_hh_l0.dtype
    x = torch.randn(6, 3, 5, dtype=dtype) if reads == "numbers" else torch.randint(5, (6, 3))
    expected = everything(module, module, x)
    whole = compiler(copy.deepcopy(module))
    assert all(pull.any() for pull in expected)
    assert all(map(torch.equal, everything(whole, whole._orig_mod, x), expected))


@native
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: " ".join(o) or "plain")
def test_compiled_calls_are_eager_ones_to_the_bit(kind, options, compiler, made):
    """Every module with every option; numbers and ids in turn, so that each meets them all."""
    reads = ("numbers", "ids")[(MODULES.index(kind) + OPTIONS.index(options)) % 2]
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_compiler_may_be_the_first_to_ask_about_masks(dtype):
    with FakeTensorMode():
        assert masks._drops_alike.__wrapped__(KERNEL, dtype) == masks.drops_as_torch(dtype)


@native
def test_compiled_code_refuses_ids_out_of_range_in_words(compiler):
    whole = compiler(nn.GRU(4, 5))
    whole(torch.tensor([[1, 2]]))
    with pytest.raises(UserError, match="lie between 0 and input_size - 1 = 3"):
        whole(torch.tensor([[1, 4]]))


@native
@pytest.mark.parametrize("embedding_size", [None, 4])
def test_a_language_model_is_one_graph(embedding_size, compiler):
    model = LanguageModel(6, cell="gru", hidden_size=5, embedding_size=embedding_size)
    whole, ids = compiler(model), torch.randint(6, (2, 7))
    pulls = []
    for run in (model, whole):
        model.zero_grad()
        logits, state = run(ids)
        run(ids, state.detach())[0].sin().sum().backward()
        pulls.append([logits.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*pulls)
    with pytest.raises((UserError, IndexError)):  # torch's own words, of an embedding
        whole(torch.full((2, 7), 6))


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
        prepared = compiled_calls._prepared(module._recipe(), x)
        size = layers, 1 + both, (T, B), H, dtype.itemsize
        assert isinstance(prepared, Prepared)
        assert kept_count(CELLS[module.cell], *size) == prepared.kept.numel()


@native
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("both", [False, True])
def test_every_byte_that_is_kept_was_written(kind, both, monkeypatch):
    """Else an operator would give other numbers for the same."""
    module = kind(3, 5, 3, bidirectional=both, dtype=torch.float64)
    x = module._inputs(*module._time_first(torch.randn(7, 3, 3, dtype=torch.float64), None))
    call, found = compiled_calls.ready(module._recipe(), x), []
    for value in (1.0, 2.0):
        monkeypatch.setattr(calls, "like", lambda t, value=value: torch.full_like(t, value))
        found.append(call.forward(keep=True))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("more", [0, 3])
@pytest.mark.parametrize("kind", [*MODULES, "mgu", "slstm", "peephole"])
@pytest.mark.parametrize(("layers", "bias"), [(1, True), (3, True), (2, False)])
def test_launches_on_a_gpu_do_what_a_stack_does(kind, layers, bias, more, monkeypatch):
    """On paper; and what the compiler is told of is what comes out."""
    monkeypatch.setattr(cuda, "width_for", lambda cell, n, *_: n + more * (cell.name in STAY_ZERO))
    make = functools.partial(nn.Layers, kind) if isinstance(kind, str) else kind
    module = make(4, 8, layers, bias=bias)
    x = module._inputs(*module._time_first(torch.randn(5, 3, 4), None))
    x = x._replace(stacked=[torch.randn_like(s) for s in x.stacked])
    recipe, dys = module._recipe(), torch.randn(5, 3, 8)
    dlast = [torch.randn_like(s) for s in x.stacked]
    with paper_gpu.launches_prepared(), torch.no_grad():
        assert compiled_calls._is_launched(recipe, x, cuda.KERNEL, drops=False)
        call = compiled_calls.Launched(wider.prepared(recipe.job(x), one_by_one=False), x)
        found, told = call.forward(keep=True), compiled_calls._launched_shapes(recipe, x, keep=True)
        assert [t.shape for t in found] == [t.shape for t in told]
        assert all(t.is_contiguous() for t in found)
        assert len({t.untyped_storage().data_ptr() for t in found}) == len(found)
        alone = call.forward(keep=False)
        pulls = call.backward(found[1 + len(x.stacked) :], dys, dlast, needs_dxs=True)
    stack = recipe.stack(x, reference.KERNEL)
    ys, last, kept = operator.forward(recipe, x, stack, keep=True)
    with torch.no_grad():
        dxs, dstate, dws = operator.backward(stack, x, kept, dys, dlast, needs_dxs=True)
    for mine in (found, alone):
        torch.testing.assert_close(mine[: 1 + len(last)], [ys, *last])
    torch.testing.assert_close(pulls, [*dstate, *dws, dxs])


def test_rows_that_a_compiler_leaves_open_are_counted():
    """Plans are made for a number of them, and looked up by it."""
    real, mode = torch.zeros(7, 6, 4), FakeTensorMode(shape_env=ShapeEnv())
    xs = mode.from_tensor(real, symbolic_context=OPEN)
    with mode, paper_gpu.present():
        assert not isinstance(xs.shape[1], int)
        W_ih, W_hh, h = torch.empty(8, 4), torch.empty(8, 8), torch.empty(6, 8)
        piece = Piece(CELLS["tanh"], Weights(W_ih, W_hh), xs, (h,))
        assert cuda.KERNEL.width(piece) == 8


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"bidirectional": True}])
def test_on_a_gpu_modules_are_compiled_for_every_shape(kind, options, keep, compiler):
    """The second shape is compiled with sizes left open."""
    torch.manual_seed(0)
    module = kind(4, 21, device="cuda", **options)
    whole = compiler(module)
    for steps, rows in ((5, 3), (7, 3), (7, 6), (9, 3), (5, 3)):
        x = torch.randn(steps, rows, 4, device="cuda")
        with torch.set_grad_enabled(keep), using("cuda"):
            found = [everything(run, module, x) if keep else run(x)[0] for run in (whole, module)]
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


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
ys = torch.compile(module, fullgraph=True)(torch.randn(12, 4, 8))[0]
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


# ---------------------------------------------------------------- outside of a graph that may break


@pytest.fixture
def graphs():
    """A backend that keeps the names of what it was given to compile, graph by graph."""
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


class Graphs:
    def __init__(self):
        self.kept = []

    def __call__(self, graph, _):
        self.kept.append([str(n.target) for n in graph.graph.nodes if n.op.startswith("call_")])
        return graph


def operators(graphs):
    return sum("elman.recurrence" in name for graph in graphs.kept for name in graph)


# where code goes on after a break, the compiler reads .grad of what is no leaf: its own warning
reads_grad = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Model(torch.nn.Module):
    """A module between other layers, with a state of its own."""

    def __init__(self, kind, **options):
        super().__init__()
        dtype, both = options.get("dtype"), options.get("bidirectional", False)
        self.before = torch.nn.Linear(4, 5, dtype=dtype)
        self.layers = kind(5, 7, **options)
        self.after = torch.nn.Linear(7 * (1 + both), 4, dtype=dtype)

    def forward(self, x, state=None):
        ys, state = self.layers(self.before(x).sin(), state)
        return self.after(ys.cos()), state


@pytest.mark.parametrize("kind", [*MODULES, functools.partial(nn.Layers, "mgu")])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_graph_that_may_break_does_and_one_that_may_not_is_whole(kind, fullgraph, graphs):
    module, x = kind(5, 7), torch.randn(4, 3, 5)
    found = torch.compile(module, backend=graphs, fullgraph=fullgraph)(x)[0]
    assert torch.equal(found, module(x)[0])
    assert (len(graphs.kept), operators(graphs)) == ((1, 1) if fullgraph else (0, 0))


@native
def test_outside_a_graph_calls_go_the_short_way(graphs, monkeypatch):
    module, x = nn.GRU(5, 7), torch.randn(4, 3, 5)
    module(x)
    monkeypatch.setattr(nn.GRU, "_run_long", None)
    torch.compile(module, backend=graphs)(x)


@native
@reads_grad
@pytest.mark.parametrize(
    ("kind", "options"), [(nn.RNN, {}), (nn.GRU, OPTIONS[2]), (nn.LSTM, OPTIONS[1])]
)
@pytest.mark.parametrize("fullgraph", [False, True])
def test_in_a_model_compiled_calls_are_eager_ones(kind, options, fullgraph, graphs):
    """In every shape, from a state that is given, with gradients and without."""
    model = Model(kind, **options)
    places = model.layers.num_layers * (1 + model.layers.bidirectional)
    whole: Any = torch.compile(copy.deepcopy(model), backend=graphs, fullgraph=fullgraph)
    dtype = model.before.weight.dtype
    for T, B in ((6, 3), (1, 2), (9, 4)):
        x = torch.randn(T, B, 4, dtype=dtype)
        h = torch.randn(places, B, 7, dtype=dtype)
        state = [h] * (2 if kind is nn.LSTM else 1)
        found = everything(whole, whole._orig_mod, x, state)
        assert all(map(torch.equal, found, everything(model, model, x, state)))
    with torch.no_grad():
        assert torch.equal(whole.eval()(x)[0], model.eval()(x)[0])
    assert operators(graphs) == (len(graphs.kept) if fullgraph else 0)
    assert len(graphs.kept) > 0


@pytest.mark.parametrize("kind", MODULES)
def test_one_piece_of_code_takes_all_modules_and_shapes(kind, graphs):
    """Else the compiler gives up after eight, and then everything is slow."""
    for i in range(12):
        module = kind(3 + i, 4 + i, 1 + i % 2, bidirectional=i % 3 == 0)
        whole = torch.compile(module, backend=graphs)
        for T in (1, 2, 5):
            x = torch.randn(T, 1 + i, 3 + i)
            state = whole(x)[1]
            whole(x, state)
            whole(x[:, 0])
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(kind.forward.__code__)
    assert len(entries) == 1


@reads_grad
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_models_go_on_learning(fullgraph, graphs):
    torch.manual_seed(0)
    model, x = Model(nn.LSTM), torch.randn(6, 3, 4)
    twin = copy.deepcopy(model)
    whole = torch.compile(twin, backend=graphs, fullgraph=fullgraph)
    for run, mine in ((model, model), (whole, twin)):
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            (run(x)[0] - x).square().mean().backward()
            optimizer.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_two_threads_share_compiled_code(fullgraph, graphs):
    modules = [nn.GRU(5, 7), nn.GRU(6, 4, 2)]
    inputs = [torch.randn(4, 3, 5), torch.randn(8, 2, 6)]
    wanted = [module(x)[0] for module, x in zip(modules, inputs, strict=True)]
    wholes = [torch.compile(m, backend=graphs, fullgraph=fullgraph) for m in modules]

    def run(i):
        return [wholes[i](inputs[i])[0] for _ in range(30)]

    with ThreadPoolExecutor(2) as threads:
        for found, want in zip(threads.map(run, range(2)), wanted, strict=True):
            assert all(torch.equal(ys, want) for ys in found)


@contextlib.contextmanager
def block():
    yield


def in_a_branch(module, x):
    return torch.cond(x.sum() > 0, lambda x: module(x)[0].sin(), lambda x: module(x)[0].cos(), (x,))


def in_a_checkpoint(module, x):
    return checkpoint(lambda x: module(x)[0].sin(), x, use_reentrant=False)


def in_a_block(module, x):
    with block():
        return module(x)[0].sin()


def in_a_try(module, x):
    try:
        return module(x)[0].sin()
    except KeyError:
        return x


def in_a_part_that_must_be_whole(module, x):
    with torch._dynamo.error_on_graph_break(True):
        return module(x)[0].sin()


@pytest.mark.parametrize(
    "use",
    [in_a_branch, in_a_checkpoint, in_a_block, in_a_try, in_a_part_that_must_be_whole],
    ids=lambda use: use.__name__,
)
def test_where_no_code_could_go_on_from_a_break_there_is_none(use, graphs):
    module, x = nn.GRU(5, 7), torch.randn(4, 3, 5)
    with torch.no_grad():
        found = torch.compile(functools.partial(use, module), backend=graphs)(x)
    torch.testing.assert_close(found, use(module, x).detach())
    assert len(graphs.kept) == 1


@pytest.mark.parametrize("setting", ["allow_rnn", "compiled_autograd"])
def test_settings_of_the_compiler_keep_a_module_inside(setting, graphs):
    module, x = nn.LSTM(5, 7), torch.randn(4, 3, 5)
    with torch._dynamo.config.patch(**{setting: True}):
        torch.compile(module, backend=graphs)(x)
    assert operators(graphs) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own, about TorchScript
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_graphs_that_are_captured_on_a_gpu_take_modules_in(gpu, mode, graphs, monkeypatch):
    module, x = nn.GRU(5, 7), torch.randn(4, 3, 5)
    whole, backend = torch.compile(module, mode=mode), torch._TorchCompileInductorWrapper
    monkeypatch.setattr(backend, "__call__", lambda _, *given, **__: graphs(*given))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: gpu)
    whole(x)
    assert operators(graphs) == (gpu and mode == "reduce-overhead")


def test_a_compiler_that_says_nothing_of_itself_gets_whole_graphs(graphs, monkeypatch):
    monkeypatch.delattr(torch._dynamo, "skip_frame")
    torch.compile(nn.GRU(5, 7), backend=graphs)(torch.randn(4, 3, 5))
    assert operators(graphs) == 1


@reads_grad
def test_transforms_of_functions_are_compiled_around(graphs):
    """Inside a graph they would meet an operator that they do not know."""
    module = nn.GRU(3, 4, dtype=torch.float64)
    gradient = torch.func.grad(lambda x: module(x)[0].sin().sum())
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(gradient, backend=graphs)(x), gradient(x))


def test_elman_does_not_import_the_compiler():
    program = "import sys, elman.nn; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
