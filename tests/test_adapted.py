"""Anyone's module trains, scores and writes like a language model, the notes' own above all."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from elman import LanguageModel, generation, metrics
from elman.errors import UserError, WorkFailed
from elman.gradients import Stored
from elman.language_model import read
from elman.scoring.mixture import Network
from elman.training import Optimisation, Reading, Settings, Training, Update, Validation, segments

VOCAB, HIDDEN = 7, 5
IDS = np.random.default_rng(0).integers(VOCAB, size=400).astype(np.uint8)
HELD_OUT = np.random.default_rng(1).integers(VOCAB, size=60).astype(np.uint8)
CLIP = 0.1
PLAIN = Optimisation(optimizer="sgd", learning_rate=1.0, clip=CLIP)


class RNNModel(nn.Module):
    """8.6 of the notes: a layer of torch's on one-hot rows; logits (time · batch, vocabulary)."""

    def __init__(self, rnn_layer, vocab_size):
        super().__init__()
        self.rnn, self.vocab_size = rnn_layer, vocab_size
        self.num_hiddens = self.rnn.hidden_size
        self.linear = nn.Linear(self.num_hiddens, self.vocab_size)

    def forward(self, inputs, state):
        X = F.one_hot(inputs.T.long(), self.vocab_size).to(self.linear.weight.dtype)
        Y, state = self.rnn(X, state)
        return self.linear(Y.reshape((-1, Y.shape[-1]))), state

    def begin_state(self, device, batch_size=1):
        shape = (self.rnn.num_layers, batch_size, self.num_hiddens)
        zeros = torch.zeros(shape, device=device, dtype=self.linear.weight.dtype)
        return (zeros, zeros.clone()) if isinstance(self.rnn, nn.LSTM) else zeros


class RNNModelScratch(nn.Module):
    """8.5 of the notes: five tensors in a list, a state (H,), a loop; there it is no Module."""

    def __init__(self, vocab_size, num_hiddens):
        super().__init__()
        self.vocab_size, self.num_hiddens = vocab_size, num_hiddens
        shapes = [(vocab_size, num_hiddens), (num_hiddens, num_hiddens), (num_hiddens,)]
        shapes += [(num_hiddens, vocab_size), (vocab_size,)]
        self.params = nn.ParameterList([0.6 * torch.randn(shape) for shape in shapes])

    def forward(self, X, state):
        W_xh, W_hh, b_h, W_hq, b_q = self.params
        (H,) = state
        outputs = []
        for x in F.one_hot(X.T, self.vocab_size).to(W_xh.dtype):
            H = torch.tanh(torch.mm(x, W_xh) + torch.mm(H, W_hh) + b_h)
            outputs.append(torch.mm(H, W_hq) + b_q)
        return torch.cat(outputs, dim=0), (H,)

    def begin_state(self, batch_size, device):
        dtype = self.params[0].dtype
        return (torch.zeros((batch_size, self.num_hiddens), device=device, dtype=dtype),)


class BatchFirst(nn.Module):
    """Another house's style: embedding, dropout, a buffer that moves, logits (batch, time, V)."""

    def __init__(self):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(VOCAB, 4), nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(4)
        self.rnn = nn.GRU(4, HIDDEN, batch_first=True)
        self.out = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids, state=None):
        xs = self.norm(self.embedding(ids).transpose(1, 2)).transpose(1, 2)
        hs, state = self.rnn(self.dropout(xs), state)
        return self.out(hs), state


MODELS = {
    "concise": lambda: RNNModel(nn.RNN(VOCAB, HIDDEN), VOCAB),
    "gru": lambda: RNNModel(nn.GRU(VOCAB, HIDDEN, num_layers=2), VOCAB),
    "lstm": lambda: RNNModel(nn.LSTM(VOCAB, HIDDEN), VOCAB),
    "scratch": lambda: RNNModelScratch(VOCAB, HIDDEN),
    "batch first": BatchFirst,
}
NOTES = ["concise", "gru", "lstm", "scratch"]


def build(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


def training(model, held_out=None, **more):
    reading = more.pop("reading", Reading(batch_size=3, window=8))
    settings = Settings(reading=reading, optimisation=PLAIN, **{"epochs": 2, **more})
    return Training(model, IDS, held_out, settings)


def grad_clipping(net, theta):
    params = [p for p in net.parameters() if p.requires_grad]
    norm = torch.sqrt(sum(torch.sum(p.grad**2) for p in params))
    if norm > theta:
        for param in params:
            param.grad[:] *= theta / norm
    return norm.item()


def train_epoch_ch8(net, train_iter, updater, use_random_iter):
    """8.5.3 of the notes, each update's loss and norm noted."""
    state, told = None, []
    for X, Y in train_iter:
        if state is None or use_random_iter:
            state = net.begin_state(batch_size=X.shape[0], device=X.device)
        elif isinstance(state, tuple):
            for s in state:
                s.detach_()
        else:
            state.detach_()
        y_hat, state = net(X, state)
        loss = F.cross_entropy(y_hat, Y.T.reshape(-1).long())
        updater.zero_grad()
        loss.backward()
        told.append((loss.item(), grad_clipping(net, CLIP)))
        updater.step()
    return told


@pytest.mark.parametrize("name", NOTES)
@pytest.mark.parametrize("sampling", ["sequential", "random"])
def test_the_notes_models_train_as_in_the_notes_loop_step_by_step(name, sampling):
    reading = Reading(batch_size=3, window=8, sampling=sampling)
    model, net = build(name), build(name)
    records = [r for r in training(model, reading=reading).records() if isinstance(r, Update)]
    updater, expected = torch.optim.SGD(net.parameters(), PLAIN.learning_rate), []
    for epoch in range(2):
        reads = segments.one_pass(IDS, reading, seed=0, epoch=epoch)
        windows = [reads[i][:2] for i in range(len(reads))]
        expected += train_epoch_ch8(net, windows, updater, sampling == "random")
    assert len(records) == len(expected) > 20
    for record, (loss, norm) in zip(records, expected, strict=True):
        assert record.nats == pytest.approx(loss, rel=1e-12)
        assert record.gradient_norm == pytest.approx(norm, rel=1e-10)
    assert sum(r.gradient_norm > CLIP for r in records) > 10, "clipping was at work"
    for mine, theirs in zip(model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def twin(cell="gru"):
    """A LanguageModel and the notes' RNNModel around the same weights."""
    torch.manual_seed(0)
    native = LanguageModel(VOCAB, cell=cell, hidden_size=HIDDEN).double()
    with torch.no_grad():
        for gate in native.recurrence.weight_hh_l0.split(HIDDEN):
            nn.init.orthogonal_(gate, 1.5)  # gradients that are alive many steps back
    layer = {"gru": nn.GRU, "lstm": nn.LSTM}[cell](VOCAB, HIDDEN)
    other = RNNModel(layer, VOCAB).double()
    layer.load_state_dict(native.recurrence.state_dict())
    other.linear.load_state_dict({"weight": native.weight_hq, "bias": native.bias_q})
    return native, other


CARRIES = {
    "truncated": {},
    "sliding": {"carry": "sliding", "history": 5},
    "randomized": {"carry": "randomized"},
    "polynomial": {"carry": "polynomial"},
    "full": {"carry": "full"},
}


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("carry", CARRIES.values(), ids=CARRIES.keys())
def test_every_carry_carries_as_it_does_in_a_language_model(carry, cell):
    reading = Reading(batch_size=3, window=8, **carry)
    native, other = twin(cell)
    expected, found = (
        [r for r in training(m, reading=reading).records() if isinstance(r, Update)]
        for m in (native, other)
    )
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.nats == pytest.approx(theirs.nats, rel=1e-9)
        assert mine.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-8)
    torch.testing.assert_close(other.linear.weight, native.weight_hq, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stop", [1, 9, 17])
def test_a_training_of_any_module_continues_to_the_last_bit(name, stop):
    whole, first = (training(build(name), HELD_OUT, validate_every=5) for _ in range(2))
    expected = [r for r in whole.records() if isinstance(r, Update | Validation)]
    for _ in itertools.takewhile(lambda r: r.step < stop, first.records()):
        torch.rand(3)  # whoever else draws from torch's generator changes nothing
    tensors, numbers = first.state_dict()
    tensors = {n: t.clone() for n, t in tensors.items()}
    again = training(MODELS[name]().double(), HELD_OUT, validate_every=5)
    again.load_state_dict(tensors, numbers)
    rest = [r for r in again.records() if isinstance(r, Update | Validation)]
    assert [(r.step, r.nats) for r in rest] == [(r.step, r.nats) for r in expected][-len(rest) :]
    state, other = whole.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(value, other[n]) for n, value in state.items())


def test_what_does_not_fit_a_saved_training_is_refused_in_words():
    tensors, numbers = training(build("concise")).state_dict()
    with pytest.raises(UserError, match=r"does not fit this model: rnn\.bias_hh_l0 is \(5,\)"):
        training(build("gru")).load_state_dict(tensors, numbers)


@pytest.mark.parametrize("name", MODELS)
def test_any_module_is_scored_by_the_definition(name):
    model = build(name).eval()
    state, total = None, 0.0
    with torch.no_grad():
        for x, y in itertools.pairwise(HELD_OUT.tolist()):
            if state is None and name in NOTES:
                state = model.begin_state(batch_size=1, device="cpu")
            logits, state = model(torch.tensor([[x]]), state)
            total -= logits.reshape(-1).log_softmax(-1)[y].item()
    score = metrics.evaluate(model, HELD_OUT)
    assert score.nats == pytest.approx(total, rel=1e-9)
    assert metrics.evaluate(model, HELD_OUT, lanes=3, warm_up=9).nats != score.nats, "in lanes too"
    if name in NOTES:
        whole = -Network(model).score(HELD_OUT)[1:].sum()
        assert whole == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("name", NOTES)
def test_any_module_writes_as_in_the_notes(name):
    """`predict_ch8`: warm up on the prefix, then always the likeliest token."""
    model, prefix = build(name), [3, 1, 4]
    outputs, state = prefix[:1], model.begin_state(batch_size=1, device="cpu")
    with torch.no_grad():
        for y in prefix[1:]:
            _, state = model(torch.tensor([[outputs[-1]]]), state)
            outputs.append(y)
        for _ in range(20):
            logits, state = model(torch.tensor([[outputs[-1]]]), state)
            outputs.append(int(logits.argmax(dim=1)))
    choices = {"temperature": 0, "exclude": ()}
    assert list(generation.generate(model, prefix, 20, **choices)) == outputs[3:]
    rows = list(generation.generate_batch(model, [prefix, [2], prefix], 20, **choices))
    assert [row[0] for row in rows] == [row[2] for row in rows] == outputs[3:]
    assert generation.beam_search(model, prefix, 4, width=1, exclude=())[0].ids == outputs[3:7]


def test_updates_run_piecewise_and_say_why():
    said = training(build("concise")).explain()
    assert said.runs == "piecewise"
    assert said.reasons["native"] == "the model, a RNNModel, is not an elman.LanguageModel"


def test_asking_what_a_module_returns_leaves_it_and_chance_alone():
    model = build("batch first").train()
    model.norm.eval()
    before, chance = model.norm.running_mean.clone(), torch.get_rng_state()
    training(model)
    assert torch.equal(model.norm.running_mean, before)
    assert torch.equal(torch.get_rng_state(), chance)
    assert model.training
    assert not model.norm.training


class Odd(nn.Module):
    """Answers in a way that cannot be read."""

    def __init__(self, answer):
        super().__init__()
        self.weight, self.answer = nn.Parameter(torch.zeros(VOCAB)), answer

    def forward(self, ids, state):
        return self.answer(ids)


class Plain:
    """The notes' RNNModelScratch is such a class."""

    def __init__(self):
        self.params = [torch.zeros(3, requires_grad=True)]


REFUSED = {
    "no module": (Plain, r"a Plain is not a torch\.nn\.Module.*nn\.ParameterList"),
    "no weights": (nn.Identity, "has no parameters to train"),
    "no state": (lambda: Odd(lambda ids: torch.zeros(2, 3, VOCAB)), r"must return \(logits, state"),
    "time first": (
        lambda: Odd(lambda ids: (torch.zeros(*ids.T.shape, VOCAB), None)),
        r"logits of shape \(3, 2, 7\) for ids of shape \(2, 3\)",
    ),
    "too few outputs": (
        lambda: Odd(lambda ids: (torch.zeros(*ids.shape, VOCAB - 1), None)),
        "token ids 0 to 6 must lie in 0 to 5",
    ),
    "a state of words": (
        lambda: Odd(lambda ids: (torch.zeros(*ids.shape, VOCAB, requires_grad=True), "words")),
        "a state cannot hold a str",
    ),
}


@pytest.mark.parametrize(("make", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_read_is_refused_in_words(make, said):
    with pytest.raises(UserError, match=said):
        next(training(make()).records())


def test_a_budget_of_memory_needs_a_model_whose_steps_are_known():
    with pytest.raises(UserError, match="elman does not know what its steps keep; memory=0"):
        training(build("concise"), reading=Reading(batch_size=3, carry="full", memory=1 << 20))
    reading = Reading(batch_size=3, window=8, memory=Stored())
    assert training(build("concise"), reading=reading) is not None, "which is what autograd does"


def test_a_module_that_explodes_is_told_where_it_began():
    model = build("concise")
    with torch.no_grad():
        model.linear.weight[0, 0] = math.nan
    with pytest.raises(WorkFailed, match=r"at step 1; it began in the parameter linear\.weight"):
        next(training(model).records())
    model = build("scratch")
    with torch.no_grad():
        model.params[3].fill_(1e308)
    with pytest.raises(WorkFailed, match=r"it began in the logits o_t"):
        next(training(model).records())


def test_one_way_to_read_them_all():
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    native, other = twin()
    for state in (None, torch.randn(1, 2, HIDDEN, dtype=torch.float64)):
        expected, found = read(native, ids, state), read(other, ids, state)
        torch.testing.assert_close(found, expected)
        assert found[0].shape == (2, 3, VOCAB)
