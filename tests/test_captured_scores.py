"""A score by graphs is the score without them, to the bit, whatever comes between."""

import gc
import threading
import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils import parametrize

from elman import kernels
from elman.errors import UserError
from elman.gradients import Truncated
from elman.kernels.cuda import wider
from elman.language_model import kept
from elman.language_model.model import LanguageModel
from elman.scoring import captured, metrics
from elman.scoring.captured import _KEPT, FEW, SHAPES
from elman.scoring.metrics import evaluate

OFTEN = FEW + 3
"""Texts of which the last are scored by graphs alone."""


def lively(vocabulary: int = 20, *, scale: float = 3.0, **shape: Any) -> LanguageModel:
    """A model whose guesses depend on what it read long ago."""
    model = LanguageModel(vocabulary, **{"hidden_size": 6, **shape})
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    return model


def texts(model: LanguageModel, length: int, count: int = OFTEN) -> list[torch.Tensor]:
    return [torch.randint(model.vocab_size, (length,)) for _ in range(count)]


def uncaptured(model: LanguageModel, ids: Any, **how: Any) -> float:
    with kernels.capturing(False):
        return evaluate(model, ids, **how).nats


def served(model: LanguageModel) -> dict[captured.Shape, int]:
    """How many windows of each shape graphs of the model have scored."""
    (scorer,) = _KEPT[model].free
    return {shape: ready.served for shape, ready in scorer.recorded.items()}


# ---------------------------------------------------------------------- on paper


class Paper:
    """Records by remembering, and launches by doing it."""

    def __init__(self) -> None:
        self.made, self.launched, self.nbytes = 0, 0, 1

    def memory(self):
        return SimpleNamespace(nbytes=self.nbytes)

    def aside(self):
        return nullcontext()

    def record(self, work, memory):
        assert not torch.is_inference_mode_enabled()
        self.made += 1

        def launch(stream: int) -> None:
            self.launched += 1
            work()

        return SimpleNamespace(launch=launch), None


@contextmanager
def on_paper():
    """As on a GPU."""
    recorder = Paper()
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        stack.callback(_KEPT.clear)
        patch.setattr(captured, "_is_on_a_gpu", lambda model: True)
        patch.setattr(captured, "_is_our_kernels", lambda *_: True)
        patch.setattr(kept, "current_stream", lambda device: 0)
        patch.setattr(kept.graphs, "recorder", lambda device, stream: recorder)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
        yield recorder


@pytest.fixture
def paper():
    with on_paper() as recorder:
        yield recorder


@st.composite
def problems(draw):
    """A model, and how a text of some length is read."""
    shape = {
        "cell": draw(st.sampled_from(["elman", "gru", "lstm", "mgu", "mlp"])),
        "layers": draw(st.integers(1, 3)),
        "embedding_size": draw(st.sampled_from([None, 3])),
    }
    lanes, warm_up = draw(st.integers(1, 5)), draw(st.integers(0, 9))
    length = 2 + max(2 * lanes * warm_up, 1) + draw(st.integers(0, 60))
    piece = draw(st.integers(3, 30))
    return lively(**shape), length, {"lanes": lanes, "warm_up": warm_up, "piece": piece}


@given(problem=problems())
@settings(max_examples=40)
def test_the_score_is_the_same_to_the_bit(problem):
    model, length, how = problem
    with on_paper() as paper:
        for ids in texts(model, length):
            assert evaluate(model, ids, **how).nats == uncaptured(model, ids, **how)
    assert paper.launched


def test_windows_are_recorded_once_they_have_come_a_few_times_in_any_text(paper):
    model = lively()
    for i, ids in enumerate(texts(model, 65)):  # 16, 16, 16 and 16 steps
        evaluate(model, ids, piece=16)
        assert paper.made == (i >= 1) + (i >= FEW)
    assert sum(served(model).values()) == paper.launched == 4 * OFTEN - (FEW + 1) * 2
    for ids in texts(model, 70):  # and 5 steps
        evaluate(model, ids, piece=16)
    assert paper.made == 3


def test_every_lane_of_every_process_is_scored(paper):
    model = lively(cell="lstm")
    for ids in texts(model, 500):
        parts = [slice(0, 2), slice(2, 5), slice(5, 5)]
        nats = [metrics.nats_of_lanes(model, ids, 5, p, warm_up=9, piece=20) for p in parts]
        whole = uncaptured(model, ids, lanes=5, warm_up=9, piece=20)
        assert sum(nats) == pytest.approx(whole, rel=1e-6)
    assert paper.launched


def test_the_weights_are_those_of_now(paper):
    model = lively(cell="gru")
    (ids,) = texts(model, 100, 1)
    found = set()
    for _ in range(OFTEN):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1)
        found.add(evaluate(model, ids, piece=20).nats)
        assert evaluate(model, ids, piece=20).nats == uncaptured(model, ids, piece=20)
    assert len(found) == OFTEN
    made = paper.made
    for p in model.parameters():
        p.data = p.data + 0.1
    assert evaluate(model, ids, piece=20).nats == uncaptured(model, ids, piece=20)
    evaluate(model, ids, piece=20)
    assert paper.made == made + 1  # for windows between the first and the last


def test_weights_that_move_at_every_text_are_recorded_less_and_less(paper):
    model = lively()
    for ids in texts(model, 20 * (FEW + 4), 40):
        for p in model.parameters():
            p.data = p.data.clone()
        evaluate(model, ids, piece=20)
    assert 1 < paper.made < 6


def test_texts_at_the_same_time_have_graphs_of_their_own(paper):
    model = lively()
    for ids in texts(model, 80):
        evaluate(model, ids, piece=20)
    with (
        captured.lent(model, 1, metrics._add) as one,
        captured.lent(model, 1, metrics._add) as other,
    ):
        assert one is not other
        assert one.recorded
        assert not other.recorded
    assert _KEPT[model].free == [one, other]


def test_of_many_shapes_the_last_used_are_kept(paper, monkeypatch):
    model, ids = lively(), torch.randint(20, (200,))
    monkeypatch.setattr(captured, "WORTH", 1)
    lengths = range(3, 2 * SHAPES + 3)
    for length in lengths:
        for _ in range(FEW + 2):
            evaluate(model, ids[:length])
    assert {shape.length for shape in served(model)} == set(lengths[-SHAPES:])
    (scorer,) = _KEPT[model].free
    assert scorer.patience == FEW
    monkeypatch.setattr(captured, "WORTH", 50)
    for _ in range(FEW + 1):
        evaluate(model, ids)
    assert scorer.patience > FEW, "one was dropped that had not served long"


def test_graphs_that_are_too_large_are_given_up(paper):
    model = lively()
    paper.nbytes = captured.LARGE * kernels.largest(model.bias_q.device) + 1
    for ids in texts(model, 100):
        assert evaluate(model, ids, piece=20).nats == uncaptured(model, ids, piece=20)
    assert paper.launched == 0
    assert paper.made == len({(21, True), (21, False), (20, False)})
    assert _KEPT[model].free[0].nbytes == 0


def test_where_nothing_can_be_recorded_the_score_is_the_same(paper, monkeypatch):
    model, asked = lively(), []

    def refuse(work, memory):
        asked.append(work)
        raise RuntimeError("capturing")

    monkeypatch.setattr(paper, "record", refuse)
    for ids in texts(model, 100):
        assert evaluate(model, ids, piece=20).nats == uncaptured(model, ids, piece=20)
    assert len(asked) == 3


class Subclass(LanguageModel):
    pass


class Twice(torch.nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return 2 * w


def hooked(model: LanguageModel) -> LanguageModel:
    model.recurrence.register_forward_hook(lambda *_: None)
    return model


def hooked_itself(model: LanguageModel) -> LanguageModel:
    model.register_forward_hook(lambda *_: None)
    return model


def embedding_otherwise(model: LanguageModel) -> LanguageModel:
    model.embedding = torch.nn.Embedding(20, 3)  # pyright: ignore[reportAttributeAccessIssue]
    return model


def carrying(model: LanguageModel) -> LanguageModel:
    model.recurrence.carry = Truncated(3)
    return model


def computed(model: LanguageModel) -> LanguageModel:
    parametrize.register_parametrization(model.recurrence, "weight_hh_l0", Twice())
    return model


def on_cudnn(model: LanguageModel) -> LanguageModel:
    model.recurrence.repeatable = False
    return model


@pytest.mark.parametrize(
    "change", [hooked, hooked_itself, embedding_otherwise, carrying, computed, on_cudnn]
)
def test_what_may_do_something_else_in_each_call_is_not_recorded(paper, change):
    model = change(lively(embedding_size=3))
    for ids in texts(model, 100):
        evaluate(model, ids, piece=20)
    assert paper.made == 0


def test_models_of_other_kinds_are_not_recorded(paper):
    for model in (Subclass(20, hidden_size=6), torch.nn.DataParallel(lively())):
        for ids in texts(lively(), 100):
            evaluate(model, ids, piece=20)
    assert paper.made == 0


def test_a_text_is_looked_at_before_any_of_it_is_scored(paper):
    model = lively(3)
    ids = torch.zeros(1000, dtype=torch.int64)
    ids[900] = 3
    with pytest.raises(UserError, match="token ids 0 to 3 must lie in 0 to 2"):
        evaluate(model, ids, piece=20)
    assert model not in _KEPT


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestOnAGpu:
    @pytest.mark.parametrize("cell", ["elman", "gru", "lstm", "slstm"])
    @pytest.mark.parametrize("layers", [1, 2, 3])
    @pytest.mark.parametrize("embedding", [None, 12])
    @pytest.mark.parametrize("lanes", [1, 16])
    def test_the_score_is_the_same_to_the_bit(self, cell, layers, embedding, lanes):
        torch.manual_seed(layers + lanes)
        chance = np.random.default_rng(layers + lanes)
        shape = {"cell": cell, "layers": layers, "embedding_size": embedding}
        for hidden in (16, int(chance.integers(3, 50)) * 4):
            model = lively(int(chance.integers(20, 300)), hidden_size=hidden, **shape).cuda()
            piece, warm_up = int(chance.integers(20, 60)), int(chance.integers(0, 70))
            length = 2 + max(4 * piece * lanes, 2 * lanes * warm_up) + int(chance.integers(500))
            how = {"lanes": lanes, "warm_up": warm_up, "piece": piece}
            for ids in texts(model, length):
                assert evaluate(model, ids, **how).nats == uncaptured(model, ids, **how)
            assert len(served(model)) >= 2
            assert all(served(model).values())

    @pytest.mark.parametrize("hidden", [17, 93, 155])  # rows that are no whole 16 bytes
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_widths_that_are_run_wider_and_half_precision(self, hidden, dtype):
        model = lively(cell="gru", hidden_size=hidden, embedding_size=8, layers=2).cuda().to(dtype)
        for ids in texts(model, 3000):
            how = {"lanes": 4, "warm_up": 50, "piece": 200}
            assert evaluate(model, ids, **how).nats == uncaptured(model, ids, **how)
        assert all(served(model).values())

    def test_ids_may_lie_anywhere_and_be_of_any_type(self):
        model = lively(hidden_size=32).cuda()
        (ids,) = texts(model, 2000, 1)
        expected = uncaptured(model, ids, lanes=3, warm_up=20, piece=100)
        forms = [ids, ids.pin_memory(), ids.cuda(), ids.int(), ids.numpy().astype(np.uint16)]
        for form in forms * 3:
            assert evaluate(model, form, lanes=3, warm_up=20, piece=100).nats == expected
        assert all(served(model).values())

    @pytest.mark.parametrize("cell", ["mlp", "gru"])
    def test_what_our_kernel_does_not_run_is_scored_as_it_was(self, cell):
        model = lively(cell=cell).cuda().double()
        for ids in texts(model, 500):
            how = {"lanes": 3, "warm_up": 20, "piece": 50}
            assert evaluate(model, ids, **how).nats == uncaptured(model, ids, **how)

    def test_weights_that_change_in_place_and_others_that_take_their_place(self):
        model = lively(100, cell="lstm", hidden_size=64, layers=2).cuda().train()
        (ids,) = texts(model, 4000, 1)
        how, found = {"lanes": 4, "warm_up": 60, "piece": 300}, set()
        for i in range(3 * OFTEN):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.01)
            if i % OFTEN == OFTEN - 1:
                assert all(served(model).values())
                for p in model.parameters():
                    p.data = p.data.clone()
                _KEPT[model].free.clear()
            found.add(evaluate(model, ids, **how).nats)
            assert evaluate(model, ids, **how).nats == uncaptured(model, ids, **how)
            assert model.training
        assert len(found) == 3 * OFTEN

    def test_a_moved_model_is_scored_with_its_new_weights(self):
        model = lively(cell="gru", hidden_size=48).cuda()
        for ids in texts(model, 900):
            evaluate(model, ids, piece=100)
        for p in model.parameters():
            p.data = -p.data
        for change in (lambda: None, model.bfloat16, model.float, lambda: model.cpu().cuda()):
            change()
            for ids in texts(model, 900):
                assert evaluate(model, ids, piece=100).nats == uncaptured(model, ids, piece=100)

    def test_training_and_scoring_by_turns(self):
        model = lively(60, cell="gru", hidden_size=64, embedding_size=16, scale=1.0).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        held_out, read = texts(model, 2500, 2)
        window = read[:1001].view(-1).cuda()
        x, y = window[:-1].view(20, 50), window[1:].view(20, 50)
        scores = []
        for _ in range(2 * OFTEN):
            logits, _ = model(x)
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            scores.append(evaluate(model, held_out, lanes=16, warm_up=30).nats)
            assert scores[-1] == uncaptured(model, held_out, lanes=16, warm_up=30)
        assert len({*scores}) == len(scores)
        assert all(served(model).values())

    def test_threads_score_at_the_same_time(self):
        model = lively(80, cell="lstm", hidden_size=64).cuda()
        many = texts(model, 3000, 4)
        how: dict[str, Any] = {"lanes": 4, "warm_up": 40, "piece": 100}
        expected = [uncaptured(model, ids, **how) for ids in many]
        model.eval()  # a mode that threads would put back at different times
        found: list[list[float]] = [[] for _ in many]

        def score(i: int, stream: Any) -> None:
            with torch.cuda.stream(stream):
                for _ in range(20):
                    found[i].append(evaluate(model, many[i], **how).nats)

        streams = [None, None, torch.cuda.Stream(), torch.cuda.Stream()]
        torch.cuda.synchronize()
        threads = [threading.Thread(target=score, args=pair) for pair in enumerate(streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [[nats] * 20 for nats in expected]

    def test_another_stream_has_graphs_of_its_own(self):
        model, stream = lively(hidden_size=32).cuda(), torch.cuda.Stream()
        for ids in texts(model, 1000, 2 * OFTEN):
            expected = uncaptured(model, ids, piece=100)
            assert evaluate(model, ids, piece=100).nats == expected
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                assert evaluate(model, ids, piece=100).nats == expected
        assert len(_KEPT[model].free) == 2

    @pytest.mark.parametrize("embedding", [None, 16])
    def test_autocast_is_followed_and_its_casts_are_made_anew(self, embedding):
        model = lively(60, cell="gru", hidden_size=64, embedding_size=embedding, layers=2).cuda()
        for ids in texts(model, 1500, 2 * OFTEN):
            how = {"lanes": 3, "warm_up": 30, "piece": 100}
            plain = evaluate(model, ids, **how).nats
            with torch.autocast("cuda", torch.bfloat16):
                cast = evaluate(model, ids, **how).nats
            others = [torch.full((n,), 7.0, device="cuda") for n in (960, 3840, 4096) * 40]
            with torch.autocast("cuda", torch.bfloat16):
                assert cast == uncaptured(model, ids, **how)
            assert plain == uncaptured(model, ids, **how)
            assert plain != cast
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.01)
            del others

    def test_callers_in_any_mode(self):
        model = lively(cell="gru", hidden_size=32).cuda().requires_grad_(False)
        modes = [nullcontext, torch.no_grad, torch.inference_mode, torch.enable_grad]
        for i, ids in enumerate(texts(model, 1000, 3 * OFTEN)):
            with modes[i % 4]():
                found = evaluate(model, ids, lanes=2, warm_up=20, piece=90).nats
            assert found == uncaptured(model, ids, lanes=2, warm_up=20, piece=90)
        assert all(served(model).values())

    def test_what_was_prepared_for_a_call_lasts_as_long_as_its_graph(self):
        model = lively(cell="slstm", hidden_size=64, embedding_size=8, layers=2).cuda()
        for ids in texts(model, 1000):
            evaluate(model, ids, piece=100)
        model.recurrence._forget()
        wider._PREPARED.clear()
        gc.collect()
        others = [torch.full((n,), 7.0, device="cuda") for n in (64, 128, 256, 16384) * 40]
        for ids in texts(model, 1000):
            found = evaluate(model, ids, piece=100).nats
            assert found == uncaptured(model, ids, piece=100)
            model.recurrence._forget()
            wider._PREPARED.clear()
        del others

    def test_a_text_that_is_left_does_not_disturb_the_next(self):
        model = lively(cell="lstm", hidden_size=32).cuda()
        many = texts(model, 1000)
        for ids in many:
            evaluate(model, ids, piece=100)
        with captured.lent(model, 1, metrics._add) as scorer, torch.inference_mode():
            scorer(model, many[0][None, :101], None, None)
        for ids in many:
            assert evaluate(model, ids, piece=100).nats == uncaptured(model, ids, piece=100)

    def test_kept_graphs_go_with_their_model_and_hold_none_of_its_weights(self):
        model = lively(20_000, hidden_size=128)
        size = sum(p.nbytes for p in model.parameters())
        model.cuda()
        for ids in texts(model, 200):
            evaluate(model, ids)
        assert served(model)
        scorer = weakref.ref(_KEPT[model].free[0])
        gc.collect()
        before = torch.cuda.memory_allocated()
        model.cpu()
        gc.collect()
        assert before - torch.cuda.memory_allocated() >= size
        assert scorer() is not None
        del model
        gc.collect()
        assert scorer() is None

    def test_memory_is_bounded(self):
        model = lively(5000, hidden_size=64, embedding_size=8).cuda()
        for length in (2000, 40_000, 9000):
            for ids in texts(model, length):
                evaluate(model, ids, lanes=16, warm_up=0)
        room = captured.LARGE * kernels.largest(model.bias_q.device)
        assert sum(scorer.nbytes for scorer in _KEPT[model].free) <= room
