"""The modules as a PyTorch user meets them: `torch.nn`'s promises, kept; and its refusals."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn as torch_nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

from elman import kernels, nn
from elman.errors import UserError
from elman.gradients import Checkpointed, Full, Given, Randomized, Sliding, Stored, Truncated
from elman.kernels import choice
from elman.recurrence import compiled

KINDS = {
    "tanh": ("RNN", {}),
    "relu": ("RNN", {"nonlinearity": "relu"}),
    "gru": ("GRU", {}),
    "lstm": ("LSTM", {}),
    "projected": ("LSTM", {"proj_size": 3}),
}
DOUBLE = {"dtype": torch.float64}


def pair(kind, *args, **options):
    """Our module and PyTorch's with the same weights."""
    name, extra = KINDS[kind]
    options = {**extra, **DOUBLE, **options}
    torch.manual_seed(0)
    theirs = getattr(torch_nn, name)(4, 5, *args, **options)
    ours = getattr(nn, name)(4, 5, *args, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def first(state):
    return state[0] if isinstance(state, tuple) else state


def outputs(module, input, state=None):
    """Outputs, last states and all gradients of a module, in a list."""
    module.zero_grad()
    ys, last = module(input, state)
    last = last if isinstance(last, tuple) else (last,)
    data = ys.data if isinstance(ys, PackedSequence) else ys
    (data.square().sum() + sum(s.sin().sum() for s in last)).backward()
    return [data.detach(), *(s.detach() for s in last), *(p.grad for p in module.parameters())]


def same(found, wanted):
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, w, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_pytorchs_initial_weights(kind):
    name, extra = KINDS[kind]
    torch.manual_seed(5)
    theirs = getattr(torch_nn, name)(4, 5, 2, bidirectional=True, **extra).state_dict()
    torch.manual_seed(5)
    ours = getattr(nn, name)(4, 5, 2, bidirectional=True, **extra).state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_crosses_both_ways(kind):
    ours, theirs = pair(kind, 2, bidirectional=True)
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(0.1)
    theirs.load_state_dict(ours.state_dict())
    xs = torch.randn(6, 3, 4, **DOUBLE)
    same(outputs(ours, xs), outputs(theirs, xs))


@pytest.mark.parametrize("shape", [(7, 3, 4), (7, 1, 4), (1, 3, 4), (7, 4), (7, 0, 4)], ids=str)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_pytorchs(kind, bidirectional, batch_first, shape):
    ours, theirs = pair(kind, 2, bidirectional=bidirectional, batch_first=batch_first)
    xs = torch.randn(shape, **DOUBLE)
    xs = xs.transpose(0, 1) if batch_first and xs.dim() == 3 else xs
    same(outputs(ours, xs), outputs(theirs, xs))
    with torch.no_grad():
        state = theirs(xs)[1]
    same(outputs(ours, xs, state), outputs(theirs, xs, state))


@pytest.mark.parametrize("enforce_sorted", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_are_pytorchs(kind, bidirectional, enforce_sorted):
    ours, theirs = pair(kind, 2, bidirectional=bidirectional)
    lengths = [6, 5, 2] if enforce_sorted else [2, 6, 5]
    packed = pack_padded_sequence(
        torch.randn(6, 3, 4, **DOUBLE), torch.tensor(lengths), enforce_sorted=enforce_sorted
    )
    with torch.no_grad():
        state = theirs(packed)[1]
    same(outputs(ours, packed), outputs(theirs, packed))
    same(outputs(ours, packed, state), outputs(theirs, packed, state))
    ys = ours(packed)[0]
    wanted = theirs(packed)[0]
    assert torch.equal(ys.batch_sizes, wanted.batch_sizes)
    for name in ("sorted_indices", "unsorted_indices"):
        a, b = getattr(ys, name), getattr(wanted, name)
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_in_any_layout_are_one_hot_rows(kind, dtype):
    ours, theirs = pair(kind, 1, batch_first=True)
    ids = torch.randint(4, (3, 6))
    hot = torch.nn.functional.one_hot(ids, 4).double()
    wanted = outputs(theirs, hot)
    same(outputs(ours, ids.to(dtype)), wanted)
    same(outputs(ours, ids[0].to(dtype)), outputs(theirs, hot[0]))
    packed = pack_padded_sequence(ids, torch.tensor([6, 4, 3]), batch_first=True)
    hot = pack_padded_sequence(hot, torch.tensor([6, 4, 3]), batch_first=True)
    same(outputs(ours, packed), outputs(theirs, hot))


def test_a_module_says_what_it_is():
    assert repr(nn.GRU(3, 4, num_layers=2)) == "GRU(3, 4, num_layers=2)"
    rnn = nn.RNN(3, 4, carry=Truncated(window=9), memory=Checkpointed(every=5))
    assert "carry=Truncated(window=9), memory=Checkpointed(every=5" in repr(rnn)
    assert isinstance(rnn, torch_nn.RNNBase)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles_run_alike_and_apart(kind):
    ours, _ = pair(kind, 2)
    ours.carry = Randomized(keep=0.5, seed=3)
    xs = torch.randn(9, 2, 4, **DOUBLE)
    copies = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]
    wanted = outputs(ours, xs)
    for other in copies:
        assert other.carry is not ours.carry
        same(outputs(other, xs), wanted)  # its own draws, from where the original stood
        with torch.no_grad():
            other.weight_hh_l0.add_(1)
    assert not torch.equal(outputs(copies[0], xs)[-1], wanted[-1])


def test_gradients_in_eval_mode_are_those_of_training():
    ours, _ = pair("gru", 2)
    xs = torch.randn(6, 3, 4, **DOUBLE)
    same(outputs(ours.eval(), xs), outputs(ours.train(), xs))


def test_dropout_is_off_in_eval_mode_and_follows_torchs_seed():
    ours, theirs = pair("lstm", 3, dropout=0.5)
    xs = torch.randn(6, 3, 4, **DOUBLE)
    same(outputs(ours.eval(), xs), outputs(theirs.eval(), xs))
    ours.train()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(ours(xs)[0])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_dropout_of_everything_leaves_nothing_but_biases():
    ours, theirs = pair("tanh", 2, dropout=1.0)
    xs = torch.randn(6, 3, 4, **DOUBLE)
    torch.testing.assert_close(ours(xs)[0], theirs(xs)[0])


def test_weights_may_be_frozen_and_inputs_need_no_gradient():
    ours, theirs = pair("lstm", 2)
    xs = torch.randn(6, 3, 4, **DOUBLE)
    for module in (ours, theirs):
        module.weight_hh_l0.requires_grad_(False)
    wanted = outputs(theirs, xs)
    for f, w in zip(outputs(ours, xs), wanted, strict=True):
        assert (f is None) == (w is None)
        if w is not None:
            torch.testing.assert_close(f, w)
    for p in ours.parameters():
        p.requires_grad_(False)
    assert not ours(xs)[0].requires_grad
    state = tuple(torch.zeros(2, 3, 5, **DOUBLE, requires_grad=True) for _ in range(2))
    ours(xs, state)[0].sum().backward()
    assert bool((state[0].grad != 0).all())


def tied(module):
    module.weight_hh_l1 = module.weight_hh_l0
    return module


GRAPHS = {
    "tanh": lambda: nn.RNN(5, 5, **DOUBLE),
    "linear": lambda: nn.RNN(5, 5, nonlinearity="linear", **DOUBLE),
    "gru": lambda: nn.GRU(5, 5, **DOUBLE),
    "lstm": lambda: nn.LSTM(5, 5, **DOUBLE),
    "mgu": lambda: nn.Layers("mgu", 5, 5, **DOUBLE),
    "tied": lambda: tied(nn.GRU(5, 5, 2, **DOUBLE)),
    "tied and truncated": lambda: tied(nn.GRU(5, 5, 2, carry=Truncated(4), **DOUBLE)),
    "checkpointed": lambda: nn.LSTM(5, 5, 2, memory=Checkpointed(2), **DOUBLE),
    "sliding": lambda: nn.GRU(5, 5, carry=Sliding(2, 2), **DOUBLE),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_gradient_that_leaves_a_graph_is_the_gradient(name, packed):
    """A module that is called again on its own state; one tensor for both states of an lstm.

    What the first call had made of the weights was found twice, and the linear cell was a tanh.
    """
    torch.manual_seed(0)
    module, found = GRAPHS[name](), []
    for create_graph in (False, True):
        xs = torch.linspace(-2, 2, 90, **DOUBLE).view(6, 3, 5).requires_grad_()
        h = torch.full((module.num_layers, 3, 5), 0.3, **DOUBLE, requires_grad=True)
        input = pack_padded_sequence(xs, torch.tensor([6, 4, 1])) if packed else xs
        last = module(input, (h, h) if name in ("lstm", "checkpointed") else h)[1]
        ys = module(input, last)[0]
        wanted = [xs, h, *module.parameters()]
        loss = (ys.data if packed else ys).square().sum()
        found.append(torch.autograd.grad(loss, wanted, create_graph=create_graph))
    same(*found[::-1])


def everything_batched(module, xs, pulls):
    ys, last = module(xs)
    wanted = [xs, *module.parameters()]
    outs = [ys, first(last)]
    return torch.autograd.grad(outs, wanted, pulls, is_grads_batched=True)


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_many_pulls_go_back_at_once(kind, options):
    ours, theirs = pair(kind, **options)
    xs = torch.randn(6, 3, 4, **DOUBLE, requires_grad=True)
    with torch.no_grad():
        ys, last = theirs(xs)
    pulls = [torch.randn(7, *t.shape, **DOUBLE) for t in (ys, first(last))]
    found = everything_batched(ours, xs, pulls)
    same(found, everything_batched(theirs, xs, pulls))
    assert not any(g.requires_grad for g in found)


@pytest.mark.parametrize("name", ["linear", "mgu", "tied and truncated"])
def test_many_pulls_go_back_at_once_through_what_torch_does_not_have(name):
    torch.manual_seed(0)
    module, xs = GRAPHS[name](), torch.randn(6, 3, 5, **DOUBLE, requires_grad=True)
    ys, _ = module(xs)
    pulls = torch.randn(3, *ys.shape, **DOUBLE)
    wanted = [xs, *module.parameters()]
    each = [torch.autograd.grad(ys, wanted, pull, retain_graph=True) for pull in pulls]
    found = torch.autograd.grad(ys, wanted, pulls, is_grads_batched=True)
    same(found, [torch.stack(gs) for gs in zip(*each, strict=True)])


def test_a_vectorised_jacobian_is_torchs():
    ours, theirs = pair("gru")
    xs = torch.randn(3, 2, 4, **DOUBLE)
    jacobians = [
        torch.autograd.functional.jacobian(lambda x, m=m: m(x)[0], xs, vectorize=True)
        for m in (ours, theirs)
    ]
    same(*jacobians)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("kind", KINDS)
def test_tangents_flow_forward_as_through_torchs(kind):
    ours, theirs = pair(kind)
    xs, tangent = torch.randn(2, 6, 3, 4, **DOUBLE)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(xs, tangent)
        found, wanted = [torch.autograd.forward_ad.unpack_dual(m(dual)[0]) for m in (ours, theirs)]
    same(found, wanted)


def test_hooks_see_the_outputs_and_the_gradients():
    ours, _ = pair("gru")
    seen = []
    ours.register_forward_hook(lambda m, args, out: seen.append(out[0].shape))
    ours.register_full_backward_hook(lambda m, into, out: seen.append(into[0].shape))
    xs = torch.randn(6, 3, 4, **DOUBLE, requires_grad=True)
    ours(xs)[0].sum().backward()
    assert seen == [torch.Size([6, 3, 5]), torch.Size([6, 3, 4])]


class Halved(torch_nn.Module):
    def forward(self, w):
        return w / 2


def test_parametrized_weights_get_their_gradients():
    ours, theirs = pair("tanh")
    with torch.no_grad():
        theirs.weight_hh_l0.div_(2)
    parametrize.register_parametrization(ours, "weight_hh_l0", Halved())
    xs = torch.randn(6, 3, 4, **DOUBLE)
    ours(xs)[0].square().sum().backward()
    theirs(xs)[0].square().sum().backward()
    inner = ours.parametrizations.weight_hh_l0.original
    torch.testing.assert_close(inner.grad, theirs.weight_hh_l0.grad / 2)
    same([ours(xs)[0]], [theirs(xs)[0]])


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_parametrized_modules_are_copies_like_all_others(kind):
    ours, _ = pair(kind, 2)
    ours.carry = Randomized(keep=0.5, seed=3)
    parametrize.register_parametrization(ours, "weight_hh_l0", Halved())
    xs = torch.randn(9, 2, 4, **DOUBLE)
    ours(xs)
    ours.to("cpu")  # torch keeps what it then computes the weights to be
    apart = copy.deepcopy(ours)
    assert apart._how != ours._how, "draws of its own in compiled code, too"
    assert compiled._BY_NUMBER[apart._how].carry is apart.carry is not ours.carry
    same(outputs(apart, xs), outputs(ours, xs))
    with torch.no_grad():
        apart.parametrizations.weight_hh_l0.original.add_(1)
    assert not torch.equal(apart(xs)[0], ours(xs)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_computes_in_its_own_dtype(kind):
    ours, _ = pair(kind, 2, dtype=torch.float32)
    xs = torch.randn(20, 3, 4)
    exact = outputs(ours, xs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ys, last = ours(xs)
        cast = outputs(ours, xs)
    assert ys.dtype == torch.bfloat16
    assert first(last).dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in ours.parameters())
    for f, w in zip(cast, exact, strict=True):
        assert (f.float() - w).norm() <= 0.05 * w.norm()


def test_changing_an_output_in_place_is_caught():
    ours, _ = pair("tanh")
    ys, _ = ours(torch.randn(6, 3, 4, **DOUBLE))
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        ys.mul_(2)


def test_changing_a_weight_in_place_before_backward_is_caught():
    ours, _ = pair("tanh")
    ys, _ = ours(torch.randn(6, 3, 4, **DOUBLE))
    with torch.no_grad():
        ours.weight_hh_l0.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ys.sum().backward()


def test_nothing_is_kept_where_no_gradient_is_wanted():
    ours, _ = pair("lstm")
    with torch.no_grad():
        ys, _ = ours(torch.randn(6, 3, 4, **DOUBLE))
    assert ys.grad_fn is None


@pytest.fixture
def compiler():
    """A compiler that has seen nothing yet."""
    torch._dynamo.reset()
    return torch.compile


COMPILED = {
    "elman": lambda: nn.RNN(4, 5, **DOUBLE),
    "both ways": lambda: nn.LSTM(4, 5, 2, proj_size=3, bidirectional=True, **DOUBLE),
    "carry and memory": lambda: nn.GRU(
        4, 5, 2, carry=Randomized(0.6, seed=2), memory=Checkpointed(every=3), **DOUBLE
    ),
    "sliding": lambda: nn.RNN(4, 5, 2, carry=Sliding(every=2, steps=3), **DOUBLE),
}


@pytest.mark.parametrize("case", ["both ways", "carry and memory"])
def test_torch_compile_takes_a_module_whole(case, compiler):
    eager = COMPILED[case]()
    whole = compiler(copy.deepcopy(eager), fullgraph=True, backend="aot_eager")
    for steps in (7, 9):
        xs = torch.randn(steps, 3, 4, **DOUBLE)
        same(outputs(whole, xs), outputs(eager, xs))
    with torch.no_grad():
        same([whole(xs)[0]], [eager(xs)[0]])


@pytest.mark.parametrize("case", ["elman", "both ways"])
def test_compiled_code_takes_sequences_of_any_length(case, compiler):
    """It was compiled for each: eight times, and then given up."""
    eager, graphs = COMPILED[case](), CompileCounterWithBackend("aot_eager")
    whole = compiler(copy.deepcopy(eager), fullgraph=True, backend=graphs)
    for steps in range(4, 14):
        xs = torch.randn(steps, 3, 4, **DOUBLE)
        same(outputs(whole, xs), outputs(eager, xs))
    assert graphs.frame_count == 2  # for the first length, and for all others


@pytest.mark.parametrize("memory", [Stored(), Checkpointed(budget=10_000)], ids=repr)
def test_compiled_code_takes_batches_of_any_size(memory, compiler):
    """What a step takes was asked of tensors that had no size yet, even where all is kept."""
    eager = COMPILED["both ways"]()
    eager.memory = memory
    whole = compiler(copy.deepcopy(eager), fullgraph=True, dynamic=True, backend="eager")
    for rows in (3, 4):
        xs = torch.randn(5, rows, 4, **DOUBLE)
        same(outputs(whole, xs), outputs(eager, xs))


def test_a_changed_carry_reaches_compiled_code(compiler):
    module = nn.RNN(4, 5, **DOUBLE)
    whole = compiler(module, fullgraph=True, backend="aot_eager")
    xs = torch.randn(7, 3, 4, **DOUBLE)
    outputs(whole, xs)
    module.carry = Truncated(window=2)
    found = outputs(whole, xs)
    same(found, outputs(module, xs))
    module.carry = Full()
    assert not torch.equal(found[2], outputs(module, xs)[2])


def test_copies_of_a_module_share_compiled_code_but_not_their_draws():
    plain, drawn = nn.RNN(3, 4), nn.RNN(3, 4, carry=Randomized(0.5))
    assert copy.deepcopy(plain)._how == plain._how
    assert copy.deepcopy(drawn)._how != drawn._how


def test_copies_that_are_gone_leave_nothing_behind():
    drawn = nn.RNN(3, 4, carry=Randomized(0.5))
    gc.collect()  # what other tests left behind
    before = len(compiled._BY_NUMBER), len(compiled._BY_KEY), len(compiled._COMPILED)
    for _ in range(10):
        copy.deepcopy(drawn)(torch.zeros(2, 1, 3))[0].sum().backward()
        drawn.carry = Given((1.0, 0.5))
        drawn.carry = Randomized(0.5)
    gc.collect()
    assert (len(compiled._BY_NUMBER), len(compiled._BY_KEY), len(compiled._COMPILED)) == before


def test_compiled_code_outlives_the_module(compiler):
    module = nn.RNN(3, 4, carry=Randomized(0.5, seed=1), **DOUBLE)
    eager = copy.deepcopy(module)
    xs = torch.randn(9, 2, 3, **DOUBLE)
    weights = [*module.parameters()]
    loss = compiler(module, fullgraph=True, backend="aot_eager")(xs)[0].sin().sum()
    del module
    gc.collect()
    loss.backward()
    eager(xs)[0].sin().sum().backward()
    for found, wanted in zip(weights, eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own, about TorchScript
@pytest.mark.parametrize("make", COMPILED.values(), ids=COMPILED)
def test_the_default_compiler_gives_the_same_numbers(make, compiler):
    eager = make()
    whole = compiler(copy.deepcopy(eager), fullgraph=True)
    for xs in (torch.randn(7, 3, 4, **DOUBLE), torch.randint(4, (7, 3))):
        same(outputs(whole, xs), outputs(eager, xs))


@pytest.mark.parametrize("memory", [Stored(), Checkpointed(every=3)], ids=repr)
def test_the_operator_keeps_pytorchs_rules_for_operators(memory):
    module = nn.LSTM(4, 5, 2, memory=memory, **DOUBLE)
    xs = torch.randn(7, 3, 4, **DOUBLE, requires_grad=True)
    x = module._inputs(*module._time_first(xs, None))
    torch.library.opcheck(
        compiled.recurrence, (*x, *module._plain(), module._how, True), raise_exception=True
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_gives_the_cpus_numbers(kind, bidirectional, kernel, monkeypatch):
    ours, _ = pair(kind, 2, bidirectional=bidirectional)
    ids, lengths = torch.randint(4, (6, 3)), torch.tensor([6, 4, 3])
    xs = torch.randn(6, 3, 4, **DOUBLE)
    carries = [Full(), Truncated(2), Sliding(2, 3), Randomized(0.5, seed=1, per_row=True)]
    for carry in carries:
        for memory in (Stored(), Checkpointed(every=2)):
            ours.memory = memory
            for given in (xs, ids, pack_padded_sequence(xs, lengths)):
                monkeypatch.setenv("ELMAN_KERNELS", "reference")
                ours.carry = copy.deepcopy(carry)
                wanted = outputs(ours.cpu(), given)
                monkeypatch.setenv("ELMAN_KERNELS", kernel)
                ours.carry = copy.deepcopy(carry)
                found = [t.cpu() for t in outputs(ours.cuda(), given.to("cuda"))]
                same(found, [w.cpu() for w in wanted])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_autocast_and_dropout_on_a_gpu_are_repeatable():
    lstm = nn.LSTM(4, 5, 3, dropout=0.5, memory=Checkpointed(every=2)).cuda()
    xs = torch.randn(7, 3, 4, device="cuda")
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        with torch.autocast("cuda", dtype=torch.float16):
            ys, _ = lstm(xs)
        assert ys.dtype == torch.float16
        found.append(torch.autograd.grad(ys.float().square().sum(), list(lstm.parameters())))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_to_explain_draws_no_chance():
    rnn, xs = nn.GRU(3, 4, num_layers=2, dropout=0.5), torch.randn(5, 2, 3)
    torch.manual_seed(3)
    wanted = rnn(xs)[0]
    torch.manual_seed(3)
    kernels.explain(rnn, xs)
    torch.testing.assert_close(rnn(xs)[0], wanted, rtol=0, atol=0)


def test_explain_says_which_kernel_runs_and_why_not_another(monkeypatch):
    rnn, xs = nn.RNN(3, 4), torch.zeros(5, 2, 3)
    said = kernels.explain(rnn, xs)
    assert said.runs in choice.FASTEST_FIRST
    assert str(said).endswith(f"{said.runs}: runs")
    assert set(said.reasons) == set(choice.FASTEST_FIRST) - set(_from(said.runs))
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    assert kernels.explain(rnn, torch.zeros(5, 2, dtype=torch.long)).runs == "reference"
    monkeypatch.setenv("ELMAN_KERNELS", "abacus")
    with pytest.raises(UserError, match="ELMAN_KERNELS=abacus names no kernel"):
        rnn(xs)
    with pytest.raises(UserError, match="explain\\(\\) was given a Linear"):
        kernels.explain(torch_nn.Linear(3, 4), xs)


def _from(name):
    return choice.FASTEST_FIRST[choice.FASTEST_FIRST.index(name) :]


def test_a_kernel_asked_for_by_name_is_never_replaced(monkeypatch):
    class Busy:
        name = "cpu"

        def refuses(self, piece):
            return "it is busy"

    monkeypatch.setenv("ELMAN_KERNELS", "cpu")
    monkeypatch.setattr(choice, "_load", lambda name: Busy())
    with pytest.raises(
        UserError, match="ELMAN_KERNELS=cpu: this kernel cannot run here, it is busy"
    ):
        nn.RNN(3, 4)(torch.zeros(5, 2, 3))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: nn.RNN(3, 4)(torch.zeros(5, 2, 7)),
            r"input has shape \(5, 2, 7\); its last size must be 3",
        ),
        (lambda: nn.RNN(3, 4)(torch.zeros(5)), r"input has shape \(5,\); RNN reads \(time, 3\) or"),
        (
            lambda: nn.RNN(3, 4)(torch.zeros(5, 2, 2, 3)),
            r"RNN reads \(time, 3\) or \(time, batch, 3\)",
        ),
        (lambda: nn.GRU(3, 4)(torch.zeros(5, 2, 3).double()), "input has dtype torch.float64"),
        (lambda: nn.GRU(3, 4)(torch.zeros(5, 2, 3).long()), r"ids of shape \(time,\) or"),
        (lambda: nn.GRU(3, 4)(torch.zeros(5, 2, 3).bool()), "input has dtype torch.bool"),
        (lambda: nn.GRU(3, 4)(torch.tensor([[0, 3]])), "ids from 0 to 3; .* between 0 and .* = 2"),
        (lambda: nn.GRU(3, 4)(torch.tensor([[-1, 1]])), "ids from -1 to 1"),
        (lambda: nn.LSTM(3, 4)(torch.zeros(0, 2, 3)), "no time steps"),
        (
            lambda: nn.RNN(3, 4)(torch.zeros(5, 2, 3), torch.zeros(1, 3, 4)),
            r"h0 has shape \(1, 3, 4\); it must be \(1, 2, 4\)",
        ),
        (
            lambda: nn.RNN(3, 4)(torch.zeros(5, 3), torch.zeros(1, 5)),
            r"h0 has shape \(1, 5\); it must be \(1, 4\)",
        ),
        (
            lambda: nn.RNN(3, 4)(torch.zeros(5, 2, 3), torch.zeros(1, 2, 4).double()),
            "h0 has dtype torch.float64",
        ),
        (
            lambda: nn.LSTM(3, 4)(
                torch.zeros(5, 2, 3), (torch.zeros(1, 2, 4), torch.zeros(1, 2, 5))
            ),
            "c0 has shape",
        ),
        (
            lambda: nn.LSTM(3, 4)(torch.zeros(5, 2, 3), (torch.zeros(1, 2, 4),)),
            r"state of LSTM must be a pair of tensors \(h0, c0\); leave it out to begin at zero",
        ),
        (
            lambda: nn.GRU(3, 4)(torch.zeros(5, 2, 3), (torch.zeros(1, 2, 4),) * 2),
            "state of GRU must be one tensor h0; leave it out to begin at zero",
        ),
        (  # and nothing of torch.nn.Layers, which there is not
            lambda: nn.Layers("lstm", 3, 4)(torch.zeros(5, 2, 3), torch.zeros(1, 2, 4)),
            r"state of Layers must be a pair of tensors \(h0, c0\); .* begin at zero$",
        ),
        (
            lambda: nn.RNN(3, 4, nonlinearity="sine"),
            "nonlinearity='sine' is unknown; choose tanh, relu or linear",
        ),
        (lambda: nn.RNN(3, 4, carry=35), "carry must be a Carry, got 35"),
        (lambda: nn.RNN(3, 4, memory="none"), "memory must be a Memory, got 'none'"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name_and_rule(call, said):
    with pytest.raises(UserError, match=said):
        call()


@pytest.mark.parametrize("cell", ["gru", "mgu", "layer_norm_lstm"])
@pytest.mark.parametrize("ids", [[[0, 3]], [[-1, 1]]])
def test_every_kernel_refuses_ids_that_name_no_column(cell, ids):
    layers, said = nn.Layers(cell, 3, 4), f"ids from {ids[0][0]} to {ids[0][1]}; .* = 2; ids of a"
    for kernel in ("auto", "reference"):
        with kernels.using(kernel), pytest.raises(UserError, match=said):
            layers(torch.tensor(ids))


@pytest.mark.parametrize(
    "call",
    [
        lambda: nn.RNN(3, 4)(torch.zeros(5, 2, 7)),
        lambda: nn.RNN(3, 4)(torch.zeros(0, 2, 3)),
        lambda: nn.RNN(3, 4)(torch.zeros(5, 2, 3, device="meta")),
        lambda: nn.GRU(3, 4)(torch.zeros(5, 2, 3), torch.zeros(1, 3, 4)),
        lambda: nn.GRU(3, 4)(torch.zeros(5, 2, 3), torch.zeros(1, 2, 4).double()),
        lambda: nn.GRU(3, 4)(torch.zeros(5, 2, 3), torch.zeros(1, 2, 4, device="meta")),
        lambda: nn.LSTM(3, 4)(pack_sequence([torch.zeros(5, 3).double()])),
        lambda: nn.LSTM(3, 4)(torch.zeros(5, 2, 3), (torch.zeros(1, 2, 4),) * 3),
    ],
)
def test_what_torch_calls_a_runtime_error_is_one(call):
    with pytest.raises(RuntimeError):
        call()


@pytest.mark.parametrize("grad", [False, True])
def test_one_tensor_is_not_both_states(grad):
    """Its halves were gone before native code looked at them."""
    lstm, xs, both = nn.LSTM(3, 4), torch.zeros(5, 2, 3), torch.zeros(2, 1, 2, 4)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            lstm(xs, tuple(both))
            with pytest.raises(UserError, match="must be a pair of tensors"):
                lstm(xs, both)


def test_an_lstm_answers_what_torchs_answers():
    ours, theirs = pair("projected", bidirectional=True)
    xs = torch.zeros(5, 2, 4, **DOUBLE)
    state = [torch.randn(2, 2, n, **DOUBLE) for n in (3, 5)]
    for lstm in (ours, theirs):
        assert lstm.get_expected_cell_size(xs, None) == (2, 2, 5)
        lstm.check_forward_args(xs, state, None)
        with pytest.raises(RuntimeError, match=r"Expected hidden\[0\] size"):
            lstm.check_forward_args(xs, state[::-1], None)
    order = torch.tensor([1, 0])
    same(ours.permute_hidden(state, order), theirs.permute_hidden(state, order))


PASSAGES = {
    "plain": (lambda: torch.randn(6, 3, 4), {}),
    "deep": (lambda: torch.randn(6, 3, 4), {"num_layers": 2, "bidirectional": True}),
    "dropout": (lambda: torch.randn(6, 3, 4), {"num_layers": 2, "dropout": 0.3}),
    "zoneout": (lambda: torch.randn(6, 3, 4), {"zoneout": 0.2}),
    "packed": (lambda: pack_padded_sequence(torch.randn(6, 3, 4), torch.tensor([6, 4, 1])), {}),
    "ids": (lambda: torch.randint(4, (6, 3)), {}),
    "truncated": (lambda: torch.randn(6, 3, 4), {"carry": Truncated(3)}),
    "given": (lambda: torch.randn(6, 3, 4), {"carry": Given((1.0, 0.5, 0.0, 2.0, 1.0, 1.0))}),
    "sliding": (lambda: torch.randn(6, 3, 4), {"carry": Sliding(2, 2)}),
    "checkpointed": (lambda: torch.randn(6, 3, 4), {"memory": Checkpointed(2)}),
}


@pytest.mark.parametrize("passage", PASSAGES)
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@pytest.mark.usefixtures("hastily")
def test_a_call_lies_where_its_input_lies_whatever_torchs_defaults(kind, passage, another_default):
    make, options = PASSAGES[passage]
    torch.manual_seed(0)
    x, module = make(), getattr(nn, kind)(4, 5, **options)
    copies = [copy.deepcopy(module) for _ in range(2)]

    def called(module):
        torch.manual_seed(1)
        ys, _ = module(x)
        ys = ys.data if isinstance(ys, PackedSequence) else ys
        return ys, *torch.autograd.grad(ys.square().sum(), list(module.parameters()))

    wanted = [called(copies[0]) for _ in range(2)]
    another_default()
    found = [called(copies[1]) for _ in range(2)]  # the second call of a shape is another way
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_compiler_that_cannot_read_it_is_told_what_to_do():
    net = torch_nn.Sequential(nn.GRU(3, 4))
    with pytest.raises(UserError, match=r"script cannot compile elman.nn's GRU; .*to_torch\(\)"):
        torch.jit.script(net)
    assert type(net[0]) is nn.GRU
