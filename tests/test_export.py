"""What torch writes down of our modules (ONNX, torch.export, jit.trace) computes what they do."""

import concurrent.futures
import contextlib
import copy
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from elman import LanguageModel, cells, nn
from elman.errors import UserError
from elman.gradients import Checkpointed, Full, Truncated
from elman.language_model.loss import linear_cross_entropy

# Warnings of torch's own about its own exporters; a TracerWarning would be ours.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Exporting a model to ONNX:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*oneDNN.*:UserWarning"),
]

STEPS, BATCH, INPUT, HIDDEN = 5, 3, 4, 6

MODULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "tanh": (nn.RNN, {}),
    "relu, two layers": (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
    "linear": (nn.RNN, {"nonlinearity": "linear", "num_layers": 2, "bidirectional": True}),
    "gru without biases": (nn.GRU, {"bias": False}),
    "gru both ways": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "lstm": (nn.LSTM, {}),
    "lstm, batch first": (nn.LSTM, {"batch_first": True, "num_layers": 2}),
    "lstm, projected": (nn.LSTM, {"proj_size": 2, "num_layers": 2, "bidirectional": True}),
    "with a carry and a memory": (
        nn.GRU,
        {"carry": Truncated(2), "memory": Checkpointed(every=2)},
    ),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    build, options = MODULES[name]
    return build(INPUT, HIDDEN, **options).eval()


def an_input(module: Any, batch: int = BATCH, steps: int = STEPS) -> Tensor:
    return torch.randn(*((batch, steps) if module.batch_first else (steps, batch)), INPUT)


def a_state(module: Any, batch: int = BATCH) -> Any:
    _, state = module(an_input(module, batch, 1))
    return pytree.tree_map(torch.randn_like, state)


def outputs(module: Any, arguments: tuple[Any, ...]) -> list[Tensor]:
    with torch.no_grad():
        return pytree.tree_leaves(module(*arguments))


def agree(got: list[Any], want: list[Tensor]) -> None:
    """To float32's rounding over a few steps of a small network; outputs are of size 1."""
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert other.std() > 1e-3, "constants prove nothing"
        torch.testing.assert_close(torch.as_tensor(np.array(one)), other, rtol=1e-5, atol=2e-6)


class InOnnx:
    """A module as onnxruntime runs it."""

    def __init__(self, module: Any, arguments: tuple[Any, ...], path: Path, **options: Any) -> None:
        onnxruntime = pytest.importorskip(
            "onnxruntime", reason="onnxruntime runs what was exported: pip install 'elman[oracles]'"
        )
        if options["dynamo"]:
            pytest.importorskip(
                "onnxscript", reason="torch's newer exporter writes with onnxscript"
            )
        else:
            pytest.importorskip("onnx", reason="torch's older exporter writes with onnx")
        file = str(path / "module.onnx")
        torch.onnx.export(module, arguments, file, verbose=False, **options)
        self.session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])

    def __call__(self, *arguments: Any) -> list[Any]:
        given = pytree.tree_leaves(arguments)
        names = [i.name for i in self.session.get_inputs()]
        return self.session.run(None, {n: t.numpy() for n, t in zip(names, given, strict=True)})


@pytest.mark.parametrize("with_state", [False, True], ids=["from nothing", "from a state"])
@pytest.mark.parametrize("name", MODULES)
def test_onnx_from_a_trace(name, with_state, tmp_path):
    module = made(name)
    x = an_input(module)
    arguments = (x, a_state(module)) if with_state else (x,)
    session = InOnnx(module, arguments, tmp_path, dynamo=False)
    agree(session(*arguments), outputs(module, arguments))
    others = pytree.tree_map(torch.randn_like, arguments)
    agree(session(*others), outputs(module, others))


@pytest.mark.parametrize("name", ["tanh", "gru both ways", "lstm"])
def test_onnx_of_any_batch_and_any_time(name, tmp_path):
    module = made(name)
    axes = {"input_names": ["x"], "dynamic_axes": {"x": {0: "time", 1: "batch"}}}
    session = InOnnx(module, (an_input(module),), tmp_path, dynamo=False, **axes)
    other = (an_input(module, batch=2, steps=9),)
    agree(session(*other), outputs(module, other))


def test_onnx_from_an_export_of_any_batch_and_any_time_where_torch_can(tmp_path):
    """The newer exporter loses track of the time of a batch that was turned round, silently.

    In a process of its own: at its second export there the newer exporter takes the time of the
    example for that of every input, of `torch.nn.LSTM` just so.
    """
    for name in ("onnxruntime", "onnxscript"):
        pytest.importorskip(name, reason=f"{name} is not here: pip install 'elman[oracles]'")
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as other:
        other.submit(_export_of_any_batch_and_any_time, tmp_path).result()


def _export_of_any_batch_and_any_time(path: Path) -> None:
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("time")}
    module = made("lstm, batch first")
    session = InOnnx(module, (an_input(module),), path, dynamo=True, dynamic_shapes=(axes,))
    other = (an_input(module, batch=2, steps=9),)
    agree(session(*other), outputs(module, other))


STEP_BY_STEP = {
    "a cell": lambda: nn.Layers("layer_norm_lstm", INPUT, HIDDEN),
    "a cell of one's own": lambda: nn.Recurrent(torch.nn.GRUCell(INPUT, HIDDEN)),
}


@pytest.mark.parametrize("made", STEP_BY_STEP.values(), ids=STEP_BY_STEP)
def test_onnx_of_what_is_written_down_step_by_step_takes_any_batch(made, tmp_path):
    torch.manual_seed(0)
    module = made().eval()
    axes = {"input_names": ["x"], "dynamic_axes": {"x": {1: "batch"}}}
    x = torch.randn(STEPS, BATCH, INPUT)
    session = InOnnx(module, (x,), tmp_path, dynamo=False, **axes)
    trace = torch.jit.trace(module, (x,))
    for rows in (1, BATCH + 1):
        other = (torch.randn(STEPS, rows, INPUT),)
        agree(session(*other), outputs(module, other))
        agree(outputs(trace, other), outputs(module, other))


@pytest.mark.parametrize("name", ["linear", "lstm, projected"])
def test_onnx_of_what_is_written_down_step_by_step_refuses_another_length(name, tmp_path):
    module = made(name)
    axes = {"input_names": ["x"], "dynamic_axes": {"x": {0: "time"}}}
    session = InOnnx(module, (an_input(module),), tmp_path, dynamo=False, **axes)
    for steps in (STEPS - 1, STEPS + 1):
        with pytest.raises(Exception, match="split"):
            session(an_input(module, steps=steps))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [
        "tanh",
        "lstm, batch first",
        *(pytest.param(n, marks=SLOW) for n in ("linear", "gru both ways", "lstm, projected")),
    ],
)
def test_onnx_from_an_export(name, tmp_path):
    """Seconds each, so a few: with a state where the test above has none, and the reverse."""
    module = made(name)
    x = an_input(module)
    arguments = (x, a_state(module)) if "lstm" in name else (x,)
    session = InOnnx(module, arguments, tmp_path, dynamo=True)
    others = pytree.tree_map(torch.randn_like, arguments)
    agree(session(*others), outputs(module, others))


def test_onnx_of_rows_of_different_lengths(tmp_path):
    class Padded(torch.nn.Module):
        def __init__(self, rnn: torch.nn.Module) -> None:
            super().__init__()
            self.rnn = rnn

        def forward(self, x: Tensor, lengths: Tensor) -> Any:
            ys, h = self.rnn(pack_padded_sequence(x, lengths))
            return pad_packed_sequence(ys)[0], h

    model = Padded(made("gru both ways")).eval()
    session = InOnnx(model, (torch.randn(5, 3, INPUT), torch.tensor([5, 4, 2])), tmp_path,
                     dynamo=False)  # fmt: skip
    other = (torch.randn(5, 3, INPUT), torch.tensor([5, 3, 3]))
    agree(session(*other), outputs(model, other))
    with pytest.raises(UserError, match=r"packed sequence.*linear"):
        torch.jit.trace(Padded(made("linear")), other, check_trace=False)


@pytest.mark.parametrize("cell", ["elman", "linear", "gru", "lstm", "mlp"])
@pytest.mark.parametrize("embedding_size", [None, 5])
def test_onnx_of_a_language_model(cell, embedding_size, tmp_path):
    model = LanguageModel(20, cell=cell, hidden_size=HIDDEN, embedding_size=embedding_size).eval()
    ids, others = torch.randint(0, 20, (2, 2, 7))
    session = InOnnx(model, (ids,), tmp_path, dynamo=False)
    logits, *state = session(others)
    want, *want_state = outputs(model, (others,))
    agree([logits], [want])
    for one, other in zip(state, want_state, strict=True):  # an mlp's state is ids
        torch.testing.assert_close(torch.from_numpy(one), other, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("cell", ["gru", "mlp"])
def test_onnx_of_a_language_model_takes_texts_of_any_length(cell, tmp_path):
    model = LanguageModel(20, cell=cell, hidden_size=HIDDEN).eval()
    axes = {"input_names": ["x"], "dynamic_axes": {"x": {0: "batch", 1: "time"}}}
    session = InOnnx(model, (torch.randint(0, 20, (2, 7)),), tmp_path, dynamo=False, **axes)
    for shape in ((1, 1), (3, 11)):
        other = torch.randint(0, 20, shape)
        agree(session(other)[:1], outputs(model, (other,))[:1])


def test_onnx_of_a_language_model_from_an_export(tmp_path):
    model = LanguageModel(20, cell="lstm", hidden_size=HIDDEN, embedding_size=5).eval()
    ids, others = torch.randint(0, 20, (2, 2, 7))
    session = InOnnx(model, (ids,), tmp_path, dynamo=True)
    agree(session(others), outputs(model, (others,)))


@pytest.mark.parametrize("name", MODULES)
def test_torch_export(name):
    module = made(name)
    x = an_input(module)
    exported = torch.export.export(module, (x,))
    assert not [node for node in exported.graph.nodes if "elman" in str(node.target)]
    other = (an_input(module),)
    agree(outputs(exported.module(), other), outputs(module, other))


def test_torch_export_by_reading_the_source():
    module = made("lstm, batch first")
    arguments = (an_input(module), a_state(module))
    exported = torch.export.export(module, arguments, strict=True)
    others = pytree.tree_map(torch.randn_like, arguments)
    agree(outputs(exported.module(), others), outputs(module, others))


def test_torch_export_of_a_language_model():
    model = LanguageModel(20, cell="gru", hidden_size=HIDDEN, embedding_size=5).eval()
    ids, others = torch.randint(0, 20, (2, 2, 7))
    exported = torch.export.export(model, (ids,))
    agree(outputs(exported.module(), (others,)), outputs(model, (others,)))


@pytest.mark.parametrize("name", MODULES)
def test_jit_trace(name):
    module = made(name)
    trace = torch.jit.trace(module, (an_input(module),))
    other = (an_input(module),)
    agree(outputs(trace, other), outputs(module, other))
    longer = (an_input(module, batch=2, steps=9),)
    if name == "linear":  # written down step by step
        with pytest.raises(RuntimeError, match="Expected 5 elements"):
            trace(*longer)
    else:
        agree(outputs(trace, longer), outputs(module, longer))


def test_a_trace_reads_ids_and_unbatched_inputs():
    module = made("lstm")
    ids, others = torch.randint(0, INPUT, (2, STEPS, BATCH))
    trace = torch.jit.trace(module, (ids,))
    agree(outputs(trace, (others,)), outputs(module, (others,)))
    x = torch.randn(STEPS, INPUT)
    trace = torch.jit.trace(module, (torch.randn(STEPS, INPUT),))
    agree(outputs(trace, (x,)), outputs(module, (x,)))


def test_a_trace_is_trained_with_the_modules_own_gradient():
    module = made("gru both ways").double()
    x, other = torch.randn(2, STEPS, BATCH, INPUT, dtype=torch.float64)
    trace = torch.jit.trace(module, (x,))
    params = list(module.parameters())
    got = torch.autograd.grad(trace(other)[0].sin().sum(), params)
    want = torch.autograd.grad(module(other)[0].sin().sum(), params)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_what_would_train_with_another_gradient_is_refused():
    module = nn.GRU(INPUT, HIDDEN, carry=Truncated(2))
    x = torch.randn(STEPS, BATCH, INPUT)
    with pytest.raises(UserError, match="Truncated"):
        torch.jit.trace(module, (x,))
    module.carry = Full()
    torch.jit.trace(module, (x,))


def test_a_cell_of_ones_own_is_written_down_step_by_step():
    module = nn.Recurrent(torch.nn.LSTMCell(INPUT, HIDDEN), carry=Truncated(2))
    x, other = torch.randn(2, STEPS, BATCH, INPUT)
    with pytest.raises(UserError, match="Truncated"):
        torch.jit.trace(module, (x,))
    module.eval()
    for copied in (torch.jit.trace(module, (x,)), torch.export.export(module, (x,)).module()):
        agree(outputs(copied, (other,)), outputs(module, (other,)))


# ------------------------------------------------------------------------- modes, classes, graphs

TORCHS = ["tanh", "relu, two layers", "gru both ways", "lstm, batch first", "lstm, projected"]


@pytest.mark.parametrize("name", TORCHS)
def test_a_graph_of_operations_reads_its_input(name):
    """`make_fx` kept the example's results as constants."""
    module = made(name)
    graph = make_fx(lambda x: module(x)[0])(an_input(module))
    other = an_input(module)
    agree([graph(other).detach()], outputs(module, (other,))[:1])


class Tagger(torch.nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.rnn = module

    def forward(self, x: Tensor, hx: Any = None) -> Any:
        ys, last = self.rnn(x) if hx is None else self.rnn(x, hx)
        return ys.sin(), last


@pytest.mark.parametrize("with_state", [False, True], ids=["from nothing", "from a state"])
@pytest.mark.parametrize("name", MODULES)
def test_a_graph_of_modules_keeps_ours_whole(name, with_state):
    """As torch's own: `torch.fx.symbolic_trace` does not look into them."""
    tagger = Tagger(made(name))
    arguments = (an_input(tagger.rnn), *([a_state(tagger.rnn)] if with_state else []))
    graph = torch.fx.symbolic_trace(tagger, None if with_state else {"hx": None})
    called = [node.target for node in graph.graph.nodes if node.op == "call_module"]
    assert called == ["rnn"]
    agree(outputs(graph, arguments), outputs(tagger, arguments))


@pytest.mark.parametrize("name", TORCHS)
def test_a_mode_counts_the_operations_of_torchs_module(name):
    module, counts = made(name), []
    for each in (module, module.to_torch()):
        with FlopCounterMode(display=False) as flops:
            each(an_input(module))[0].sum().backward()
        counts.append(flops.get_total_flops())
    assert counts[0] == counts[1]
    assert counts[0] > 0 or module.mode == "LSTM"  # whose operator torch does not count


@pytest.mark.parametrize("name", TORCHS)
def test_fake_tensors_have_the_shapes_of_real_ones(name):
    module = made(name)
    shapes = [t.shape for t in outputs(module, (an_input(module),))]
    with FakeTensorMode():
        fake = made(name)
        ys, *last = pytree.tree_leaves(fake(an_input(fake)))
        ys.sum().backward()
    assert [t.shape for t in (ys, *last)] == shapes
    assert fake.weight_hh_l0.grad.shape == module.weight_hh_l0.shape


def test_a_carry_is_not_lost_under_a_mode():
    module = nn.GRU(INPUT, HIDDEN, carry=Truncated(2))
    x, found = an_input(module), []
    for mode in (contextlib.nullcontext(), FlopCounterMode(display=False)):
        with mode:
            found.append(torch.autograd.grad(module(x)[0].sum(), module.weight_hh_l0)[0])
    torch.testing.assert_close(*found, rtol=0, atol=0)


class Tagged(torch.Tensor):
    """A tensor of a class of its own."""


@pytest.mark.parametrize("name", TORCHS)
def test_tensors_of_another_class_come_out_as_they_go_in(name):
    module = made(name)
    x = an_input(module)
    ys = module(x.as_subclass(Tagged))[0]
    assert type(ys) is Tagged
    agree([ys.detach().as_subclass(Tensor)], outputs(module, (x,))[:1])


@pytest.mark.parametrize("what", ["input", "state", "weights"])
@pytest.mark.parametrize("name", ["gru both ways", "lstm"])
def test_tensors_that_hold_others_go_through(name, what):
    """They have no memory of their own for a kernel to read."""
    module = made(name)
    x, state = an_input(module), a_state(module)
    if what == "weights":
        for key, p in [*module.named_parameters()]:
            setattr(module, key, torch.nn.Parameter(TwoTensor(p.detach(), 2 * p.detach())))
    x = TwoTensor(x, 2 * x) if what == "input" else x
    if what == "state":
        state = pytree.tree_map(lambda s: TwoTensor(s, 2 * s), state)
    found, want = [pytree.tree_leaves(each(x, state)) for each in (module, module.to_torch())]
    for half in ("a", "b"):
        agree(*[[getattr(t, half).detach() for t in some] for some in (found, want)])


def test_the_loss_can_be_traced():
    hs, weight = torch.randn(2, 5, 3, HIDDEN), torch.randn(20, HIDDEN)
    targets = torch.randint(0, 20, (2, 5, 3))
    trace = torch.jit.trace(
        lambda hs, targets: linear_cross_entropy(hs, weight, None, targets), (hs[0], targets[0])
    )
    want = linear_cross_entropy(hs[1], weight, None, targets[1])
    torch.testing.assert_close(trace(hs[1], targets[1]), want)
    assert linear_cross_entropy(hs[0], weight, None, targets[0]) != want
    graph = make_fx(lambda hs, targets: linear_cross_entropy(hs, weight, None, targets))
    torch.testing.assert_close(graph(hs[0], targets[0])(hs[1], targets[1]), want)


# ------------------------------------------------------------------------------------- to_torch


@pytest.mark.parametrize("name", [name for name in MODULES if name != "linear"])
def test_the_twin_of_torch_computes_the_same_from_the_same_weights(name):
    module = made(name)
    twin = module.to_torch()
    assert type(twin) is getattr(torch.nn, type(module).__name__)
    assert twin.training == module.training
    assert all(p is q for p, q in zip(twin.parameters(), module.parameters(), strict=True))
    arguments = (an_input(module), a_state(module))
    agree(outputs(twin, arguments), outputs(module, arguments))


def test_training_the_twin_trains_the_module_and_a_copy_does_not():
    module = made("lstm").train()
    twin = module.to_torch()
    apart = copy.deepcopy(twin)
    before = module.weight_hh_l0.detach().clone()
    optimiser = torch.optim.SGD(twin.parameters(), lr=1.0)
    twin(an_input(module))[0].sum().backward()
    optimiser.step()
    assert not torch.equal(module.weight_hh_l0, before)
    assert torch.equal(apart.weight_hh_l0, before)


def test_layers_have_the_twin_of_their_cell():
    layers = nn.Layers("gru", INPUT, HIDDEN).eval()
    x = (an_input(layers),)
    agree(outputs(layers.to_torch(), x), outputs(layers, x))


def test_a_cell_that_torch_does_not_have_has_no_twin():
    with pytest.raises(UserError, match="linear") as refusal:
        made("linear").to_torch()
    assert "tanh, relu, gru, lstm" in refusal.value.hint
    assert not cells.is_torchs(cells.named("linear"))


@pytest.mark.parametrize(
    "computed",
    [
        lambda rnn: parametrizations.weight_norm(rnn, "weight_hh_l0"),
        lambda rnn: prune.l1_unstructured(rnn, "weight_hh_l0", amount=0.5),
    ],
    ids=["parametrized", "pruned"],
)
def test_a_weight_that_is_computed_cannot_be_shared(computed):
    module = made("lstm")
    computed(module)
    with pytest.raises(UserError, match=r"weight_hh_l0 is computed .*remove_parametrizations"):
        module.to_torch()


@pytest.mark.skipif(
    not {"fbgemm", "x86", "onednn", "qnnpack"} & set(torch.backends.quantized.supported_engines),
    reason="this torch cannot quantise",
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_the_twin_can_be_quantised():
    module = made("lstm")
    model = torch.nn.ModuleDict({"rnn": module.to_torch()})
    small = torch.ao.quantization.quantize_dynamic(model, {torch.nn.LSTM}, dtype=torch.qint8)
    x = (an_input(module),)
    got, want = outputs(small["rnn"], x), outputs(module, x)
    assert "quantized" in type(small["rnn"]).__module__
    for one, other in zip(got, want, strict=True):  # 8 bits: a step of 2/255 of the largest weight
        assert 0 < (one - other).abs().max() < 0.02
