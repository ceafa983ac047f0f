"""An update in one go is the update in pieces; on a GPU, the graph is the update."""

import dataclasses
import itertools
import math

import pytest
import torch

from elman import Vocab, corpus, kernels
from elman.errors import UserError, WorkFailed
from elman.kernels.cpu import HALF, KERNEL, Cpu, masks
from elman.kernels.cpu.head import _batch
from elman.language_model import Dropout, LanguageModel
from elman.language_model.masks import Noise
from elman.training import Optimisation, Reading, Settings, Training
from elman.training.captured_update import CapturedUpdate
from elman.training.native_update import GroupedUpdate, NativeUpdate

OPTIMISERS = {
    "sgd": Optimisation(optimizer="sgd", learning_rate=0.5, clip=0.1),
    "momentum": Optimisation(optimizer="sgd", learning_rate=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": Optimisation(
        optimizer="adamw", learning_rate=0.01, weight_decay=0.1, schedule="cosine", warm_up=3
    ),
    "unclipped": Optimisation(optimizer="adam", learning_rate=0.01, clip=None, average="ema"),
}
CONCISE = Optimisation(optimizer="sgd", learning_rate=1.0, clip=1.0)
CONCISE_UNCLIPPED = Optimisation(optimizer="sgd", learning_rate=1.0, clip=None)
SHAPES = {
    "elman": {"cell": "elman"},
    "gru": {"cell": "gru", "layers": 2},
    "lstm, masks": {
        "cell": "lstm",
        "embedding_size": 12,
        "dropout": Dropout(tokens=0.1, inputs=0.2, outputs=0.3, recurrent=0.4),
    },
    "lstm, tokens": {"cell": "lstm", "dropout": Dropout(tokens=0.2)},
    "notes": {"cell": "elman", "init": "notes"},
    "tied": {"cell": "lstm", "embedding_size": 16, "tied": True},
    "embedding": {"cell": "gru", "embedding_size": 5},
    "deep": {"cell": "elman", "layers": 2, "embedding_size": 33},
    "noise": {"cell": "gru", "layers": 2, "dropout": Dropout(zoneout=0.3, updates=0.2)},
    "described": {"cell": "mgu"},
    "four states": {"cell": "slstm"},
    "everything": {
        "cell": "lstm",
        "layers": 3,
        "embedding_size": 16,
        "tied": True,
        "dropout": Dropout(tokens=0.1, inputs=0.2, layers=0.3, outputs=0.3, recurrent=0.4),
    },
}
"""`everything` draws for each step, which a CPU does in native code."""
CAPTURED = [name for name in SHAPES if name != "everything"]
NATIVE = [name for name in SHAPES if name not in ("noise", "described", "four states")]


@pytest.fixture(autouse=True)
def _hastily(request):
    if "noise" in request.node.name:
        request.getfixturevalue("hastily")


def training(shape="elman", optimiser="sgd", device="cpu", dtype=torch.float32, **changes):
    """A training of 18 updates whose gradients are alive."""
    torch.manual_seed(3)
    model = LanguageModel(11, hidden_size=16, **SHAPES[shape]).to(device, dtype)
    ids = torch.randint(11, (600,), generator=torch.Generator().manual_seed(1))
    settings = Settings(
        epochs=2, reading=Reading(batch_size=6, window=11), optimisation=OPTIMISERS[optimiser]
    )
    return Training(model, ids, ids[:200], dataclasses.replace(settings, **changes))


def trained(**shape):
    ids = torch.randint(11, (600,), generator=torch.Generator().manual_seed(1))
    return Training(
        LanguageModel(11, hidden_size=8, **shape), ids, settings=Settings(reading=Reading(6, 11))
    )


def in_pieces(made):
    made._choice = made._choice._replace(update=None)
    return made


def in_one_go(made, capture=False):
    """A GPU's way, which runs on a CPU too, uncaptured."""
    captured = CapturedUpdate.of(made)
    captured.capture = capture
    made._choice = made._choice._replace(update=captured)
    return made


def told(records, count=None):
    return [(r.nats, getattr(r, "gradient_norm", 0.0)) for r in itertools.islice(records, count)]


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("shape", CAPTURED)
def test_in_one_go_is_the_same_as_in_pieces(shape, optimiser):
    pieces, whole = in_pieces(training(shape, optimiser)), in_one_go(training(shape, optimiser))
    first, second = told(pieces.records()), told(whole.records())
    assert len(first) > 12
    torch.testing.assert_close(torch.tensor(second), torch.tensor(first), rtol=2e-5, atol=1e-6)
    for p, w in zip(pieces.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(w, p, rtol=1e-4, atol=1e-5)


native = pytest.mark.skipif(KERNEL.library is None, reason="the cpu kernel was not built")


@pytest.fixture
def _by_step(monkeypatch):
    """Embeddings are multiplied at every step, as in pieces."""
    monkeypatch.setattr(NativeUpdate, "repeats", math.inf)


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("shape", NATIVE)
@pytest.mark.usefixtures("_by_step")
def test_native_calls_are_the_same_as_pieces_to_the_last_bit(shape, optimiser, dtype):
    pieces, whole = (training(shape, optimiser, dtype=dtype) for _ in range(2))
    assert isinstance(whole._choice.update, NativeUpdate)
    assert told(whole.records()) == told(in_pieces(pieces).records())
    same_weights(pieces, whole)


@native
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cell", ["elman", "gru", "lstm"])
def test_loss_found_piece_by_piece_on_the_way_back_is_that_of_all_steps_at_once(cell, threads):
    """Three pieces of time (two, for elman), whose edges are none of the output layer's sums."""
    batch, window, hidden = 40, 51 if cell != "elman" else 201, 64
    assert _batch(batch * window) != batch
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        first, second = (_trained(cell, batch, window, hidden, whole) for whole in (True, False))
    finally:
        torch.set_num_threads(before)
    assert first[0] == second[0]
    same_weights(first[1], second[1])


@pytest.fixture
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@native
@pytest.mark.parametrize(
    "shape",
    [
        *itertools.product(["gru", "lstm"], [40], [31], [64], [None, 12]),
        *itertools.product(["elman"], [40], [101], [64], [None, 12]),
        ("lstm", 32, 16, 131, None),  # of which two threads split the units
    ],
)
@pytest.mark.usefixtures("_two_threads")
def test_pieces_of_time_on_the_way_back_agree_with_the_reference(shape, monkeypatch):
    """In float64 two pieces or more; nobody asks what pulls on the first states."""
    cell, batch, window, hidden, embedding = shape
    shape = (cell, batch, window, hidden, True, torch.float64, embedding)
    nats, whole = _trained(*shape)
    assert isinstance(whole._choice.update, NativeUpdate)
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    expected, plain = _trained(*shape)
    assert not isinstance(plain._choice.update, NativeUpdate)
    torch.testing.assert_close(torch.tensor(nats), torch.tensor(expected), rtol=1e-9, atol=0)
    for w, p in zip(whole.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(w, p, rtol=1e-9, atol=1e-12)


def _trained(cell, batch, window, hidden, whole, dtype=torch.float32, embedding=None):
    torch.manual_seed(3)
    model = LanguageModel(28, cell=cell, hidden_size=hidden, embedding_size=embedding).to(dtype)
    ids = torch.randint(28, (batch * (3 * window + 1),))
    made = Training(
        model, ids, None, Settings(reading=Reading(batch, window), optimisation=CONCISE)
    )
    return told((made if whole else in_pieces(made)).records(), 3), made


def same_weights(one, other):
    for p, w in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, w)
    for a, b in zip(one.average.averages, other.average.averages, strict=True):
        assert torch.equal(a, b)


@native
@pytest.mark.parametrize("sampling", ["sequential", "random"])
@pytest.mark.parametrize("shape", ["elman", "tied", "everything"])
@pytest.mark.usefixtures("_by_step")
def test_several_windows_of_an_update_are_the_same_as_in_pieces(shape, sampling):
    changes = {"accumulate": 4, "reading": Reading(6, 11, sampling=sampling)}  # 9 windows: 4, 4, 1
    pieces, whole = (training(shape, "unclipped", **changes) for _ in range(2))
    assert isinstance(whole._choice.update, NativeUpdate)
    first, second = told(in_pieces(pieces).records()), told(whole.records())
    assert [norm for _, norm in second] == [norm for _, norm in first]
    assert [n for n, _ in second] == pytest.approx([n for n, _ in first], rel=1e-15)
    same_weights(pieces, whole)


@native
@pytest.mark.parametrize("sampling", ["sequential", "random"])
@pytest.mark.parametrize("shape", ["elman", "lstm, masks", "tied"])
def test_several_windows_in_one_go_are_those_in_pieces(shape, sampling):
    """Nine windows a pass: the last update of it reads one."""
    more = {"accumulate": 4, "reading": Reading(6, 11, sampling=sampling), "epochs": 3}
    pieces, whole = in_pieces(training(shape, **more)), in_one_go(training(shape, **more))
    first, second = told(pieces.records()), told(whole.records())
    assert len(first) > 9
    torch.testing.assert_close(torch.tensor(second), torch.tensor(first), rtol=2e-5, atol=1e-6)
    for p, w in zip(pieces.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(w, p, rtol=1e-4, atol=1e-5)


CUT = [
    {"carry": "randomized"},
    {"carry": "polynomial"},
    {"carry": "sliding", "history": 7},
    {"carry": "sliding", "history": 30},
]
"""Readings whose segments are no plain windows."""


@pytest.mark.parametrize("grain", [1, 5])
@pytest.mark.parametrize("reading", CUT, ids=str)
@pytest.mark.parametrize("shape", ["elman", "lstm, masks", "tied", "noise"])
def test_segments_of_any_shape_in_one_go_are_those_in_pieces(shape, reading, grain, monkeypatch):
    """`grain`: segments of random lengths are given room for a multiple of so many steps."""
    if shape == "noise" and "history" in reading:
        pytest.skip("read in two parts, each of which draws: not captured")
    monkeypatch.setenv("ELMAN_KERNELS", "reference")  # native code scores every place
    more = {"reading": Reading(batch_size=6, window=11, **reading), "epochs": 3}
    pieces, whole = in_pieces(training(shape, **more)), in_one_go(training(shape, **more))
    assert isinstance(whole._choice.update, CapturedUpdate)
    whole._choice.update.grain = grain
    first, second = told(pieces.records()), told(whole.records())
    assert len(first) > 9
    torch.testing.assert_close(torch.tensor(second), torch.tensor(first), rtol=2e-5, atol=1e-6)
    for p, w in zip(pieces.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(w, p, rtol=1e-4, atol=1e-5)


def test_segments_of_random_lengths_have_room_for_a_few_more_steps(monkeypatch):
    update = CapturedUpdate.of(training(reading=Reading(6, 40, carry="randomized")))
    lengths = [1, 8, 9, 64, 65, 130, 300]
    assert [update._room(n) for n in lengths] == [8, 8, 16, 64, 80, 160, 320]
    monkeypatch.setattr("elman.language_model.loss.LARGE", 11 * 6 * 100)  # pieces score every place
    assert [update._room(n) for n in lengths] == [8, 8, 16, 64, 80, 130, 300]


@pytest.mark.parametrize("shape", ["elman", "lstm, masks", "everything"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_groups_of_lanes_are_the_same_as_in_pieces(shape, accumulate):
    pieces, whole = (
        training(shape, "adamw", lane_groups=3, accumulate=accumulate) for _ in range(2)
    )
    assert isinstance(whole._choice.update, GroupedUpdate)
    first, second = told(in_pieces(pieces).records()), told(whole.records())
    assert [n for n, _ in second] == pytest.approx([n for n, _ in first], rel=1e-15)
    same_weights(pieces, whole)


@native
@pytest.mark.parametrize("batch", [6, 3])  # of up to four rows a layer reads where they lie
@pytest.mark.parametrize("shape", ["embedding", "tied", "deep"])
def test_products_by_token_change_the_order_of_two_sums_and_nothing_else(shape, batch):
    reading = {"reading": Reading(batch, 11)}
    pieces = in_pieces(training(shape, **reading))
    exact = in_pieces(training(shape, dtype=torch.float64, **reading))
    whole = training(shape, **reading)
    assert isinstance(whole._choice.update, NativeUpdate)
    assert whole._choice.update.windows.xs is None, "by token"
    with torch.no_grad():  # the same numbers in float64 as in float32
        for p, q in zip(exact.model.parameters(), whole.model.parameters(), strict=True):
            p.copy_(q)
    for made in (pieces, exact, whole):
        made.settings = dataclasses.replace(made.settings, optimisation=CONCISE_UNCLIPPED)
        if isinstance(made._choice.update, NativeUpdate):
            made._choice.update.clip = None
    assert told(whole.records(), 1)[0][0] == told(pieces.records(), 1)[0][0]
    told(exact.records(), 1)
    summed = {"embedding.weight", "recurrence.weight_ih_l0"}
    others = zip(pieces.model.named_parameters(), exact.model.parameters(), strict=True)
    for (name, p), e in others:
        found = whole.model.get_parameter(name).grad
        if name not in summed:
            assert torch.equal(found, p.grad), name
            continue
        assert e.grad.norm() > 1e-3  # a gradient that is alive
        error, usual = (found - e.grad).norm(), (p.grad - e.grad).norm()
        assert 0 < error < 2 * usual  # as near as the other order, whose error is chance too


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", range(4))
def test_masks_are_drawn_as_torch_draws_them(level, dtype):
    kernel, sizes = Cpu(level), [1, 3, 311, 312, 313, 2, 5000, 624, 0, 7]
    for drop in (0.05, 0.25, 0.4, 0.9):
        mine, theirs = (torch.Generator().manual_seed(11) for _ in range(2))
        for size in sizes:  # whatever was drawn before, and by whom
            value = 1 / (1 - drop)
            found = masks._drawn(kernel, mine, (size,), 1 - drop, value, dtype)
            like = torch.empty(size, dtype=dtype).bernoulli_(1 - drop, generator=theirs)
            assert torch.equal(found, torch.where(like > 0, found.new_tensor(value), 0))
            assert torch.equal(mine.get_state(), theirs.get_state())
            assert torch.equal(torch.rand(3, generator=mine), torch.rand(3, generator=theirs))


def test_masks_are_the_same_without_native_code(monkeypatch):
    like = torch.zeros(())
    drawn = Noise(5).keep((7, 100), 0.3, like)
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    assert torch.equal(drawn, Noise(5).keep((7, 100), 0.3, like))
    monkeypatch.undo()
    with torch.device("meta"):  # where tensors are made unless they are told
        assert torch.equal(drawn, Noise(5).keep((7, 100), 0.3, like))
    assert set(drawn.unique().tolist()) == {0.0, (torch.ones(()) / 0.7).item()}


@native
def test_a_native_training_goes_on_to_the_last_bit_after_loading():
    changes = {"accumulate": 2, "epochs": 3}
    whole = told(training("everything", "unclipped", **changes).records())
    first = training("everything", "unclipped", **changes)
    before = told(first.records(), 7)
    tensors, numbers = first.state_dict()
    second = training("everything", "unclipped", **changes)
    second.load_state_dict({name: t.clone() for name, t in tensors.items()}, numbers)
    assert before + told(second.records()) == whole


@native
@pytest.mark.parametrize("shape", ["elman", "gru", "lstm, tokens"])
def test_native_bfloat16_is_as_near_to_float32_as_autocast(shape):
    if KERNEL.variant(HALF) is None:
        pytest.skip("this processor has no bfloat16 products")
    exact = told(training(shape).records())
    whole, pieces = (training(shape, precision="bfloat16") for _ in range(2))
    assert isinstance(whole._choice.update, NativeUpdate)
    found, cast = told(whole.records()), told(in_pieces(pieces).records())

    def distance(one):
        return (torch.tensor(one) - torch.tensor(exact)).norm()

    assert 0 < distance(found) < 1.5 * distance(cast)


@native
@pytest.mark.slow
def test_native_bfloat16_trains_the_notes_job_to_the_same_perplexity(time_machine_file):
    if KERNEL.variant(HALF) is None:
        pytest.skip("this processor has no bfloat16 products")
    text = "".join(corpus.letters(time_machine_file.read_text(encoding="utf-8")))[:10_000]
    vocab = Vocab(text)

    def nats(precision):
        torch.manual_seed(0)
        settings = Settings(epochs=500, precision=precision, optimisation=CONCISE)
        made = Training(LanguageModel(len(vocab)), vocab.encode(text), None, settings)
        assert isinstance(made._choice.update, NativeUpdate)
        last = [r.nats for r in made.records() if r.epoch >= 490]
        return sum(last) / len(last)

    full, half = nats("float32"), nats("bfloat16")
    assert full < math.log(1.35)
    assert abs(half - full) < 0.03  # seeds of either lie that far apart


@native
def test_weights_may_move_and_threads_change():
    made, other = training("lstm, tokens"), training("lstm, tokens")
    first = told(made.records(), 5)
    with torch.no_grad():
        for p in made.model.parameters():
            p.data = p.data.clone()
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert first + told(made.records()) == told(other.records())
    finally:
        torch.set_num_threads(threads)


@native
@pytest.mark.parametrize("shape", ["elman", "lstm, tokens"])
def test_weights_gradients_and_the_state_may_move_to_memory_that_processes_share(shape):
    made, other = training(shape), training(shape)
    first = told(made.records(), 5)
    before = [p.grad.clone() for p in made.model.parameters() if p.grad is not None]
    held = list(made.state_dict()[0].items())
    made.model.share_memory()
    for p in made.model.parameters():
        if p.grad is not None:
            p.grad.share_memory_()
    for name, tensor in held:
        if name.startswith("carried/"):
            tensor.share_memory_()
    kept = [g.clone() for g in before]  # where the gradients once were
    assert first + told(made.records()) == told(other.records())
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True)), "nobody wrote here"


@native
def test_weights_that_change_their_type_are_refused_in_words():
    made = training("elman")
    told(made.records(), 2)
    made.model.double()
    with pytest.raises(UserError, match=r"now torch.float64 on cpu.* it was torch.float32"):
        made.update()
    made.model.float()
    told(made.records(), 2)
    assert isinstance(made._choice.update, NativeUpdate)
    with pytest.raises(UserError, match=r"ids \(11, 5\) and targets .* windows of \(11, 6\)"):
        made._choice.update.windows(*torch.zeros(2, 11, 5, dtype=torch.int64))


def test_a_model_in_bfloat16_trains_in_pieces():
    made = training("elman", dtype=torch.bfloat16)
    assert made._choice.update is None
    found, exact = told(made.records()), told(training("elman").records())
    assert len(found) == len(exact)
    assert found[0] == pytest.approx(exact[0], rel=2**-5)  # a few roundings to 8 bits


def test_ids_of_every_kind_are_taken_or_refused_in_words():
    counting = torch.arange(11).repeat(300).to(torch.uint16)  # which torch cannot order
    Training(LanguageModel(11, hidden_size=4), counting)
    for ids in ([[1], [1, 2]], [1.5] * 3000):
        with pytest.raises(UserError, match="ids must be one"):
            Training(LanguageModel(11, hidden_size=4), ids)


def test_what_does_not_suit_goes_in_pieces(monkeypatch):
    for made, reason in (
        (training(reading=Reading(6, 11, memory=1 << 20)), "a memory budget"),
        (training(reading=Reading(6, 11, carry="full")), "carry=full reads whole lanes"),
        (trained(cell="mlp"), "a mlp, has no recurrence"),
    ):
        assert made._choice.update is None
        assert kernels.explain(made).runs == "piecewise"
        assert reason in str(kernels.explain(made))
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    assert "native: no, ELMAN_KERNELS names reference" in str(training("elman").explain())


@pytest.mark.parametrize("way", [in_one_go, pytest.param(lambda made: made, marks=native)])
def test_what_is_not_finite_changes_nothing(way):
    unchanged_by_infinity(way(training("lstm, tokens")))


@native
def test_what_is_not_finite_in_one_of_several_windows_changes_nothing():
    unchanged_by_infinity(training("lstm, masks", accumulate=2))


def unchanged_by_infinity(made):
    list(itertools.islice(made.records(), 3))
    with torch.no_grad():
        made.model.weight_hq[2, 3] = torch.inf
    before = [p.clone() for p in (*made.model.parameters(), *made.carried.value)]
    with pytest.raises(WorkFailed, match="at step 4; it began in the parameter weight_hq"):
        made.update()
    after = [*made.model.parameters(), *made.carried.value]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_training_says_which_way_it_updates():
    made = training("elman")
    if KERNEL.library is not None:
        assert str(kernels.explain(made)) == "captured: no, the model is on cpu\nnative: runs"
    with pytest.raises(UserError, match="without an input"):
        kernels.explain(made.model.recurrence)
    with pytest.raises(UserError, match="a Linear, which runs on no elman kernel"):
        kernels.explain(torch.nn.Linear(2, 2))


def test_ids_beyond_the_vocabulary_are_refused_before_training():
    with pytest.raises(Exception, match="token ids 0 to 11 must lie in 0 to 10"):
        Training(LanguageModel(11, hidden_size=4), torch.arange(12).repeat(200))


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("sampling", ["sequential", "random"])
@pytest.mark.parametrize("shape", ["gru", "everything"])
def test_the_graph_of_several_windows_is_the_update_to_the_last_bit(shape, sampling):
    more = {"accumulate": 4, "reading": Reading(6, 11, sampling=sampling), "epochs": 5}
    graph, steps = (training(shape, "unclipped", "cuda", **more) for _ in range(2))
    assert told(graph.records()) == told(in_one_go(steps).records())
    assert getattr(graph._choice.update, "_graphs", None)
    pieces = told(in_pieces(training(shape, "unclipped", "cuda", **more)).records())
    again = training(shape, "unclipped", "cuda", **more)
    torch.testing.assert_close(
        torch.tensor(told(again.records())), torch.tensor(pieces), rtol=2e-3, atol=2e-4
    )


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("reading", CUT, ids=str)
@pytest.mark.parametrize("shape", ["gru", "lstm, masks", "tied"])
def test_on_a_gpu_segments_of_any_shape_have_graphs_once_they_come_often(shape, reading):
    """Of 80 and more updates; numbers are those of pieces, bits those of an uncaptured update."""
    more = {"reading": Reading(batch_size=6, window=9, **reading), "epochs": 9}
    made = [training(shape, "unclipped", "cuda", **more) for _ in range(3)]
    graphs, pieces, steps = made[0], in_pieces(made[1]), in_one_go(made[2])
    numbers = told(graphs.records())
    assert len(numbers) > 80
    assert 0 < len(getattr(graphs._choice.update, "_graphs", ())) < 40
    assert numbers == told(steps.records())
    first = 40  # roundings of both ways grow apart later
    torch.testing.assert_close(
        torch.tensor(numbers[:first]),
        torch.tensor(told(pieces.records(), first)),
        rtol=2e-3,
        atol=2e-4,
    )
    for one, other in zip(graphs.average.averages, steps.average.averages, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("carry", ["truncated", "randomized"])
def test_on_a_gpu_dropout_between_layers_is_that_of_an_update_in_pieces(carry):
    """Masks are given to the graph, drawn as the model draws them."""
    more = {"epochs": 4, "reading": Reading(batch_size=6, window=17, carry=carry)}
    made = {"whole": training("everything", "adamw", "cuda", **more)}
    made["pieces"] = in_pieces(training("everything", "adamw", "cuda", **more))
    numbers = {name: torch.tensor(told(t.records())) for name, t in made.items()}
    assert isinstance(made["whole"]._choice.update, CapturedUpdate)
    torch.testing.assert_close(numbers["whole"], numbers["pieces"], rtol=2e-3, atol=2e-4)
    other = torch.tensor(told(training("everything", "adamw", "cuda", seed=5, **more).records(), 9))
    assert not torch.allclose(other, numbers["pieces"][:9], rtol=2e-3), "masks matter that much"
    assert torch.equal(made["whole"].chance["cpu"], made["pieces"].chance["cpu"])


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_graph_is_the_update_to_the_last_bit(shape, optimiser, precision):
    graph = training(shape, optimiser, "cuda", precision=precision)
    steps = in_one_go(training(shape, optimiser, "cuda", precision=precision))
    assert told(graph.records()) == told(steps.records())
    assert isinstance(graph._choice.update, CapturedUpdate)
    assert len(graph._choice.update._graphs) == 1
    assert getattr(steps._choice.update, "_graphs", None) == {}
    for one, other in zip(graph.average.averages, steps.average.averages, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    "average", [{"average": "ema", "average_decay": 0.9}, {"average": "asgd", "average_start": 0.3}]
)
def test_a_gpu_averages_weights_without_waiting_to_the_bits_of_torchs_lerp(average):
    """The first shares are above a half, where torch rounds otherwise."""
    optimisation = dataclasses.replace(OPTIMISERS["adamw"], **average)
    own, torchs = (training("tied", "adamw", "cuda", optimisation=optimisation) for _ in range(2))
    assert own._choice.update.averages
    torchs._choice.update.averages = False
    assert told(own.records()) == told(torchs.records())
    assert own.average.count == torchs.average.count > 10
    assert own._choice.update.late > 18
    for one, other in zip(own.average.averages, torchs.average.averages, strict=True):
        assert torch.equal(one, other)
        assert not one.isnan().any()


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("sampling", ["sequential", "random"])
@pytest.mark.parametrize("shape", ["elman", "gru", "tied"])
def test_a_gpu_trains_as_a_cpu_does(shape, sampling):
    reading = Reading(batch_size=6, window=11, sampling=sampling)
    cpu = told(training(shape, "adamw", reading=reading).records())
    gpu = told(training(shape, "adamw", "cuda", reading=reading).records())
    torch.testing.assert_close(torch.tensor(gpu), torch.tensor(cpu), rtol=2e-2, atol=2e-3)  # TF32


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("shape", ["lstm, masks", "everything"])
@pytest.mark.parametrize("at", [1, 5, 13])
def test_a_gpu_goes_on_to_the_last_bit_after_loading(at, shape):
    made = training(shape, "unclipped", "cuda")
    whole = told(made.records())
    first = training(shape, "unclipped", "cuda")
    before = told(first.records(), at)
    tensors, numbers = first.state_dict()
    tensors = {name: t.cpu().clone() for name, t in tensors.items()}
    second = training(shape, "unclipped", "cuda")
    second.load_state_dict(tensors, numbers)
    assert before + told(second.records()) == whole


@pytest.mark.gpu
@on_gpu
def test_weights_may_leave_a_gpu_and_come_back():
    made, other = training("lstm, masks", "adamw", "cuda"), training("lstm, masks", "adamw", "cuda")
    first = told(made.records(), 5)
    made.model.cpu()
    taken = [torch.full_like(p, torch.nan, device="cuda") for p in made.model.parameters()]
    made.model.cuda()
    assert first + told(made.records()) == told(other.records())
    assert all(t.isnan().all() for t in taken), "nobody wrote where the weights once were"


@pytest.mark.gpu
@on_gpu
def test_a_run_of_the_cpu_goes_on_on_the_gpu_and_back():
    here = training("lstm, masks", "adamw")
    told(here.records(), 4)
    there = training("lstm, masks", "adamw", "cuda")
    there.load_state_dict(*here.state_dict())
    told(there.records(), 4)
    back = training("lstm, masks", "adamw")
    back.load_state_dict(*there.state_dict())
    assert back.step == 8
    assert all(n > 0 for n, _ in told(back.records()))


def read_on(records, seen, patience):
    """All further records, their numbers looked at once there are more than `patience`."""
    for record in records:
        seen.append(record)
        if len(seen) > patience:
            assert record.nats > 0


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("optimiser", ["sgd", "adamw", "unclipped"])  # the last averages, too
@pytest.mark.parametrize("look", ["never", "at once", "late"])
@pytest.mark.parametrize("carry", ["truncated", "randomized"])
def test_a_gpu_stops_exactly_where_a_nan_began(carry, look, optimiser):
    more = {"epochs": 9, "reading": Reading(batch_size=6, window=11, carry=carry)}
    made, other = (training("lstm, tokens", optimiser, "cuda", **more) for _ in range(2))
    records = made.records()
    exact = told(other.records(), 15)
    seen = [next(records) for _ in range(15)]
    before, numbers = other.state_dict()
    before = {name: t.cpu().clone() for name, t in before.items()}
    with torch.no_grad():
        made.model.weight_hq[2, 3] = torch.inf
    with pytest.raises(WorkFailed, match=f"at step {numbers['step'] + 1}; .*parameter weight_hq"):
        read_on(records, seen, {"never": 1000, "at once": 0, "late": 20}[look])
    assert told(seen[:15]) == exact
    with torch.no_grad():
        made.model.weight_hq[2, 3] = before["weights/weight_hq"][2, 3]
    after, counted = made.state_dict()
    assert {k: v for k, v in counted.items() if "seconds" not in k} == {
        k: v for k, v in numbers.items() if "seconds" not in k
    }
    for name, t in before.items():
        assert torch.equal(after[name].cpu(), t) or name.startswith("noise"), name
    if look != "never" and len(seen) > 15:
        with pytest.raises(WorkFailed, match=f"at step {numbers['step'] + 1}"):
            _ = seen[15].nats


@pytest.mark.gpu
@on_gpu
def test_a_gpus_records_are_those_of_an_update_that_waits():
    late, waiting = training("elman", "sgd", "cuda"), training("elman", "sgd", "cuda")
    assert late._choice.update.late > 18
    waiting._choice.update.late = 0
    first, second = list(late.records()), [r.json() for r in waiting.records()]
    timed = ("tokens_per_second",)
    for a, b in zip(first, second, strict=True):
        kept = {k: v for k, v in a.json().items() if k not in timed}
        assert kept == {k: v for k, v in b.items() if k not in timed}
