"""Nothing that Python can hand to the native code makes it read or write foreign memory."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy, linear

import elman
from elman import built, nn
from elman.cells import Weights, named
from elman.errors import UserError
from elman.kernels import Piece, Pull, described, reference
from elman.kernels.cpu import KERNEL, Cpu, library
from elman.language_model import LanguageModel
from elman.language_model.loss import linear_cross_entropy
from elman.language_model.stepper import Stepper
from elman.training.optimisation import clip_gradients

pytestmark = pytest.mark.skipif(KERNEL.library is None, reason="the cpu kernel was not built")


def test_a_module_without_memory_refuses_an_input_that_has_some():
    with pytest.raises(UserError, match="input is on cpu, the weights of LSTM are on meta"):
        nn.LSTM(5, 8).to("meta")(torch.randn(3, 2, 5))
    with pytest.raises(UserError, match="input is on meta, the weights of GRU are on cpu"):
        nn.GRU(5, 8)(torch.randn(3, 2, 5, device="meta"))


def test_a_module_without_memory_runs_on_inputs_without_memory_as_torchs():
    xs = torch.randn(3, 2, 5, device="meta")
    ys, (h, c) = nn.LSTM(5, 8).to("meta")(xs)
    assert {ys.device.type, h.device.type, c.device.type} == {"meta"}
    assert (ys.shape, h.shape) == ((3, 2, 8), (1, 2, 8))


def test_a_language_model_without_memory_is_refused():
    model = LanguageModel(7, cell="lstm", hidden_size=8).to("meta")
    with pytest.raises(UserError, match="input is on cpu"):
        model(torch.zeros(2, 5, dtype=torch.int64))


@pytest.mark.parametrize("cell", ["elman", "peephole", "mlp"])
@pytest.mark.parametrize("embedding_size", [None, 5])
def test_ids_without_memory_are_refused(cell, embedding_size):
    """torch's embedding answers them with whatever lies in the memory of the result."""
    model = LanguageModel(7, cell=cell, hidden_size=8, embedding_size=embedding_size)
    with pytest.raises(UserError, match="the input is on meta, the model on cpu"):
        model(torch.zeros(2, 5, dtype=torch.int64, device="meta"))


def test_a_state_without_memory_is_refused():
    with pytest.raises(UserError, match="h0 is on meta, the input on cpu"):
        nn.GRU(5, 8)(torch.randn(3, 2, 5), torch.zeros(1, 2, 8, device="meta"))


@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"])
def test_a_weight_that_was_replaced_by_a_smaller_one_is_refused(name):
    gru = nn.GRU(5, 8)
    p = getattr(gru, name)
    p.data = torch.randn(2, *p.shape[1:])
    with pytest.raises(UserError, match="has shape"):
        gru(torch.randn(3, 2, 5))


@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"])
def test_also_between_forward_and_backward(name):
    gru = nn.GRU(5, 8)
    ys, _ = gru(torch.randn(3, 2, 5))
    p = getattr(gru, name)
    p.data = torch.randn(2, *p.shape[1:])
    with pytest.raises((UserError, RuntimeError), match="shape"):
        ys.sum().backward()


def test_an_output_layer_of_another_width_is_refused():
    with pytest.raises(UserError, match="the output weight has shape"):
        Stepper(nn.LSTM(28, 4096).eval(), torch.nn.Linear(1, 100000))


def head(states=6, outputs=9):
    torch.manual_seed(0)
    hs, W, b = torch.randn(4, 3, states), torch.randn(outputs, states), torch.randn(outputs)
    return hs, W, b, torch.randint(outputs, (4, 3))


def test_a_bias_with_strides_is_read_with_them():
    hs, W, _, targets = head()
    for b in (torch.randn(18)[::2], torch.randn(1).expand(9), torch._neg_view(torch.randn(9))):
        exact = cross_entropy(linear(hs, W, b).flatten(0, 1), targets.flatten())
        torch.testing.assert_close(linear_cross_entropy(hs, W, b, targets), exact)


def test_an_output_weight_that_does_not_fit_is_refused():
    hs, W, b, targets = head()
    for wrong in (W[:, :2], W[:5], W[0], W.T):
        with pytest.raises(UserError, match=r"the output (weight|bias) has shape"):
            linear_cross_entropy(hs, wrong, b, targets)


def test_a_sign_that_is_still_to_be_flipped_is_flipped():
    torch.manual_seed(0)
    gru, xs = nn.GRU(5, 8), torch.randn(3, 2, 5)
    torch.testing.assert_close(gru(torch._neg_view(xs))[0], gru(-xs)[0])
    hs, W, b, targets = head()
    torch.testing.assert_close(
        linear_cross_entropy(torch._neg_view(hs), torch._neg_view(W), b, targets),
        linear_cross_entropy(hs, W, b, targets),
    )
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = torch._neg_view(torch.tensor([3.0, 4.0, 0.0]))
    with pytest.raises(RuntimeError, match="negation"):  # torch's own: not native, not wrong
        clip_gradients([p], 1.0)


def test_reference_reaches_the_output_layer_and_the_clipping(monkeypatch):
    """ELMAN_KERNELS=reference: no native code runs at all."""

    def forbidden(*_):
        raise AssertionError("native code ran")

    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    hs, W, b, targets = head()
    with monkeypatch.context() as patch:
        for name in ("elman_head", "elman_clip", "elman_forward", "elman_backward"):
            patch.setattr(KERNEL.library, name, forbidden)
        linear_cross_entropy(hs, W.requires_grad_(), b, targets).backward()
        W.grad = torch.full_like(W, 2.0)
        assert clip_gradients([W], 1.0) == pytest.approx(2 * W.numel() ** 0.5)
        assert float(W.grad.norm()) == pytest.approx(1.0)


def test_ids_changed_after_the_forward_pass_are_refused_by_the_backward_pass():
    w = Weights(torch.randn(2, 4), torch.randn(2, 2), torch.randn(2), torch.randn(2))
    piece = Piece(named("tanh"), w, torch.randint(4, (3, 2)), (torch.randn(2, 2),), None)
    trace = KERNEL.forward(piece)
    pull = Pull(torch.randn(3, 2, 2), (torch.randn(2, 2),), None)
    for wrong in (piece.xs + 4, -piece.xs - 1):
        with pytest.raises(IndexError, match="index 4 inputs"):
            KERNEL.backward(piece._replace(xs=wrong), trace, pull)


@pytest.mark.parametrize("layer", ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"])
def test_a_call_without_gradient_sees_what_a_weight_has_become(layer):
    """A prepared call knows weights by their address, which `p.data = …` may keep."""
    changes = {
        "negated": torch._neg_view,
        "float64": torch.Tensor.double,
        "narrower": lambda t: t[..., :1],
        "transposed": lambda t: t.t().clone().t() if t.dim() == 2 else t.flip(0),
    }
    xs = torch.randn(4, 2, 8)
    for change in changes.values():
        gru = nn.GRU(8, 8)
        with torch.no_grad():
            gru(xs)
        p = getattr(gru, layer)
        p.data = change(p.data)
        with torch.no_grad():
            try:
                ys = gru(xs)[0]
            except UserError:
                continue
        plain = torch.nn.GRU(8, 8)
        plain.load_state_dict(gru.state_dict())
        torch.testing.assert_close(ys, plain(xs)[0])


# ---------------------------------------------------------------------- without memory


def freed(t):
    """The same tensor with its storage given back, as sharding libraries do between two uses."""
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def test_a_tensor_whose_storage_was_freed_is_refused():
    torch.manual_seed(0)
    xs = torch.randn(3, 2, 5)
    for grad in (True, False):
        gru = nn.GRU(5, 8)
        with torch.set_grad_enabled(grad):
            gru(xs)
            with pytest.raises(UserError, match="has lost its memory"):
                gru(freed(xs))
            gru.weight_hh_l0.untyped_storage().resize_(0)
            with pytest.raises(UserError, match="has lost its memory"):
                gru(xs)
    hs, W, b, targets = head()
    for wrong in ((freed(hs), W, b), (hs, freed(W), b), (hs, W, freed(b))):
        with pytest.raises(UserError, match="has lost its memory"):
            linear_cross_entropy(*wrong, targets)


def test_a_storage_that_is_too_short_is_refused():
    xs = torch.randn(4, 2, 5)[1:]
    xs.untyped_storage().resize_(3 * 2 * 5 * 4)  # long enough but for where the view begins
    with pytest.raises(UserError, match="has lost its memory"), torch.no_grad():
        nn.GRU(5, 8)(xs)


# ---------------------------------------------------------------------- another library

SOURCES = 'extern "C" const char *elman_sources() { return ELMAN_SOURCES; }\n'
OTHERS = {
    "not a library": (None, "file too short"),
    "an older one": ("", "it has no elman_sources"),
    "one of other sources": (
        'extern "C" const char *elman_sources() { return "0"; }',
        "the C++ beside it has changed since",
    ),
    "a newer one": (SOURCES, "has no elman_size"),
}


def compiled(folder, source):
    """A shared library of this source, under the kernel's name."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    (folder / "other.cpp").write_text(source)
    file = folder / library.path().name
    sources = f'-DELMAN_SOURCES="{built.digest(folder)}"'
    flags = ["-shared", "-fPIC", sources, "-o", str(file), str(folder / "other.cpp")]
    subprocess.run([compiler, *flags], check=True)
    return file


def whole_interface(sizes):
    """All entries, doing nothing, and structures of these sizes."""
    names = [name for name in library.ENTRIES if name != "elman_size"]
    entries = "".join(f'extern "C" int {name}() {{ return 0; }}\n' for name in names)
    parts = ", ".join(map(str, sizes))
    size = f'extern "C" long elman_size(int i) {{ const long n[] = {{{parts}}}; return n[i]; }}'
    return SOURCES + entries + size


@pytest.mark.parametrize("kind", OTHERS)
def test_a_library_of_another_version_is_not_used(kind, tmp_path, monkeypatch):
    source, why = OTHERS[kind]
    if source is None:
        (tmp_path / library.path().name).write_bytes(b"ELF?")
    else:
        compiled(tmp_path, source)
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    kernel = Cpu()
    assert kernel.library is None
    assert why in kernel.problem
    assert "python setup.py build_ext --inplace --force" in kernel.problem
    assert "\n" not in kernel.problem


@pytest.mark.parametrize("which", range(len(library.STRUCTS)))
def test_a_library_with_other_structures_is_not_used(which, tmp_path):
    sizes = [KERNEL.library.elman_size(i) for i in range(len(library.STRUCTS))]
    library.load(compiled(tmp_path, whole_interface(sizes)))
    sizes[which] += 8
    (tmp_path / "other").mkdir()
    with pytest.raises(OSError, match="its structures have"):
        library.load(compiled(tmp_path / "other", whole_interface(sizes)))


def test_without_its_library_everything_runs_on_plain_torch(tmp_path, tiny_run):
    """As a user meets it: one line says so, and the numbers are the same to rounding."""
    home = shutil.copytree(Path(elman.__file__).parent, tmp_path / "src" / "elman")
    (home / "kernels" / "cpu" / library.path().name).write_bytes(b"of another machine")
    words = [sys.executable, "-m", "elman", "evaluate", str(tiny_run()), "--json", "--no-baselines"]
    seen = [
        subprocess.run(words, capture_output=True, text=True, timeout=120, env=os.environ | env)
        for env in ({}, {"PYTHONPATH": str(tmp_path / "src")})
    ]
    assert [s.returncode for s in seen] == [0, 0], seen[1].stderr
    notes = [line for line in seen[1].stderr.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1
    assert "build it again" in notes[0]
    native, plain = (json.loads(s.stdout)["nats_per_token"] for s in seen)
    assert native == pytest.approx(plain, rel=1e-5)


def piece_of(name: str, **changed) -> Piece:
    cell = named(name)
    tall, own = 4 * cell.gates, len(cell.parameters)
    w = Weights(torch.randn(tall, 3), torch.randn(tall, 4), torch.randn(tall), torch.randn(tall))
    w = w._replace(own=torch.randn(own, 4) if own else None)._replace(**changed)
    state = tuple(torch.randn(2, n) for n in cell.state_sizes(4))
    return Piece(cell, w, torch.randn(5, 2, 3), state)


@pytest.mark.parametrize(
    "kernel", [KERNEL, described.KERNEL, reference.KERNEL], ids=lambda k: k.name
)
@pytest.mark.parametrize("missing", ["b_ih", "b_hh"])
def test_one_bias_without_the_other_is_refused(kernel, missing):
    """The gradient of the one that was there used to be whatever lay in its memory."""
    name = "mgu" if kernel is described.KERNEL else "gru"
    with pytest.raises(UserError, match="both b_ih and b_hh, or neither"):
        kernel.forward(piece_of(name, **{missing: None}))


def test_a_cell_without_its_own_numbers_is_refused():
    """The compiled cell read them from address 0."""
    with pytest.raises(UserError, match="a peephole cell has 3 numbers of its own"):
        described.KERNEL.forward(piece_of("peephole", own=None))
    with pytest.raises(UserError, match="a gru cell has 0 numbers of its own"):
        KERNEL.forward(piece_of("gru", own=torch.randn(1, 4)))


@pytest.mark.parametrize(("kernel", "name"), [(KERNEL, "lstm"), (described.KERNEL, "coupled")])
def test_a_projection_is_refused_by_native_code_also_where_nobody_asked_first(kernel, name):
    piece = piece_of(name, W_hr=torch.randn(4, 4))
    assert "proj_size" in str(kernel.refuses(piece))
    with pytest.raises(UserError, match="proj_size"):
        kernel.forward(piece)


@pytest.mark.parametrize(("kernel", "name"), [(KERNEL, "lstm"), (described.KERNEL, "coupled")])
def test_weights_that_are_no_real_numbers_are_refused(kernel, name):
    """The same memory read as whole numbers: the described kernel answered."""
    piece = piece_of(name)
    whole = piece.w._replace(W_hh=piece.w.W_hh.view(torch.int32))
    assert "torch.int32" in str(kernel.refuses(piece._replace(w=whole)))


def test_a_pull_of_whole_numbers_is_refused():
    """What flowed back was cut down to whole numbers, too."""
    piece = piece_of("gru")
    pull = Pull(None, (torch.ones(2, 4, dtype=torch.int64),))
    for kernel in (KERNEL, reference.KERNEL):
        with pytest.raises(UserError, match=r"dh is torch\.int64"):
            kernel.backward(piece, kernel.forward(piece), pull)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")  # torch says so, too
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("cell", ["linear", "peephole"])
def test_tensors_that_only_pretend_to_have_memory_are_refused(cell, grad, monkeypatch):
    """A FakeTensor is on the CPU, contiguous and long enough, and lies at address 0.

    Of a cell that torch has, and of the loss, torch's own operators take it.
    """
    with FakeTensorMode(), torch.set_grad_enabled(grad):
        rnn, xs = nn.of(cell, 5, 8), torch.randn(3, 2, 5)
        with pytest.raises(UserError, match="has no memory of its own"):
            rnn(xs)
        hs, W = torch.randn(3, 2, 8), torch.randn(7, 8)
        assert linear_cross_entropy(hs, W, None, torch.zeros(3, 2, dtype=torch.int64)).shape == ()
        monkeypatch.setenv("ELMAN_KERNELS", "reference")
        assert rnn(xs)[0].shape == (3, 2, 8)
    monkeypatch.delenv("ELMAN_KERNELS")
    real = nn.of(cell, 5, 8)
    refusal = pytest.raises(UserError, match="has no memory of its own")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(grad), refusal:
        real(torch.ones(3, 2, 5))


@pytest.mark.parametrize("kind", [torch.int32, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0"])
@pytest.mark.parametrize("again", [False, True])
def test_a_module_refuses_weights_that_are_no_real_numbers(kind, name, again):
    """They were cast without a word, or ids were answered with integers."""
    rnn, ids = nn.GRU(4, 8).requires_grad_(False), torch.randint(4, (5, 3))
    if again:
        rnn(ids)
    p = rnn.get_parameter(name)
    p.data = p.data.to(kind)
    for xs in (ids, torch.randn(5, 3, 4)):
        with pytest.raises(UserError, match=rf"{name} of GRU has dtype {kind}|input has dtype"):
            rnn(xs)
