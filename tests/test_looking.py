"""What the owner of a model has changed about it is seen: hooks, and weights that are computed."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from elman.diagnostics import attribute, glance, telling
from elman.errors import UserError
from elman.generation import generate
from elman.gradients import Checkpointed, Full, Truncated
from elman.kernels import explain
from elman.language_model import Dropout, LanguageModel
from elman.language_model.looking import Watch, weights_of
from elman.training import Optimisation, Reading, Settings, Training

IDS = np.random.default_rng(0).integers(0, 9, 200)


class Whole(nn.Module):
    """A model that is called as a whole, as any other module is."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, state=None):
        return self.model(ids, state)


def model_with(change):
    torch.manual_seed(0)
    model = LanguageModel(9, cell="gru", hidden_size=6, embedding_size=5).double()
    for p in model.parameters():
        p.data *= 3
    change(model)
    return model


def nothing(model):
    pass


def weight_norm(model):
    parametrizations.weight_norm(model.recurrence, "weight_hh_l0")


def weight_norm_of_inputs(model):
    parametrizations.weight_norm(model.recurrence, "weight_ih_l0")


def weight_norm_of_outputs(model):
    parametrizations.weight_norm(model, "weight_hq")


def spectral_norm(model):
    parametrizations.spectral_norm(model.recurrence, "weight_hh_l0")


def pruned(model):
    prune.l1_unstructured(model.recurrence, "weight_hh_l0", amount=0.5)


def hook(model):
    model.recurrence.register_forward_hook(lambda module, given, out: (out[0] * 2, out[1]))


def hook_before(model):
    model.recurrence.register_forward_pre_hook(lambda module, given: (given[0] * 2, given[1]))


def hook_on_embedding(model):
    model.embedding.register_forward_hook(lambda module, given, out: out * 2)


def hook_on_gradient(model):
    model.recurrence.weight_hh_l0.register_hook(torch.zeros_like)


def hook_after_gradient(model):
    def zeroed(p):
        p.grad.zero_()

    model.weight_hq.register_post_accumulate_grad_hook(zeroed)


CHANGES = (
    nothing,
    weight_norm,
    weight_norm_of_inputs,
    weight_norm_of_outputs,
    spectral_norm,
    pruned,
    hook,
    hook_before,
    hook_on_embedding,
    hook_on_gradient,
    hook_after_gradient,
)


def settings(carry="truncated"):
    return Settings(epochs=3, reading=Reading(batch_size=2, window=5, carry=carry))


@pytest.mark.parametrize("carry", ["truncated", "full"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_training_moves_what_autograd_would_move(change, carry):
    parted, whole = model_with(change), model_with(change)
    one = Training(parted, IDS, None, settings(carry))
    two = Training(Whole(whole), IDS, None, settings(carry))
    for _ in range(3):
        a, b = one.update(), two.update()
        assert a.nats == pytest.approx(b.nats, rel=1e-12)
        assert a.gradient_norm == pytest.approx(b.gradient_norm, rel=1e-10)
    for p, q in zip(parted.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_written_is_what_the_model_would_say(change):
    model, text, written = model_with(change).eval(), [1, 2, 3], []
    for _ in range(20):
        with torch.no_grad():
            logits = model(torch.tensor([text]))[0][0, -1]
        written.append(1 + int(logits[1:].argmax()))
        text.append(written[-1])
    assert list(generate(model, [1, 2, 3], 20, temperature=0)) == written


@pytest.mark.parametrize("change", CHANGES[:6])
def test_a_look_at_the_gradient_sees_the_weights_as_they_are_used(change):
    model = model_with(change)
    plain = model_with(nothing)
    plain.load_state_dict(weights_of(model, plain.state_dict()))
    before = copy.deepcopy({n: t.clone() for n, t in model.state_dict().items()})
    assert glance(model, IDS, 5) == glance(plain, IDS, 5)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def moved(model):
    model.recurrence.weight_hh_l0.data = model.recurrence.weight_hh_l0.data.clone()


def frozen(model):
    model.bias_q.requires_grad_(False)


def another_parameter(model):
    model.weight_hq = nn.Parameter(model.weight_hq.detach().clone())


def another_part(model):
    model.recurrence = copy.deepcopy(model.recurrence)


def one_part_more(model):
    model.spare = nn.Linear(2, 3)


def another_carry(model):
    model.recurrence.carry = Truncated(window=3)


def another_memory(model):
    model.recurrence.memory = Checkpointed(every=2)


LATER = (moved, frozen, another_parameter, another_part, one_part_more)


@pytest.mark.parametrize("change", [*CHANGES[1:], *LATER, another_carry, another_memory])
def test_a_watch_sees_every_change_and_none_where_weights_move_in_place(change):
    model = model_with(nothing)
    watch = Watch(model, model.recurrence)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    torch.stack([p.sum() for p in model.parameters()]).sum().backward()
    model.eval()
    assert not watch.sees_a_change()
    change(model)
    assert watch.sees_a_change()


def test_a_watch_sees_that_a_hook_is_gone():
    model = model_with(nothing)
    hooks = model.recurrence.register_forward_hook(print), model.bias_q.register_hook(print)
    for taken in hooks:
        watch = Watch(model)
        taken.remove()
        assert watch.sees_a_change()


def test_a_watch_takes_parameters_that_lie_nowhere():
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2, device="meta"))
    watch = Watch(model)
    assert not watch.sees_a_change()
    model[0].register_forward_hook(print)
    assert watch.sees_a_change()


def test_an_update_in_one_go_is_told_that_weights_may_lie_elsewhere():
    training, looked = Training(model_with(nothing), IDS, None, settings()), []
    training._choice.update.look_again = lambda: looked.append(training.step)
    training.update()
    training.update()
    assert looked == [0]  # before the first update nothing had been looked at
    moved(training.model)
    training.update()
    assert looked == [0, 2]


def test_a_hook_is_heard_from_the_next_update_on_and_no_longer_once_it_is_removed():
    model, calls = model_with(nothing), []
    training = Training(model, IDS, None, settings())
    way = training.explain().runs
    training.update()
    heard = model.recurrence.register_forward_hook(lambda *given: calls.append(given))
    training.update()
    assert len(calls) == 1
    assert training.explain().runs == "piecewise"
    assert "hook" in str(training.explain())
    heard.remove()
    training.update()
    assert len(calls) == 1
    assert training.explain().runs == way


@pytest.mark.parametrize("dropout", [Dropout(), Dropout(outputs=0.3, recurrent=0.2, zoneout=0.2)])
@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.usefixtures("hastily")
def test_an_update_that_a_hook_breaks_off_is_made_again_as_if_it_had_not_begun(dropout, at):
    def begun():
        torch.manual_seed(0)
        model = LanguageModel(9, cell="lstm", hidden_size=6, embedding_size=5, dropout=dropout)
        reading = Reading(batch_size=2, window=5)
        return Training(model, IDS, None, Settings(epochs=1, accumulate=3, reading=reading))

    unbroken, broken = begun(), begun()
    for _ in range(at):
        assert unbroken.update().nats == broken.update().nats
    for segment in range(3):
        calls = iter(range(3))

        def break_off(*given, calls=calls, segment=segment):
            if next(calls) == segment:
                raise ArithmeticError

        hook = broken.model.recurrence.register_forward_hook(break_off)
        with pytest.raises(ArithmeticError):
            broken.update()
        hook.remove()
    records = zip(unbroken.records(), broken.records(), strict=True)
    assert all(a.nats == b.nats for a, b in records)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_weight_that_is_frozen_later_stands_still_from_then_on(optimizer):
    model = model_with(nothing)
    given = Optimisation(optimizer=optimizer, learning_rate=0.1)
    reading = Reading(batch_size=2, window=5)
    training = Training(model, IDS, None, Settings(reading=reading, optimisation=given))
    training.update()
    frozen, other = model.recurrence.weight_hh_l0, model.weight_hq
    frozen.requires_grad_(False)
    before, moving = frozen.clone(), other.detach().clone()
    training.update()
    assert torch.equal(frozen, before)
    assert not torch.equal(other, moving)
    frozen.requires_grad_()
    training.update()
    assert not torch.equal(frozen, before)


def test_a_carry_that_is_changed_later_and_does_not_agree_is_refused():
    model = model_with(nothing)
    training = Training(model, IDS, None, settings())
    training.update()
    model.recurrence.carry = Truncated(window=2)
    with pytest.raises(UserError, match=r"Truncated\(window=2\)"):
        training.update()


def test_a_memory_that_is_changed_later_is_kept_by():
    models = [model_with(nothing) for _ in range(2)]
    one, two = (Training(model, IDS, None, settings()) for model in models)
    for training in (one, two):
        training.update()
    models[1].recurrence.memory = Checkpointed(every=2)
    assert one.update().nats == pytest.approx(two.update().nats, rel=1e-12)
    assert two.explain().runs == "piecewise"


def test_a_parametrized_matrix_is_not_thinned_out_in_silence():
    model = LanguageModel(9, hidden_size=6, dropout=Dropout(recurrent=0.5))
    weight_norm(model)
    with pytest.raises(UserError, match="weight_hh_l0, which is parametrized"):
        model(torch.zeros(1, 3, dtype=torch.int64))
    model.eval()(torch.zeros(1, 3, dtype=torch.int64))


def test_an_output_layer_that_a_hook_makes_is_refused():
    model = model_with(lambda m: prune.l1_unstructured(m, "weight_hq", amount=0.5))
    with pytest.raises(UserError, match="weight_hq is made by a hook"):
        Training(model, IDS, None, settings())
    Training(Whole(model), IDS, None, settings()).update()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("carry", [Full(), Truncated(window=2)])
def test_an_attribution_is_by_the_whole_gradient_and_changes_nothing(mode, carry):
    model, exact = model_with(nothing), model_with(nothing)
    model.recurrence.carry = carry
    model.train()
    model.embedding.eval()
    modes = [part.training for part in model.modules()]
    wanted = attribute(exact.eval(), IDS[:12])
    with mode():
        found = attribute(model, IDS[:12])
        telling(model, IDS[:60], context=10)
    assert np.abs(wanted.gradient[:5]).max() > 0
    np.testing.assert_allclose(found.gradient, wanted.gradient, rtol=1e-12)
    np.testing.assert_allclose(found.left_out, wanted.left_out, rtol=1e-12)
    assert [part.training for part in model.modules()] == modes
    assert model.recurrence.carry == carry


def test_a_question_about_a_call_takes_no_step_of_a_parametrization():
    model = model_with(spectral_norm)
    before = [b.clone() for b in model.buffers()]
    xs = torch.randn(4, 2, 5, dtype=torch.float64)
    assert explain(model.recurrence, xs).runs
    step = model.stepper(rows=2)
    assert step is not None
    step(torch.tensor([1, 2]))
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    model.recurrence(xs)
    assert not all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
