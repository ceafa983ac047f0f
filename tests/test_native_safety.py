"""Nothing that Python can hand to the native code makes it read or write foreign memory."""

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from elman import nn
from elman.cells import Weights, named
from elman.errors import UserError
from elman.kernels import Piece, Pull
from elman.kernels.cpu import KERNEL
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
