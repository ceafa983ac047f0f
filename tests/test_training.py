"""Training: every update against the plainest loop, and a state that holds all of it."""

import copy
import itertools
import math
import pickle
from collections import OrderedDict
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from elman import LanguageModel
from elman.errors import UserError, WorkFailed
from elman.gradients import Checkpointed, Chunked, Full, Randomized, Sliding, Stored, Truncated
from elman.language_model import Dropout
from elman.training import (
    CarriedState,
    Epoch,
    Optimisation,
    Reading,
    Settings,
    Training,
    Update,
    Validation,
    piecewise,
    segments,
)
from elman.training.optimisation import Average, clip_gradients, gradient_norm, learning_rate

VOCAB = 7
IDS = np.random.default_rng(0).integers(VOCAB, size=400).astype(np.uint8)
HELD_OUT = np.random.default_rng(1).integers(VOCAB, size=60).astype(np.uint8)
PLAIN = Optimisation(optimizer="sgd", learning_rate=1.0, clip=0.1)


def build(seed=0, **options):
    torch.manual_seed(seed)
    options = {"hidden_size": 5, "cell": "gru"} | options
    model = LanguageModel(VOCAB, **options).double()
    if options["cell"] != "mlp":  # gradients that are alive many steps back
        with torch.no_grad():
            for name, W in model.recurrence.named_parameters():
                if name.startswith("weight_hh"):
                    for gate in W.split(model.hidden_size):
                        nn.init.orthogonal_(gate, 1.5)
    return model


def training(model, reading, optimisation=PLAIN, **more):
    settings = Settings(reading=reading, optimisation=optimisation, **more)
    return Training(model, IDS, HELD_OUT, settings)


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def agree(found, expected, tolerance=1e-10):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


def nats(model, x, y, state=None):
    logits, state = model(x, state)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"), state


# ---------------------------------------------------------------------- updates


@pytest.mark.parametrize("cell", ["elman", "gru", "lstm", "mlp"])
@pytest.mark.parametrize("sampling", ["sequential", "random"])
def test_a_truncated_training_is_the_loop_of_the_notes(cell, sampling):
    """State carried and detached (or reset), mean loss, clipped, one step of gradient descent."""
    reading = Reading(batch_size=3, window=8, sampling=sampling)
    model, oracle = build(cell=cell), build(cell=cell)
    records = [r for r in training(model, reading, epochs=2).records() if isinstance(r, Update)]
    losses = []
    for epoch in range(2):
        batches = segments.one_pass(IDS, reading, seed=0, epoch=epoch)
        state = CarriedState()
        for x, y, *_ in (batches[i] for i in range(len(batches))):
            before = state.value if sampling == "sequential" else None
            total, after = nats(oracle, x, y, before)
            loss = total / y.numel()
            oracle.zero_grad()
            loss.backward()
            norm = math.sqrt(sum(g.square().sum().item() for g in gradients(oracle).values()))
            with torch.no_grad():
                for name, g in gradients(oracle).items():
                    oracle.get_parameter(name).sub_(min(1, 0.1 / norm) * g)
            state.carry(after)
            losses.append((loss.item(), norm))
    assert len(records) == len(losses)
    for record, (loss, norm) in zip(records, losses, strict=True):
        assert record.nats == pytest.approx(loss, rel=1e-9)
        assert record.gradient_norm == pytest.approx(norm, rel=1e-9)
    assert any(r.gradient_norm > 0.1 for r in records), "clipping was at work"
    agree(dict(model.named_parameters()), dict(oracle.named_parameters()), 1e-8)


def pass_gradient(model, reading):
    """The summed gradient of one pass, weights held still."""
    train = training(model, reading)
    reads = train.reads()
    model.zero_grad()
    for index in range(len(reads)):
        piecewise.read(train, reads[index], *train.prepare(reads[index]), 1.0, train.carried)
    return gradients(model)


def lane(reading):
    lanes = cast("Any", segments.one_pass(IDS, reading, seed=0, epoch=0)).lanes
    x, y = lanes.x, lanes.y
    return torch.from_numpy(x.astype("i8")), torch.from_numpy(y.astype("i8"))


@pytest.mark.parametrize("cell", ["elman", "lstm"])
@pytest.mark.parametrize("memory", [0, 4096])
@pytest.mark.parametrize("embedding_size", [None, 4])
def test_full_carry_is_autograd_through_the_whole_lane(cell, memory, embedding_size):
    reading = Reading(batch_size=3, window=8, carry="full", memory=memory)
    options = {"cell": cell, "layers": 2, "embedding_size": embedding_size}
    model, oracle = build(**options), build(**options)
    found = pass_gradient(model, reading)
    x, y = lane(reading)
    (nats(oracle, x, y)[0] / y.numel()).backward()
    agree(found, gradients(oracle))


@pytest.mark.parametrize(("window", "history"), [(8, 8), (5, 12), (8, 3)])
def test_sliding_carries_each_loss_through_history_and_window(window, history):
    reading = Reading(batch_size=2, window=window, carry="sliding", history=history)
    model, oracle = build(), build()
    found = pass_gradient(model, reading)
    x, y = lane(reading)
    with torch.no_grad():  # every state of the lane, from weights that hold still
        states = [None]
        for t in range(x.shape[1]):
            states.append(oracle(x[:, t : t + 1], states[-1])[1])
    for begin in range(0, x.shape[1] - window + 1, window):
        start, end = max(0, begin - history), begin + window
        logits, _ = oracle(x[:, start:end], states[start])
        late = logits[:, begin - start :].flatten(0, 1)
        F.cross_entropy(late, y[:, begin:end].flatten()).backward()
    agree(found, gradients(oracle))


@pytest.mark.parametrize("cell", ["elman", "lstm"])
@pytest.mark.parametrize("carry", ["randomized", "polynomial"])
def test_the_expected_randomised_gradient_is_the_full_one(cell, carry, monkeypatch):
    """Not by sampling: every pattern of cuts, weighted with its probability."""
    steps, window = 7, 3
    ids = IDS[: 2 * steps + 1 + window]
    reading = Reading(batch_size=2, window=window, carry=carry)
    model, oracle = build(cell=cell), build(cell=cell)
    draws = reading.carry_used.seeded(0).weights(4000)
    ages, age = {}, 0  # 1/π by the number of steps since the last cut, as the library draws it
    for xi in draws.tolist():
        age = 0 if xi == 0 else age
        ages.setdefault(age, xi) if xi > 1 else None
        age += 1

    def keep(age):
        return 1 / ages[age]

    total, certainty = None, 0.0
    monkeypatch.setattr(np.random, "default_rng", lambda seed: Zero())  # the lane starts at 0
    for cuts in itertools.product([False, True], repeat=steps - 1):
        xi, probability, age = [1.0], 1.0, 1
        for cut in cuts:
            probability *= 1 - keep(age) if cut else keep(age)
            xi.append(0.0 if cut else 1 / keep(age))
            age = 1 if cut else age + 1
        monkeypatch.setattr(
            Randomized, "weights", lambda *_, xi=tuple(xi): torch.tensor(xi, dtype=torch.float64)
        )
        train = Training(model, ids[: 2 * steps + 1], None, Settings(reading=reading))
        model.zero_grad()
        reads = train.reads()
        for index in range(len(reads)):
            piecewise.read(train, reads[index], *train.prepare(reads[index]), 1.0, train.carried)
        found = gradients(model)
        total = total or {n: torch.zeros_like(g) for n, g in found.items()}
        total = {n: t + probability * found[n] for n, t in total.items()}
        certainty += probability
    assert certainty == pytest.approx(1)
    x = torch.from_numpy(ids[: 2 * steps].astype("i8")).view(2, steps)
    y = torch.from_numpy(ids[1 : 2 * steps + 1].astype("i8")).view(2, steps)
    (nats(oracle, x, y)[0] / (2 * window)).backward()
    agree(total, gradients(oracle))
    truncated = pass_gradient(build(cell=cell), replace(reading, carry="truncated"))
    scale = max(g.abs().max() for g in gradients(oracle).values())
    assert any((truncated[n] - g).abs().max() > 1e-3 * scale for n, g in total.items())


@pytest.mark.parametrize(
    ("carry", "named"),
    [
        (Truncated(8), Reading(window=8)),
        (Sliding(every=8, steps=11), Reading(window=8, carry="sliding", history=3)),
        (Randomized(keep=1 - 1 / 8, seed=5), Reading(window=8, carry="randomized")),
        (Randomized.polynomial(mean=8, seed=5), Reading(window=8, carry="polynomial")),
        (Full(), Reading(carry="full")),
    ],
    ids=repr,
)
def test_a_carry_and_its_name_are_the_same_reading(carry, named):
    assert Reading(carry=carry) == named
    assert named.carry_used.seeded(0) == carry.seeded(0)
    assert isinstance(Reading(carry=carry).carry, str), "as config.json holds it"


def test_a_memory_and_its_bytes_are_the_same_reading():
    assert Reading(memory=Checkpointed(budget=4096)) == Reading(memory=4096)
    assert Reading(memory=Stored()) == Reading()
    assert Reading(memory=Checkpointed(every=3)).memory_used == Checkpointed(every=3)


@pytest.mark.parametrize(
    ("model", "reading", "said"),
    [
        (
            {"carry": Truncated(3)},
            Reading(3, 8, carry="full"),
            r"given carry=Truncated\(window=3\)",
        ),
        ({"carry": Truncated(3)}, Reading(3, 8), r"reads by Truncated\(window=8\)"),
        ({"carry": Randomized(0.5, seed=0)}, Reading(3, 8, carry="randomized"), "reads by Random"),
        ({"memory": Checkpointed(every=2)}, Reading(3, 8, memory=4096), "keeps by .*budget=4096"),
        ({"time": Chunked(4)}, Reading(3, 8, chunks=2), r"given time=Chunked\(chunks=4"),
    ],
    ids=str,
)
def test_a_model_and_a_reading_that_disagree_are_refused(model, reading, said):
    with pytest.raises(UserError, match=said):
        training(build(**model), reading)


@pytest.mark.parametrize(
    "reading",
    [Reading(3, 8), Reading(3, 8, carry="sliding", history=4), Reading(3, 8, carry="randomized")],
    ids=repr,
)
def test_a_model_given_the_readings_own_carry_learns_the_same(reading):
    carry = reading.carry_used.seeded(7)
    agree(pass_gradient(build(carry=carry), reading), pass_gradient(build(), reading))


@pytest.mark.parametrize("carry", ["truncated", "full", "randomized"])
def test_a_reading_leaves_the_models_carry_and_memory_as_they_were(carry):
    model, seen = build(), []
    own = model.recurrence.carry, model.recurrence.memory
    model.recurrence.register_forward_pre_hook(lambda rnn, _: seen.append(rnn.memory))
    train = training(model, Reading(3, 8, carry=carry, memory=8192))
    assert seen == [Checkpointed(budget=8192)], "tried on one step, before work begins"
    seen.clear()
    next(train.records())
    assert (model.recurrence.carry, model.recurrence.memory) == own == (Full(), Stored())
    assert carry == "full" or seen == [Checkpointed(budget=8192)], "but it was used"
    assert model.recurrence.memory.keeps_all


def test_a_model_with_a_memory_of_its_own_keeps_it_in_training():
    model, plain = build(memory=Checkpointed(every=3)), build()
    reading = Reading(3, 8, carry="full")
    agree(pass_gradient(model, reading), pass_gradient(plain, reading))
    assert model.recurrence.memory == Checkpointed(every=3)


class Zero:
    """Draws nothing but zeros."""

    def integers(self, *_):
        return 0


def test_accumulating_is_the_mean_of_the_gradients():
    reading = Reading(batch_size=3, window=8)
    model, oracle = build(), build()
    train = training(model, reading, replace(PLAIN, clip=None), accumulate=3)
    record = train.update()
    reads = segments.one_pass(IDS, reading, seed=0, epoch=0)
    state, losses = CarriedState(), 0.0
    for index in range(3):
        total, after = nats(oracle, reads[index].x, reads[index].y, state.value)
        state.carry(after)
        (total / (3 * 8) / 3).backward()
        losses += total.item()
    assert record.nats == pytest.approx(losses / (3 * 3 * 8))
    expected = {n: oracle.get_parameter(n).detach() - g for n, g in gradients(oracle).items()}
    agree(dict(model.named_parameters()), expected)


# ---------------------------------------------------------------------- optimisation


@pytest.mark.parametrize("theta", [0.1, 1.0, 5.0, 100.0, None])
def test_clipping_is_exactly_the_projection_of_the_notes(theta):
    parameters = [nn.Parameter(torch.zeros(3, 4).double()), nn.Parameter(torch.zeros(5).double())]
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0)).double()
    flat = torch.cat([p.grad.flatten() for p in parameters])
    expected = flat * min(1, (theta or math.inf) / flat.norm().item())
    assert clip_gradients(parameters, theta) == pytest.approx(flat.norm().item())
    found = torch.cat([p.grad.flatten() for p in parameters])
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    if theta is not None and theta < flat.norm():
        assert gradient_norm(parameters).item() == pytest.approx(theta, rel=1e-14)


def test_learning_rates():
    constant = Optimisation(learning_rate=2.0)
    assert learning_rate(constant, 100, 0.9, 1.0) == 2
    cosine = replace(constant, schedule="cosine")
    assert [learning_rate(cosine, 9, p, 1.0) for p in (0, 0.5, 1)] == pytest.approx([2, 1, 0])
    warm = replace(constant, warm_up=3)
    assert [learning_rate(warm, s, 0, 1.0) for s in range(5)] == [0.5, 1, 1.5, 2, 2]
    assert learning_rate(replace(constant, schedule="plateau"), 0, 0, 0.25) == 0.5


def test_averages_are_what_their_formulas_say():
    for kind in ("ema", "asgd"):
        layer = nn.Linear(2, 1)
        own = {"average_decay": 0.5} if kind == "ema" else {"average_start": 0.4}
        how = Optimisation(average=kind, **own)
        average = Average(layer, how)
        seen, expected = [], None
        for step in range(6):
            with torch.no_grad():
                layer.weight.fill_(float(step**2))
            average.update(progress=step / 6)
            if kind == "asgd" and step / 6 < 0.4:
                continue
            seen.append(float(step**2))
            n = len(seen)
            keep = 1 - 1 / n if kind == "asgd" else min(0.5, (n - 1) / (n + 8))
            expected = seen[-1] if expected is None else keep * expected + (1 - keep) * seen[-1]
        with average.applied():
            assert layer.weight[0, 0].item() == pytest.approx(expected, rel=1e-6)
        assert layer.weight[0, 0].item() == 25, "the latest weights are put back"


def test_weight_decay_pulls_on_matrices_alone():
    how = Optimisation(optimizer="adamw", weight_decay=0.5, learning_rate=1e-3)
    decayed, free = build(), build()
    next(training(decayed, Reading(3, 8), how).records())
    next(training(free, Reading(3, 8), replace(how, weight_decay=0)).records())
    for (name, p), q in zip(decayed.named_parameters(), free.parameters(), strict=True):
        assert torch.equal(p, q) == ("bias" in name), name


LEARNS = [
    *(("sgd", "truncated"), ("adam", "truncated"), ("adamw", "truncated")),
    *(("adamw", "sliding"), ("adamw", "randomized"), ("adamw", "polynomial")),
]


@pytest.mark.parametrize(("optimizer", "carry"), LEARNS)
def test_it_learns(optimizer, carry):
    ids = np.tile(np.arange(VOCAB, dtype=np.uint8), 100)
    rate = 1.0 if optimizer == "sgd" else 0.02
    how = Optimisation(optimizer=optimizer, learning_rate=rate)
    reading = Reading(4, 12, carry=carry, history=12 if carry == "sliding" else 0)
    torch.manual_seed(0)
    model = LanguageModel(VOCAB, cell="gru", hidden_size=12)
    records = list(
        Training(model, ids, ids, Settings(6, reading=reading, optimisation=how)).records()
    )
    assert isinstance(records[-1], Validation)
    assert records[-1].perplexity < 1.5 < records[0].perplexity


# ---------------------------------------------------------------------- the loop


def test_records_come_in_order_and_say_where_they_are():
    train = training(build(), Reading(3, 8), epochs=2, validate_every=7)
    records = list(train.records())
    updates = [r for r in records if isinstance(r, Update)]
    assert [r.step for r in updates] == list(range(1, len(updates) + 1))
    assert [r.epoch for r in updates] == sorted(r.epoch for r in updates)
    of_each = [sum(r.epoch == e for r in updates) for e in (0, 1)]
    parts = [(e + (i + 1) / n) / 2 for e, n in enumerate(of_each) for i in range(n)]
    assert [r.progress for r in updates] == pytest.approx(parts)
    assert updates[-1].progress == 1
    checked = [r.step for r in records if isinstance(r, Validation)]
    assert checked == [*range(7, len(updates), 7), len(updates)]
    assert all(r.perplexity == pytest.approx(math.exp(r.nats)) for r in records)
    assert list(train.records()) == [], "it is finished"


def test_validations_come_as_often_as_asked_and_at_the_end():
    def kinds(every):
        train = training(build(), Reading(3, 8), epochs=1, validate_every=every)
        return [type(r) for r in train.records() if not isinstance(r, Epoch)]

    n = kinds(0).count(Update)
    assert kinds(0) == [Update] * n + [Validation]
    assert kinds(1) == [Update, Validation] * n


def test_patience_stops_a_training_that_no_longer_gets_better():
    how = Optimisation(optimizer="sgd", learning_rate=1e-9)
    train = training(build(), Reading(3, 8), how, epochs=50, validate_every=2, patience=3)
    train.best = 0.0  # nothing will be better
    records = list(train.records())
    assert records[-1].step == 6
    assert not any(r.improved for r in records if isinstance(r, Validation))


def test_the_learning_rate_falls_on_a_plateau():
    how = Optimisation(schedule="plateau", plateau_patience=1, plateau_factor=0.1)
    train = training(build(), Reading(3, 8), how, epochs=2, validate_every=2)
    train.best = 0.0
    rates = [r.learning_rate for r in train.records() if isinstance(r, Update)]
    assert rates[:9] == pytest.approx([1e-3] * 4 + [1e-4] * 4 + [1e-5])


@pytest.mark.parametrize("where", ["weight_hq", "recurrence.weight_hh_l0"])
def test_a_loss_that_is_no_number_is_traced_to_where_it_began(where):
    train = training(build(), Reading(3, 8), replace(PLAIN, clip=None))
    train.update()
    with torch.no_grad():
        train.model.get_parameter(where)[0, 0] = math.nan
    with pytest.raises(WorkFailed, match=rf"step 2; it began in the parameter {where}") as failure:
        train.update()
    assert "smaller learning rate" in failure.value.hint
    assert "clipping to norm 1" in failure.value.hint


def test_a_gradient_that_is_no_number_is_traced_to_the_last_weights_that_have_it():
    train = training(build(), Reading(3, 8))
    train.model.weight_hq.register_hook(lambda g: g * math.inf)
    before = copy.deepcopy(train.model.state_dict())
    said = r"‖gradient‖ became (inf|nan) at step 1; it began in the gradient of weight_hq"
    with pytest.raises(WorkFailed, match=said) as failure:
        train.update()
    assert "clipping" not in failure.value.hint, "it was clipped to 0.1"
    agree(train.model.state_dict(), before, 0)


def test_updates_that_are_asked_for_one_by_one_are_told_pass_by_pass():
    train = training(build(), Reading(3, 8), epochs=3)
    made = [train.update() for _ in range(len(train.reads()) + len(train.reads(1)))]
    told = next(train.records())
    assert isinstance(told, Epoch)
    second = [r for r in made if r.epoch == 1]
    assert told.tokens == sum(r.tokens for r in second)
    assert told.nats == pytest.approx(sum(r.nats * r.tokens for r in second) / told.tokens)


def test_an_exploding_training_stops_before_it_harms_the_weights():
    how = Optimisation(optimizer="sgd", learning_rate=1e38, clip=None)
    train = training(build(cell="elman").float(), Reading(3, 8), how, epochs=50)
    with pytest.raises(WorkFailed, match="it began in"):
        list(train.records())


def test_bfloat16_trains_and_keeps_float32_weights():
    torch.manual_seed(0)
    model = LanguageModel(VOCAB, cell="lstm", hidden_size=8)
    settings = Settings(2, precision="bfloat16", reading=Reading(3, 8))
    records = list(Training(model, IDS, HELD_OUT, settings).records())
    assert all(math.isfinite(r.nats) for r in records)
    assert all(p.dtype == torch.float32 for p in model.parameters())


# ---------------------------------------------------------------------- exact resume

WHOLE = Dropout(tokens=0.1, inputs=0.1, layers=0.2, outputs=0.2, recurrent=0.2)
RESUMED = {
    "lstm, all dropout, ema": (
        {"cell": "lstm", "layers": 2, "embedding_size": 4, "dropout": WHOLE},
        Reading(3, 8),
        Optimisation(optimizer="adamw", weight_decay=0.1, schedule="cosine", average="ema"),
    ),
    "momentum, plateau, asgd": (
        {"cell": "elman"},
        Reading(3, 8),
        Optimisation(
            "sgd", 0.1, momentum=0.9, schedule="plateau", plateau_patience=0, average="asgd"
        ),
    ),
    "random sampling": ({}, Reading(3, 8, sampling="random"), Optimisation("adam")),
    "sliding": ({}, Reading(3, 8, carry="sliding", history=11), Optimisation()),
    "randomized": ({}, Reading(3, 8, carry="randomized"), Optimisation()),
    "full": ({"cell": "lstm"}, Reading(3, 8, carry="full", memory=8192), Optimisation()),
    "mlp": ({"cell": "mlp", "dropout": Dropout(outputs=0.2)}, Reading(3, 8), Optimisation()),
}


@pytest.mark.parametrize(("options", "reading", "how"), RESUMED.values(), ids=RESUMED.keys())
def test_a_training_saved_at_any_record_goes_on_to_the_last_bit(options, reading, how):
    several = 1 if reading.carry == "full" else 2
    every = {"validate_every": 5, "accumulate": several}

    def start():
        return training(build(**options).float(), reading, how, epochs=2, **every)

    unbroken = start()
    records = [without_clock(r) for r in unbroken.records()]
    for stop in {1, 5, 6, len(records) - 1} & set(range(len(records))):
        first = start()
        for _, _ in zip(range(stop), first.records(), strict=False):
            pass
        tensors, numbers = first.state_dict()
        saved = {name: t.clone() for name, t in tensors.items()}
        torch.manual_seed(stop)  # nothing may depend on the global generator
        again = start()
        again.load_state_dict(saved, numbers)
        rest = [without_clock(r) for r in again.records()]
        assert rest == records[stop:], stop
        for name, tensor in unbroken.state_dict()[0].items():
            assert torch.equal(tensor, again.state_dict()[0][name]), name


@pytest.mark.parametrize(("options", "reading", "how"), RESUMED.values(), ids=RESUMED.keys())
@pytest.mark.parametrize("way", ["loaded", "deepcopy", "pickle"])
def test_a_training_and_its_copy_go_on_each_by_itself(options, reading, how, way):
    unbroken = training(build(**options).float(), reading, how, epochs=2)
    records = [without_clock(r) for r in unbroken.records()]
    one = training(build(**options).float(), reading, how, epochs=2)
    for _, _ in zip(range(3), one.records(), strict=False):
        pass
    if way == "loaded":  # the tensors as they are, not copied
        other = training(build(seed=1, **options).float(), reading, how, epochs=2)
        other.load_state_dict(*one.state_dict())
    else:
        other = copy.deepcopy(one) if way == "deepcopy" else pickle.loads(pickle.dumps(one))
    pairs = [*zip(one.records(), other.records(), strict=True)]  # in turns
    assert pairs[0][1].step > 0
    for before, both in zip(records[-len(pairs) :], pairs, strict=True):
        assert without_clock(both[0]) == without_clock(both[1]) == before
    assert other.explain().runs == unbroken.explain().runs
    for p, q in zip(unbroken.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_training_that_is_taken_back_to_its_beginning_draws_the_same_again():
    """Nothing was drawn when it was saved: its noise is a seed, and no generator yet."""

    def begun(seed):
        dropout = replace(WHOLE, zoneout=0.2)
        model = build(seed, layers=2, embedding_size=4, dropout=dropout)
        return training(model, Reading(3, 8), Optimisation(average="ema"))

    one, other = begun(0), begun(1)
    saved = copy.deepcopy(one.state_dict())
    first = [without_clock(one.update()) for _ in range(3)]
    other.update()
    for train in (one, other):
        train.load_state_dict(*saved)
        assert [without_clock(train.update()) for _ in range(3)] == first


def without_clock(record):
    return (
        replace(record, tokens_per_second=0.0) if hasattr(record, "tokens_per_second") else record
    )


def test_training_leaves_the_global_generator_alone():
    train = training(build(layers=2, dropout=Dropout(layers=0.5)), Reading(3, 8))
    before = torch.get_rng_state()
    train.update()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dropout", [Dropout(layers=0.5), Dropout(zoneout=0.2)])
@pytest.mark.usefixtures("hastily")
def test_beginning_a_training_leaves_the_global_generator_alone(dropout):
    model = build(layers=2, dropout=dropout)
    before = torch.get_rng_state()
    training(model, Reading(3, 8, memory=8192))
    assert torch.equal(torch.get_rng_state(), before)


# ---------------------------------------------------------------------- carried state


def test_a_carried_state_detaches_any_nest():
    made = torch.ones(1, 2, 3, requires_grad=True) * 2
    state = CarriedState()
    state.carry({"h": [made, None], "c": (made, (made,)), "none": ()})
    assert not state.value["h"][0].requires_grad
    assert state.value["h"][1] is None
    restored = CarriedState()
    restored.load_state_dict(state.state_dict())
    assert restored.value["none"] == ()
    assert torch.equal(restored.value["c"][1][0], made)
    assert isinstance(restored.value["h"], list)
    assert restored.value["h"][1] is None


def test_a_carried_state_moves_to_a_device_whole():
    state = CarriedState((torch.ones(1, 2, 3), {"c": [torch.ones(1, 2, 3), None]}))
    state.to("meta")
    assert state.value[0].is_meta
    assert state.value[1]["c"][0].is_meta
    assert state.value[1]["c"][1] is None


def test_a_carried_state_of_nothing_comes_back_as_nothing():
    restored = CarriedState(torch.ones(1))
    restored.load_state_dict(CarriedState().state_dict())
    assert restored.value is None


def test_rows_are_reset_by_mask():
    state = CarriedState((torch.ones(2, 3, 4), torch.ones(2, 3, 5)))
    state.reset(torch.tensor([False, True, False]))
    for tensor in state.value:
        assert not tensor[:, 1].any()
        assert tensor[:, [0, 2]].all()
    rows_first = CarriedState(torch.ones(3, 4), batch_dim=0)
    rows_first.reset(torch.tensor([True, False, False]))
    assert rows_first.value.sum(1).tolist() == [0, 4, 4]
    rows_first.reset()
    assert rows_first.value is None


KEYS = {
    "numbers": [0, 1, -3],
    "both": [0, "0", "#0"],
    "nothing": ["", "a"],
    "marks": ["a/b", "a", "a%2Fb", "a%252Fb", "%", "", "{"],
}


@pytest.mark.parametrize("keys", KEYS)
def test_a_carried_state_comes_back_with_the_keys_of_its_dicts(keys):
    inner = OrderedDict((key, torch.tensor(float(i))) for i, key in enumerate(KEYS[keys]))
    restored = CarriedState()
    restored.load_state_dict(CarriedState({key: [inner] for key in KEYS[keys]}).state_dict())
    assert restored.value == {key: [dict(inner)] for key in KEYS[keys]}


def test_what_is_no_carried_state_is_neither_saved_nor_loaded():
    with pytest.raises(UserError, match=r"a state with the key \(1, 2\) cannot be saved"):
        CarriedState({(1, 2): torch.ones(1)}).state_dict()
    with pytest.raises(UserError, match="of no carried state: state is not among them"):
        CarriedState().load_state_dict({"weights/h": torch.ones(1)})


@pytest.mark.parametrize("rows", [torch.tensor([1, 0, 0]), torch.tensor([True])])
def test_a_mask_that_does_not_fit_is_refused(rows):
    with pytest.raises(UserError, match="one bool for each row"):
        CarriedState(torch.ones(2, 3, 4)).reset(rows)


def test_a_state_of_something_else_is_refused():
    with pytest.raises(UserError, match="cannot hold a str"):
        CarriedState().carry(["h"])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Settings(epochs=0), "at least 1"),
        (lambda: Settings(precision="float16"), "float32, bfloat16"),
        (lambda: Settings(patience=-1), "patience=-1"),
        (lambda: Optimisation(optimizer="lion"), "sgd, adam, adamw"),
        (lambda: Optimisation(learning_rate=0), "learning_rate=0 must be positive"),
        (lambda: Optimisation(clip=0), "clip=None never clips"),
        (lambda: Optimisation(momentum=0.9), "means nothing with optimizer=adam"),
        (lambda: Optimisation(average_decay=1.0), "below 1"),
        (lambda: training(build(cell="mlp"), Reading(3, 8, carry="full")), "an mlp"),
        (lambda: Training(build(), IDS, IDS[:1], Settings(reading=Reading(3, 8))), "1 held-out"),
        (lambda: Training(build(), IDS[:20], None), "20 tokens"),
        (lambda: Training(build(), IDS, HELD_OUT + 1), "token ids 1 to 7 must lie in 0 to 6"),
        (lambda: Training(build(), IDS, None, cast("Any", 3)), "settings=3 must be of the type"),
        (lambda: Training(build().requires_grad_(False), IDS), "nothing to train; model.requires_"),
    ],
)
def test_refusals_come_at_the_call(make, said):
    with pytest.raises(UserError, match=said):
        make()
