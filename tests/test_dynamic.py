"""Models that learn from the text they are tested on: after it was scored, and by the rule."""

import json
import math

import numpy as np
import pytest
import torch

import elman
from elman import LanguageModel, Vocab, evaluation, kernels
from elman.cli import run as cli
from elman.counting.ngram import NgramModel
from elman.errors import UserError
from elman.scoring import dynamic
from elman.scoring.cache import cache_scores, hidden_states
from elman.scoring.dynamic import Adaptation, adapted_scores, choose, gradient_sizes
from elman.scoring.online import mix_online, reading_on

TEXT = "the time traveller for so it will be convenient to speak of him " * 6
VOCAB = Vocab(TEXT)
IDS = np.asarray(VOCAB.encode(TEXT))


def model_of(cell="lstm", hidden=6, **options):
    torch.manual_seed(1)
    return LanguageModel(len(VOCAB), cell=cell, hidden_size=hidden, **options).double()


def trained():
    """A model that knows its text a little."""
    model = model_of(hidden=12)
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    ids = torch.as_tensor(IDS).long()[None]
    for _ in range(25):
        logits, _ = model(ids[:, :-1])
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]).backward()
        optimiser.step()
    model.zero_grad()
    return model


def plainly(model, ids, sigma, rate, decay, window):
    """The rule, one window after another, written with nothing but autograd."""
    weights = dict(model.named_parameters())
    trained = {n: w.detach().clone() for n, w in weights.items()}
    mean = sum(s.sum() for s in sigma.values()) / sum(s.numel() for s in sigma.values())
    scores, state = [], None
    for start in range(0, len(ids) - 1, window):
        nats = torch.zeros(())
        steps = range(start, min(start + window, len(ids) - 1))
        for t in steps:
            logits, state = model(torch.tensor([[int(ids[t])]]), state)
            nats = nats - logits[0, 0].log_softmax(-1)[int(ids[t + 1])]
            scores.append(logits[0, 0].log_softmax(-1)[int(ids[t + 1])].item())
        for w in weights.values():
            w.grad = None
        (nats / len(steps)).backward()
        state = tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()
        with torch.no_grad():
            for n, w in weights.items():
                step = rate * w.grad / (sigma[n] + 0.1 * mean)
                back = torch.clamp(decay * sigma[n] / mean, max=1) * (trained[n] - (w - step))
                w += back - step
    return np.array(scores)


@pytest.mark.parametrize("cell", ["lstm", "gru", "elman"])
@pytest.mark.parametrize("decay", [0.0, 0.01, 50.0])
def test_the_rule_is_that_of_the_paper(cell, decay):
    model = model_of(cell)
    sigma = gradient_sizes(model, IDS[:200], window=7)
    found = adapted_scores(model, IDS[200:], sigma, Adaptation(0.003, decay, 7))
    static = adapted_scores(model, IDS[200:], sigma, Adaptation(0.0, 0.0, 7))
    expected = plainly(model, IDS[200:], sigma, 0.003, decay, 7)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert np.abs(found - static).max() > 1e-3, "living: it has learnt"


def test_sigma_is_the_root_mean_square_of_the_gradients_of_the_training_text():
    model = model_of("gru")
    found = gradient_sizes(model, IDS[:81], window=20)  # 4 lanes of 20 steps: one batch
    x, y = (torch.as_tensor(IDS[i : 80 + i].reshape(4, 20)).long() for i in (0, 1))
    logits, _ = model(x)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
    for name, w in model.named_parameters():
        torch.testing.assert_close(found[name], w.grad.abs(), rtol=1e-9, atol=1e-12)


def test_no_window_is_learnt_from_before_it_is_scored():
    model = model_of()
    sigma = gradient_sizes(model, IDS[:200])
    changed = IDS[200:280].copy()
    changed[60:] = (changed[60:] + 1) % len(VOCAB)
    settings = Adaptation(0.01, 0.0, 20)
    ours, theirs = (adapted_scores(model, t, sigma, settings) for t in (IDS[200:280], changed))
    np.testing.assert_array_equal(ours[:59], theirs[:59])
    assert (ours[60:] != theirs[60:]).any()


def test_the_model_is_left_as_it_was():
    model = model_of().train()
    before = {n: w.detach().clone() for n, w in model.named_parameters()}
    sigma = gradient_sizes(model, IDS[:100])
    adapted_scores(model, IDS, sigma, Adaptation(0.1, 0.0))
    assert model.training
    assert all(torch.equal(w, before[n]) and w.grad is None for n, w in model.named_parameters())


def test_choosing_finds_what_helps_and_reads_validation_alone():
    model = trained()
    sigma, other_text = gradient_sizes(model, IDS[:200]), np.tile(IDS[63::-1], 6)
    found = choose(model, sigma, other_text)
    here = -adapted_scores(model, other_text, sigma, found).mean()
    other = Adaptation(found.rate, 2 * found.decay)
    assert here <= -adapted_scores(model, other_text, sigma, other).mean()
    assert here < -adapted_scores(model, other_text, sigma, Adaptation()).mean() - 0.01
    assert here < -adapted_scores(model, other_text, sigma, Adaptation(0.0, 0.0)).mean() - 0.1


def test_a_rate_under_which_the_model_diverges_is_halved_until_it_does_not():
    model = model_of("relu")
    sigma, start = gradient_sizes(model, IDS[:200]), Adaptation(rate=200.0)
    assert not np.isfinite(adapted_scores(model, IDS, sigma, start)).all()
    assert not np.isfinite(adapted_scores(model, IDS, sigma, Adaptation(rate=100.0))).all()
    found = choose(model, sigma, IDS, start)
    assert np.isfinite(adapted_scores(model, IDS, sigma, found)).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rate": -1.0}, "rate=-1.0 must be at least 0"),
        ({"rate": math.inf}, "rate=inf must be finite"),
        ({"window": 0}, "window=0 must be at least 1"),
    ],
)
def test_impossible_settings_are_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        Adaptation(**wrong)


def test_the_sizes_of_another_model_are_refused():
    sigma = gradient_sizes(model_of("gru"), IDS[:100])
    sigma.pop("bias_q")
    with pytest.raises(UserError, match="not those of this model"):
        adapted_scores(model_of("gru"), IDS, sigma, Adaptation())
    with pytest.raises(UserError, match="fewer than a window"):
        gradient_sizes(model_of(), IDS[:5], window=20)
    with pytest.raises(UserError, match="no validation text"):
        choose(model_of(), sigma, IDS[:1])


def test_a_model_of_which_nothing_may_learn_is_refused():
    model = model_of("gru")
    sigma = gradient_sizes(model, IDS[:100])
    model.requires_grad_(False)
    with pytest.raises(UserError, match="cannot learn"):
        gradient_sizes(model, IDS[:100])
    with pytest.raises(UserError, match="cannot learn"):
        adapted_scores(model, IDS, sigma, Adaptation())


# ---------------------------------------------------------------------- cache, counts, weights


def test_a_cache_is_the_sum_over_the_recent_past():
    model = model_of()
    hs = hidden_states(model, IDS).double()
    found = cache_scores(hs, IDS, size=30, theta=0.7)
    for t in (1, 5, 29, 30, 31, 100, 300):
        weights = np.zeros(len(VOCAB))
        for i in range(max(0, t - 30), t):
            weights[IDS[i + 1]] += math.exp(0.7 * float(hs[t] @ hs[i]))
        with np.errstate(divide="ignore"):
            expected = np.log(weights[IDS[t + 1]] / weights.sum())
        assert found[t] == pytest.approx(expected, rel=1e-9)
    assert found[0] == -np.inf
    assert len(found) == len(IDS) - 1


def test_a_last_token_that_the_model_does_not_know_is_refused():
    """It is predicted and never read, so that the model itself is not asked."""
    model, unknown = model_of("gru"), np.append(IDS[:100], 99)
    with pytest.raises(UserError, match="99 must lie in 0 to"):
        adapted_scores(model, unknown, gradient_sizes(model, IDS[:100]), Adaptation())
    with pytest.raises(UserError, match="99 must lie in 0 to"):
        gradient_sizes(model, unknown)


def test_a_model_without_states_has_no_cache():
    with pytest.raises(UserError, match="has none"):
        hidden_states(model_of("mlp"), IDS)


def test_online_weights_never_look_ahead_and_find_the_better_model():
    rng = np.random.default_rng(0)
    log_p = np.log(rng.uniform(0.1, 0.9, (3, 400)) * [[0.3], [1.0], [0.5]])
    found = mix_online(log_p, rate=0.3)
    changed = log_p.copy()
    changed[:, 200:] = changed[::-1, 200:]
    other = mix_online(changed, rate=0.3)
    np.testing.assert_array_equal(found.log_p[:200], other.log_p[:200])
    w = np.full(3, 1 / 3)
    for t in range(50):  # the rule, plainly
        p = np.exp(log_p[:, t])
        assert found.log_p[t] == pytest.approx(math.log(w @ p), rel=1e-12)
        w = w * np.exp(0.3 * w * (p / (w @ p) - 1))
        w /= w.sum()
    assert found.weights.argmax() == 1
    with pytest.raises(UserError, match="impossible"):
        mix_online(np.full((2, 3), -np.inf))


def test_counting_goes_on_with_what_was_read_and_nothing_more():
    def fit(text):
        return NgramModel.fit(text, order=3, vocab_size=len(VOCAB))

    found = reading_on(fit, IDS[:100], IDS[100:180], every=30)
    for t in (0, 29, 30, 78):
        start = 1 + t // 30 * 30
        model = fit(IDS[: 100 + start])
        expected = model.log_probabilities(IDS[101 + t : 102 + t], IDS[: 101 + t])[0]
        assert found[t] == pytest.approx(expected, rel=1e-12)


def test_evaluation_has_static_and_learning_rows(tiny_run, capsys):
    path = str(tiny_run())
    assert cli(["evaluate", path, "--adapt", "--mix", "kneser-ney:3", "--cache", "50"]) == 0
    said = capsys.readouterr().out
    for row in ("this run: lstm", "this run, adapting (rate", "mixture ", "learning mixture "):
        assert row in said
    assert cli(["evaluate", path, "--adapt", "--mix", "kneser-ney:3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["adapted"].keys() >= {"nats_per_token", "settings", "bits_per_char"}
    assert found["online_mixture"]["weights"].keys() == {"adapting model", "kneser-ney:3"}
    assert found["adapted"]["nats_per_token"] != found["nats_per_token"]
    rate = ["--adapt-rate", "0", "--adapt-decay", "0"]
    assert cli(["evaluate", path, "--adapt", *rate, "--json"]) == 0
    still = json.loads(capsys.readouterr().out)
    assert still["adapted"]["nats_per_token"] == pytest.approx(found["nats_per_token"], rel=1e-5)
    assert still["online_mixture"] is None


def test_settings_and_weights_come_from_validation_alone(monkeypatch):
    model, read = model_of(hidden=8), []
    adapted = dynamic.adapted

    def watched(model, ids, *others):
        read.append(np.asarray(ids).tolist())
        return adapted(model, ids, *others)

    monkeypatch.setattr(dynamic, "adapted", watched)
    monkeypatch.setattr(evaluation, "adapted", watched)
    train, validation, test = IDS[:200], IDS[200:260], IDS[260:]
    found = evaluation.evaluate(
        model, VOCAB, test, train=train, mix=["kneser-ney:3"], validation=validation, adapt=True
    )
    assert read[-1] == test.tolist()
    assert all(text == validation.tolist() for text in read[:-1])
    assert len(read) > 3
    fitted = evaluation.evaluate(
        model, VOCAB, validation, train=train, mix=["kneser-ney:3"], validation=validation
    )
    assert found.mixture.weights == fitted.mixture.weights


def test_adapting_needs_what_it_was_trained_on(tiny_run, capsys):
    with pytest.raises(UserError, match="adapting needs the training text"):
        evaluation.evaluate(model_of(), VOCAB, IDS, adapt=True)
    path = str(tiny_run())
    for options, message in (
        (["--adapt", "--no-baselines"], "--adapt measures the training text"),
        (["--adapt-rate", "1"], "--adapt-rate belongs to --adapt"),
        (["--part", "training"], "unknown part 'training'"),
        (["--adapt", "--chunks", "4"], "leaves nothing to cut into --chunks"),
    ):
        assert cli(["evaluate", path, *options]) == 2
        assert message in capsys.readouterr().err


def test_weights_that_become_no_numbers_are_no_score(tiny_run, capsys):
    words = ["evaluate", str(tiny_run()), "--adapt", "--adapt-rate", "1e38", "--mix", "counts"]
    assert cli(words) == 2
    said = capsys.readouterr()
    assert "with a rate of 1e+38, weights became NaN" in said.err
    assert not said.out


def test_a_loaded_run_scores_while_it_learns_and_forgets_it_afterwards(tiny_run):
    run = elman.load(tiny_run())
    text = "of the time, it was. " * 12
    still, learning = run.score(text), run.score(text, adapt=Adaptation(0.001, 0.0))
    assert learning.tokens == still.tokens
    np.testing.assert_allclose(learning.nats[:19], still.nats[:19], rtol=1e-4, atol=1e-5)
    assert learning.total.nats < still.total.nats - 1
    np.testing.assert_array_equal(run.score(text).nats, still.nats)
    after = run.score("it was. ", context=text, adapt=Adaptation(0.001, 0.0))
    assert len(after) == len("it was. ")


def captured_by_hand(monkeypatch):
    """Windows run as one that is captured would: by what a graph replays, called each time."""
    made = []

    class Graphed:
        def __init__(self, update, inputs, *, warm_up):
            assert warm_up == 0
            self.update = update
            made.append([t.shape for t in inputs])

        def __call__(self, *inputs):
            return self.update(*inputs)

    monkeypatch.setattr(dynamic, "Graphed", Graphed)
    monkeypatch.setattr(dynamic, "_can_be_captured", lambda model: True)
    return made


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_captured_window_scores_and_learns_as_any_other(cell, monkeypatch):
    model = model_of(cell, layers=2)
    sigma, settings = gradient_sizes(model, IDS[:200], 7), Adaptation(0.01, 0.02, 7)
    expected = adapted_scores(model, IDS[:100], sigma, settings)
    made = captured_by_hand(monkeypatch)
    found = adapted_scores(model, IDS[:100], sigma, settings)
    np.testing.assert_array_equal(found, expected)
    assert made == [[(1, 7), (7,)]]
    with pytest.raises(UserError, match="token ids"):
        adapted_scores(model, np.append(IDS[:60], len(VOCAB)), sigma, settings)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("options", [{}, {"layers": 2, "embedding_size": 5}])
def test_a_gpu_learns_alike(options):
    model = model_of("gru", **options)
    sigma, settings = gradient_sizes(model, IDS[:200]), Adaptation(0.003, 0.02, 7)
    expected = adapted_scores(model, IDS[:200], sigma, settings)
    model.cuda()
    np.testing.assert_allclose(
        adapted_scores(model, IDS[:200], sigma, settings), expected, rtol=1e-9
    )
    model.float()
    single = adapted_scores(model, IDS[:200], sigma, settings)
    np.testing.assert_allclose(single, expected, rtol=1e-2, atol=1e-3)
    with kernels.capturing(False):
        plain = adapted_scores(model, IDS[:200], sigma, settings)
    np.testing.assert_allclose(single, plain, rtol=1e-4, atol=1e-5)
