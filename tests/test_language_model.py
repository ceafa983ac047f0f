"""The language model: what it computes, what it remembers, what it hides while training."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from elman import LanguageModel
from elman.errors import UserError
from elman.language_model import Dropout

VOCAB, HIDDEN, BATCH, TIME = 11, 7, 3, 9
TORCH = {"elman": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
MODELS = {
    "elman": {"cell": "elman"},
    "gru, 2 layers": {"cell": "gru", "layers": 2},
    "lstm, embedded": {"cell": "lstm", "embedding_size": 5},
    "lstm, tied": {"cell": "lstm", "embedding_size": HIDDEN, "tied": True},
    "mlp": {"cell": "mlp", "context": 4},
    "mlp, 2 layers, tied": {
        "cell": "mlp",
        "context": 3,
        "layers": 2,
        "embedding_size": HIDDEN,
        "tied": True,
    },
}
each_model = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())


def build(options, seed=0, **more):
    torch.manual_seed(seed)
    return LanguageModel(VOCAB, hidden_size=HIDDEN, **options, **more).double()


@pytest.fixture
def ids():
    return torch.randint(VOCAB, (BATCH, TIME), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("cell", TORCH)
def test_it_is_one_hot_then_torch_nn_then_linear(cell, ids):
    model = build({"cell": cell, "layers": 2})
    oracle = TORCH[cell](VOCAB, HIDDEN, num_layers=2).double()
    oracle.load_state_dict(model.recurrence.state_dict())
    hs, state = oracle(F.one_hot(ids.T, VOCAB).double())
    expected = F.linear(hs, model.weight_hq, model.bias_q).transpose(0, 1)
    logits, found = model(ids)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, state, rtol=1e-12, atol=1e-12)


def test_an_mlp_sees_its_context_and_nothing_else(ids):
    model = build({"cell": "mlp", "context": 3})
    W = model.window.weight_xh.view(3, VOCAB + 1, HIDDEN)
    for row in range(BATCH):
        read = [VOCAB, VOCAB, *ids[row].tolist()]  # VOCAB: before the text
        for t in range(TIME):
            a = sum(W[k, read[t + k]] for k in range(3)) + model.window.bias_h
            expected = F.linear(torch.tanh(a), model.weight_hq, model.bias_q)
            torch.testing.assert_close(model(ids)[0][row, t], expected, rtol=1e-12, atol=1e-12)


@each_model
def test_a_text_read_in_pieces_gives_what_it_gives_in_one(options, ids):
    model = build(options).eval()
    whole, last = model(ids)
    pieces, state = [], None
    for start, stop in ((0, 1), (1, 5), (5, TIME)):
        piece, state = model(ids[:, start:stop], state)
        pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)


@each_model
def test_every_parameter_gets_a_gradient(options, ids):
    model = build(options)
    model(ids)[0].square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@each_model
def test_the_future_is_not_seen(options, ids):
    model = build(options).eval()
    later = ids.clone()
    later[:, 5:] = (later[:, 5:] + 1) % VOCAB
    torch.testing.assert_close(model(later)[0][:, :5], model(ids)[0][:, :5], rtol=0, atol=0)
    assert not torch.equal(model(later)[0][:, 5:], model(ids)[0][:, 5:])


@each_model
def test_the_configuration_builds_the_model_again(options):
    model = build(options, dropout=Dropout(outputs=0.25))
    again = LanguageModel.from_config(model.config)
    assert again.config == model.config
    assert {n: p.shape for n, p in again.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }


def test_the_notes_init_is_normal_with_zero_biases():
    torch.manual_seed(0)
    model = LanguageModel(28, hidden_size=512, init="notes")
    for name, parameter in model.named_parameters():
        if "bias" in name:
            assert not parameter.any(), name
        else:
            assert parameter.std().item() == pytest.approx(0.01, rel=0.05), name
            assert abs(parameter.mean().item()) < 5e-4, name


def test_with_the_notes_init_gradient_descent_is_that_of_the_notes(ids):
    """Three steps of the from-scratch code of 8.5, against the model with one bias per cell."""
    model = build({"init": "notes"})
    cell = model.recurrence
    W_xh, W_hh, b_h = cell.weight_ih_l0.T, cell.weight_hh_l0.T, cell.bias_ih_l0
    scratch = [W_xh, W_hh, b_h, model.weight_hq.T, model.bias_q]
    scratch = [p.detach().clone().requires_grad_() for p in scratch]
    y = ids.roll(-1, 1)
    for _ in range(3):
        W_xh, W_hh, b_h, W_hq, b_q = scratch
        H, outputs = torch.zeros(BATCH, HIDDEN).double(), []
        for X in F.one_hot(ids.T, VOCAB).double():
            H = torch.tanh(X @ W_xh + H @ W_hh + b_h)
            outputs.append(H @ W_hq + b_q)
        F.cross_entropy(torch.cat(outputs), y.T.flatten()).backward()
        F.cross_entropy(model(ids)[0].flatten(0, 1), y.flatten()).backward()
        with torch.no_grad():
            for p in [*scratch, *model.parameters()]:
                if p.grad is not None:
                    p -= 100 * p.grad  # far enough that a second bias would show
                    p.grad = None
    torch.testing.assert_close(cell.weight_hh_l0.T, scratch[1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(cell.bias_ih_l0, scratch[2], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(model.bias_q, scratch[4], rtol=1e-10, atol=1e-10)
    assert not cell.bias_hh_l0.any()


EVERYTHING = Dropout(tokens=0.3, inputs=0.3, layers=0.3, outputs=0.3, recurrent=0.3)


def test_dropout_is_off_in_eval_mode_and_drawn_afresh_in_training(ids):
    model = build({"cell": "lstm", "layers": 2, "embedding_size": 5}, dropout=EVERYTHING)
    bare = build({"cell": "lstm", "layers": 2, "embedding_size": 5})
    assert not torch.equal(model(ids)[0], model(ids)[0])
    model.eval()
    torch.testing.assert_close(model(ids)[0], bare(ids)[0], rtol=0, atol=0)


def test_the_output_mask_is_the_same_at_every_step(ids):
    model = build({}, dropout=Dropout(outputs=0.5))
    with torch.no_grad():
        model.weight_hq.copy_(torch.eye(VOCAB, HIDDEN))
        model.bias_q.zero_()
    dropped = model(ids)[0][:, :, :HIDDEN] == 0
    assert (dropped == dropped[:, :1]).all()
    assert 0 < dropped[:, 0].float().mean() < 1
    assert not (dropped[0, 0] == dropped[1:, 0]).all(), "each row has a mask of its own"


def test_the_input_mask_is_the_same_at_every_step(ids):
    model = build({"embedding_size": 5}, dropout=Dropout(inputs=0.5))
    masks = model.draw_masks(BATCH)
    xs = model.inputs(ids.T, masks)
    assert model.embedding is not None
    assert masks.inputs is not None
    torch.testing.assert_close(xs, model.embedding(ids.T) * masks.inputs, rtol=0, atol=0)
    assert set(masks.inputs.unique().tolist()) == {0.0, 2.0}


def test_dropconnect_thins_out_w_hh_once_a_window(ids):
    model = build({"cell": "gru"}, dropout=Dropout(recurrent=0.5))
    masks = model.draw_masks(BATCH)
    thinned = build({"cell": "gru"})
    with torch.no_grad():
        thinned.recurrence.weight_hh_l0.mul_(masks.recurrent["weight_hh_l0"])
    logits, _ = model(ids, None, masks)
    expected, _ = thinned(ids)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    logits.square().sum().backward()
    grad, mask = model.recurrence.weight_hh_l0.grad, masks.recurrent["weight_hh_l0"]
    assert (grad[mask == 0] == 0).all()
    assert (grad[mask > 0] != 0).all()


def test_a_hidden_token_is_read_as_unknown():
    model = build({}, dropout=Dropout(tokens=0.25))
    ids = torch.full((100, 100), 3)
    hidden = model.hide_tokens(ids)
    assert set(hidden.unique().tolist()) == {0, 3}
    assert (hidden == 0).double().mean().item() == pytest.approx(0.25, abs=0.02)


def test_masks_keep_the_mean():
    model = build({"cell": "lstm"}, dropout=Dropout(recurrent=0.25))
    masks = [model.draw_masks(1).recurrent["weight_hh_l0"] for _ in range(200)]
    assert torch.stack(masks).mean().item() == pytest.approx(1, abs=0.01)
    assert set(masks[0].unique().tolist()) == {0.0, 1 / 0.75}


def test_saved_noise_gives_the_same_masks_again(ids):
    model = build({"cell": "lstm"}, dropout=Dropout(tokens=0.2, outputs=0.5, recurrent=0.5))
    model(ids)
    saved = {k: v.clone() for k, v in model.noise.state_dict().items()}
    first = model(ids)[0]
    model.noise.load_state_dict(saved)
    torch.testing.assert_close(model(ids)[0], first, rtol=0, atol=0)


def test_a_seed_before_it_is_built_fixes_weights_and_masks(ids):
    one, two = (build({"cell": "gru"}, seed=5, dropout=Dropout(outputs=0.5)) for _ in range(2))
    torch.testing.assert_close(one(ids)[0], two(ids)[0], rtol=0, atol=0)


def test_a_copy_computes_the_same(ids):
    model = build(MODELS["lstm, tied"]).eval()
    torch.testing.assert_close(copy.deepcopy(model)(ids)[0], model(ids)[0], rtol=0, atol=0)


@each_model
def test_arrays_are_read_as_tensors_are(options, ids):
    model = build(options).eval()
    for kind in (np.uint8, np.int32, np.uint16, np.int64):
        torch.testing.assert_close(model(ids.numpy().astype(kind)), model(ids), rtol=0, atol=0)
    with pytest.raises(UserError, match=r"ids are a list.*torch.tensor\(\[ids\]\)"):
        model([1, 2, 3])
    with pytest.raises(UserError, match="integers"):
        model(ids.numpy().astype(np.float32))
    with pytest.raises(UserError, match="must lie in 0"):
        model(ids.numpy() + VOCAB)


@each_model
def test_hidden_states_need_ids_and_nothing_else(options, ids):
    drop = {"dropout": Dropout(outputs=0.5)}
    model = build(options, **drop).train()
    hs, state = model.states(ids)
    assert hs.shape == (TIME, BATCH, HIDDEN)
    logits, after = model.eval()(ids)
    torch.testing.assert_close(
        F.linear(hs, model.output_weight, model.bias_q), logits.transpose(0, 1)
    )
    torch.testing.assert_close(state, after)
    torch.testing.assert_close(model.states(ids.numpy())[0], hs)
    early, middle = model.states(ids[:, :4])
    late, _ = model.states(ids[:, 4:], middle)
    torch.testing.assert_close(torch.cat([early, late]), hs)
    with pytest.raises(UserError, match="must lie in 0"):
        model.states(ids + VOCAB)


def test_a_fresh_model_is_close_to_uniform(ids):
    model = build({"cell": "gru"})
    nats = F.cross_entropy(model(ids)[0].flatten(0, 1), ids.roll(-1, 1).flatten())
    assert nats.item() == pytest.approx(math.log(VOCAB), abs=0.3)


REFUSED = {
    "bidirectional": ({"bidirectional": True}, "the very token that is to be predicted"),
    "cell": ({"cell": "rnn"}, "elman, relu, linear, gru, lstm, .*slstm, .*mlp"),
    "init": ({"init": "zero"}, "default, notes"),
    "tied one-hot": ({"tied": True}, "embedding_size equal to hidden_size"),
    "tied sizes": ({"tied": True, "embedding_size": 4}, "embedding_size=7"),
    "no units": ({"hidden_size": 0}, "hidden_size=0 must be at least 1"),
    "inputs": ({"dropout": {"inputs": 0.5}}, "one-hot input has no components"),
    "layers": ({"dropout": {"layers": 0.5}}, "nothing lies between"),
    "mlp W_hh": ({"cell": "mlp", "dropout": {"recurrent": 0.5}}, "no W_hh"),
    "all dropped": (
        {"dropout": {"outputs": 1.0}},
        "dropout of outputs=1.0 must be at least 0 and below 1",
    ),
}


@pytest.mark.parametrize(("options", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals_name_the_rule(options, said):
    def build_it():
        dropout = Dropout(**options.get("dropout", {}))
        LanguageModel(VOCAB, **{"hidden_size": HIDDEN, **options, "dropout": dropout})

    with pytest.raises(UserError, match=said):
        build_it()


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (torch.zeros(3, dtype=torch.int64), r"\(batch, time\)"),
        (torch.zeros(2, 3), "must be integers"),
        (torch.full((1, 2), VOCAB), "must lie in 0 to 10"),
    ],
)
def test_ids_that_are_not_ids_are_refused(ids, said):
    with pytest.raises(UserError, match=said):
        build({})(ids)


def test_an_mlp_refuses_what_is_no_state_of_its_own():
    model = build({"cell": "mlp", "context": 3})
    ids = torch.zeros(2, 5, dtype=torch.int64)
    _, state = model(ids)
    for wrong, said in {
        "a word": "must be one tensor of ids",
        state[:1]: r"shape \(1, 3\) and type torch.int64; it must be ids of shape \(2, 3\)",
        torch.zeros(2, 3): "type torch.float32",
    }.items():
        with pytest.raises(UserError, match=said):
            model(ids, wrong)
    with pytest.raises(UserError, match=r"\(2, 0\): no time steps"):
        model(ids[:, :0])
    assert model(ids[:0])[0].shape == (0, 5, VOCAB)
