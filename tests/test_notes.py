"""elman.notes: the notes' cells run as they stand, number for number."""

import collections
import hashlib
import math
import random

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from elman import nn as elman_nn
from elman import notes as d2l
from elman.errors import UserError

SEQUENCE = list(range(35))
TEXT = "the time traveller for so it will be convenient to speak of him was expounding " * 8


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


@pytest.fixture
def small_text(monkeypatch):
    monkeypatch.setattr(d2l, "read_time_machine", lambda: [TEXT])


def pairs(batches):
    return [(X.tolist(), Y.tolist()) for X, Y in batches]


@pytest.mark.parametrize("seed", range(6))
def test_random_windows_are_the_notes_windows(seed):
    """As in the notes: an offset below the window, every window whole, each at most once."""
    random.seed(seed)
    offset = random.randint(0, 4)
    random.seed(seed)
    rows = [
        (x, y) for X, Y in pairs(d2l.seq_data_iter_random(SEQUENCE, 2, 5))
        for x, y in zip(X, Y, strict=True)
    ]  # fmt: skip
    starts = [x[0] for x, _ in rows]
    assert all(x == list(range(x[0], x[0] + 5)) and y == [i + 1 for i in x] for x, y in rows)
    assert {(start - offset) % 5 for start in starts} == {0}
    assert len(set(starts)) == len(starts) == (34 - offset) // 5 // 2 * 2


@pytest.mark.parametrize("seed", range(6))
def test_sequential_windows_are_the_notes_windows(seed):
    random.seed(seed)
    offset = random.randint(0, 5)
    random.seed(seed)
    found = pairs(d2l.seq_data_iter_sequential(SEQUENCE, 2, 5))
    lane = (35 - offset - 1) // 2  # the notes' reshape of two rows
    for i, (X, Y) in enumerate(found):
        for row, (x, y) in enumerate(zip(X, Y, strict=True)):
            first = offset + row * lane + 5 * i
            assert x == list(range(first, first + 5))
            assert y == [token + 1 for token in x]
    assert len(found) == lane // 5


def test_a_loader_draws_another_offset_for_every_pass(small_text):
    random.seed(0)
    loader, vocab = d2l.load_data_time_machine(4, 10)
    firsts = {tuple(next(iter(loader))[0][0].tolist()) for _ in range(20)}
    assert len(firsts) > 3
    assert len(vocab) == len(set(TEXT)) + 1


def test_counting_and_loading(small_text):
    assert d2l.count_corpus([]) == collections.Counter()
    assert d2l.count_corpus(["a", "b", "a"]) == {"a": 2, "b": 1}
    ids, vocab = d2l.load_corpus_time_machine()
    assert vocab.to_tokens(ids[:8]) == list("the time")
    assert len(ids) == len(TEXT)
    assert len(d2l.load_corpus_time_machine(100)[0]) == 100
    with pytest.raises(UserError, match="syllable"):
        d2l.tokenize(["a"], "syllable")


def test_the_facts_of_the_notes(time_machine_file):
    lines = d2l.read_time_machine()
    assert len(lines) == 3221
    assert lines[0] == "the time machine by h g wells"
    assert lines[10] == "twinkled and his usually pale face was flushed and animated the"
    ids, vocab = d2l.load_corpus_time_machine()
    assert (len(ids), len(vocab)) == (170580, 28)


def scratch(vocab_size=28, num_hiddens=16):
    torch.manual_seed(0)
    return d2l.RNNModelScratch(
        vocab_size, num_hiddens, "cpu", d2l.get_params, d2l.init_rnn_state, d2l.rnn
    )


def test_shapes_are_the_notes():
    net, X = scratch(), torch.arange(10).reshape(2, 5)
    Y, state = net(X, net.begin_state(2, "cpu"))
    assert Y.shape == (10, 28)
    assert len(state) == 1
    assert state[0].shape == (2, 16)


@pytest.mark.parametrize("theta", [0.01, 100.0])
def test_clipping_is_the_notes_formula(theta):
    net, X = scratch(), torch.arange(10).reshape(2, 5)
    Y, _ = net(X, net.begin_state(2, "cpu"))
    F.cross_entropy(Y, X.T.reshape(-1)).backward()
    before = [p.grad.clone() for p in net.params]
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in before))
    assert d2l.grad_clipping(net, theta) == pytest.approx(norm)
    for param, g in zip(net.params, before, strict=True):
        torch.testing.assert_close(param.grad, g * min(1.0, theta / norm))


def plain_epochs(net, windows, lr, epochs, use_random_iter=False):
    """The notes' loop once more, with nothing of elman in it."""
    found = []
    parameters = list(net.parameters()) if isinstance(net, nn.Module) else net.params
    for _ in range(epochs):
        state, total, count = None, 0.0, 0
        for X, Y in windows:
            if state is None or use_random_iter:
                state = net.begin_state(batch_size=X.shape[0], device="cpu")
            state = tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()
            logits, state = net(X, state)
            nats = F.cross_entropy(logits, Y.T.reshape(-1))
            g = torch.autograd.grad(nats, parameters)
            norm = math.sqrt(sum(float((p.double() ** 2).sum()) for p in g))
            with torch.no_grad():
                for p, dp in zip(parameters, g, strict=True):
                    p -= lr * dp * min(1.0, 1 / norm)
            total, count = total + nats.item() * Y.numel(), count + Y.numel()
        found.append(math.exp(total / count))
    return found


@pytest.mark.parametrize("use_random_iter", [False, True])
@pytest.mark.parametrize("kind", ["scratch", "torch", "elman", "lstm", "elman lstm"])
def test_train_ch8_is_the_notes_loop(kind, use_random_iter, small_text, capsys):
    def net():
        torch.manual_seed(1)
        if kind == "scratch":
            return scratch(len(vocab))
        layers = {"torch": nn.RNN, "elman": elman_nn.RNN, "lstm": nn.LSTM}
        layer = layers.get(kind, elman_nn.LSTM)
        return d2l.RNNModel(layer(len(vocab), 16), len(vocab))

    random.seed(0)
    loader, vocab = d2l.load_data_time_machine(4, 10, use_random_iter)
    windows = list(loader)  # the same for both loops
    found = d2l.train_ch8(net(), windows, vocab, 1.0, 10, "cpu", use_random_iter)
    wanted = plain_epochs(net(), windows, 1.0, 10, use_random_iter)
    # A rounding grows about tenfold in every epoch at this rate: 6e-6 after six, 4e-2 after ten.
    assert found.perplexities[:6] == pytest.approx(wanted[:6], rel=1e-4)
    assert len(found.perplexities) == len(wanted)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4  # a sample at epoch 10, where it ended, two more samples
    assert said[0].startswith("time traveller")
    assert len(said[0]) == len("time traveller") + 50
    assert said[1].startswith(f"perplexity {found.perplexities[-1]:.1f}, ")
    assert repr(found).startswith("Trained(10 epochs")
    for figure in (found.figure(), plt.gcf()):  # what it returns, and what plt.show() shows
        [line] = figure.axes[0].lines
        assert list(line.get_xdata()) == list(range(1, 11))
        assert list(line.get_ydata()) == list(found.perplexities)


def test_predict_ch8_takes_the_likeliest_character(small_text):
    _, vocab = d2l.load_corpus_time_machine()
    net = scratch(len(vocab))
    text = d2l.predict_ch8("time ", 6, net, vocab, "cpu")
    ids = vocab[list(text)]
    logits, _ = net(torch.tensor([ids[:-1]]), net.begin_state(1, "cpu"))
    assert text.startswith("time ")
    assert logits[4:].argmax(1).tolist() == ids[5:]
    with pytest.raises(UserError, match="prefix='' gives the network nothing to begin with"):
        d2l.predict_ch8("", 6, net, vocab, "cpu")


def test_the_networks_of_8_1(capsys):
    torch.manual_seed(0)
    x = torch.sin(0.01 * torch.arange(1, 1001)) + torch.normal(0, 0.2, (1000,))
    features = torch.stack([x[i : 996 + i] for i in range(4)], 1)
    pairs = d2l.load_array((features[:600], x[4:604].reshape(-1, 1)), 16)
    losses = d2l.train(d2l.get_net(), pairs, nn.MSELoss(reduction="none"), 5, 0.01)
    assert losses[-1] < 0.08 < losses[0] * 1.5
    assert capsys.readouterr().out.count("loss: ") == 5
    assert len(next(iter(pairs))[0]) == 16


def test_the_notes_question_for_an_lstm_is_answered_where_elmans_is_asked():
    """Their begin_state asks isinstance(rnn, nn.LSTM), which elman's is not."""
    net = d2l.RNNModel(elman_nn.LSTM(7, 5), 7)
    with pytest.raises(
        UserError, match=r"isinstance\(…, torch.nn.LSTM\) must ask for elman.nn.LSTM"
    ):
        net(torch.arange(6).reshape(2, 3), torch.zeros(1, 2, 5))


def test_bidirectional_layers_have_a_wider_output():
    net = d2l.RNNModel(nn.GRU(7, 5, bidirectional=True, num_layers=2), 7)
    Y, state = net(torch.arange(6).reshape(2, 3), net.begin_state("cpu", batch_size=2))
    assert Y.shape == (6, 7)
    assert state.shape == (4, 2, 5)


def test_timer_and_device():
    timer = d2l.Timer()
    assert timer.stop() >= 0
    assert d2l.try_gpu(10_000).type == "cpu"
    sums = d2l.Accumulator(2)
    sums.add(1, 2)
    sums.reset()
    assert sums.data == [0.0, 0.0]


def test_too_little_text_and_no_epochs_are_refused(small_text):
    _, vocab = d2l.load_corpus_time_machine()
    with pytest.raises(UserError, match="num_epochs=0"):
        d2l.train_ch8(scratch(), [], vocab, 1, 0, "cpu")
    with pytest.raises(UserError, match="no windows"):
        d2l.train_ch8(scratch(), [], vocab, 1, 1, "cpu")


def lines(figure):
    [axes] = figure.axes
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]


@pytest.mark.parametrize(
    ("X", "Y", "wanted"),
    [
        ([3, 1, 2], None, [([0, 1, 2], [3, 1, 2])]),
        ([[3, 1], [5, 4, 6]], None, [([0, 1], [3, 1]), ([0, 1, 2], [5, 4, 6])]),
        (torch.arange(2), [torch.ones(2, requires_grad=True)], [([0, 1], [1, 1])]),
        ([7, 8], [[1, 2], np.array([[3], [4]])], [([7, 8], [1, 2]), ([7, 8], [3, 4])]),
        ([[0, 1], [5]], [[1, 2], [9]], [([0, 1], [1, 2]), ([5], [9])]),
        ([0, 1], [torch.tensor(2), torch.tensor(3)], [([0, 1], [2, 3])]),
    ],
)
def test_plot_takes_curves_as_the_notes_give_them(X, Y, wanted):
    d2l.plot(X, Y, "time", "x", xlim=[1, 1000], figsize=(6, 3))
    assert lines(plt.gcf()) == wanted
    [axes] = plt.gcf().axes
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_xlim()) == ("time", "x", (1, 1000))
    assert tuple(plt.gcf().get_size_inches()) == (6, 3)


def test_plot_has_scales_and_a_legend_and_refuses_what_does_not_fit():
    d2l.plot([[9, 4], [3, 2]], xscale="log", yscale="log", legend=["unigram", "bigram"])
    [axes] = plt.gcf().axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["unigram", "bigram"]
    with pytest.raises(UserError, match="names 1 of 2 curves"):
        d2l.plot([[9, 4], [3, 2]], legend=["unigram"])
    with pytest.raises(UserError, match="2 X for 3 Y"):
        d2l.plot([[1], [2]], [[1], [2], [3]])


def test_an_animator_adds_a_point_to_each_curve():
    animator = d2l.Animator(xlabel="epoch", legend=["train", "test"], xlim=[10, 30])
    animator.add(10, [torch.tensor(3.0, requires_grad=True), 5])
    animator.add(20, (2, 4))
    assert plt.gcf() is animator.figure
    assert lines(animator.figure) == [([10, 20], [3, 2]), ([10, 20], [5, 4])]
    assert animator.axes.get_xlim() == (10, 30)
    one = d2l.Animator(xlim=[10, 10])  # the notes' limits when ten epochs are asked for
    one.add(10, 7.5)
    assert lines(one.figure) == [([10], [7.5])]


def test_download_finds_checks_and_refuses(tmp_path, monkeypatch):
    monkeypatch.setenv("ELMAN_DATA", str(tmp_path))
    (tmp_path / "poem.txt").write_text("roses")
    entry = (d2l.DATA_URL + "poem.txt", "f8ac10f23c5b5bc1167bda84b833e5c057a77d2")
    monkeypatch.setitem(d2l.DATA_HUB, "poem", entry)
    with pytest.raises(UserError, match="SHA-1"):
        d2l.download("poem")
    right = hashlib.sha1(b"roses", usedforsecurity=False).hexdigest()
    monkeypatch.setitem(d2l.DATA_HUB, "poem", (entry[0], right))
    assert d2l.download("poem") == str(tmp_path / "poem.txt")
    with pytest.raises(UserError, match="not in DATA_HUB, which has time_machine"):
        d2l.download("unheard-of")


def test_the_sums_of_an_accumulator_take_losses_with_a_gradient():
    sums = d2l.Accumulator(2)
    sums.add(torch.tensor(2.5, requires_grad=True) * 2, 4)
    assert sums.data == [5.0, 4.0]
