"""Texts in turns, and the graphs that are kept for them, on a GPU on paper: `test_writer` and
`test_searcher` have the same on a real one."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from elman.generation import beam_search, generate, generate_batch
from elman.language_model import kept, turns
from elman.language_model.captured import Step
from elman.language_model.model import LanguageModel


class Paper:
    """Records by remembering, and launches by doing it."""

    def __init__(self) -> None:
        self.made, self.launched = 0, 0

    def memory(self):
        return SimpleNamespace(nbytes=1)

    def aside(self):
        return nullcontext()

    def record(self, turn, memory):
        self.made += 1

        def launch(stream: int) -> None:
            self.launched += 1
            turn()

        return SimpleNamespace(launch=launch), None


@pytest.fixture
def paper(monkeypatch):
    recorder = Paper()
    monkeypatch.setattr(turns, "takes", lambda model: True)
    monkeypatch.setattr(kept, "current_stream", lambda device: 0)
    monkeypatch.setattr(kept.graphs, "recorder", lambda device, stream: recorder)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(Step, "forget", lambda self: None)  # paper has no addresses
    return recorder


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = LanguageModel(40, cell="lstm", hidden_size=16, embedding_size=8, layers=2)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5)
    return model


def test_texts_and_beams_are_the_hosts_and_a_graph_serves_the_next(model, paper, monkeypatch):
    def all_of_it():
        return (
            list(generate(model, [1, 2], 70, temperature=0.7)),
            list(generate_batch(model, [[1], [2, 3]], 40, top_k=5, top_p=0.8)),
            [found.ids for found in beam_search(model, [3], 67, 5, exclude=(2,))],
        )

    in_turns = [all_of_it() for _ in range(2)]
    assert paper.made == 6  # of three graphs a model keeps two
    for _ in range(3):
        assert beam_search(model, [3], 67, 5, exclude=(2,))[0].ids == in_turns[0][2][0]
    assert paper.made == 6
    assert paper.launched == 2 * (70 + 40 + 67) + 3 * 67
    monkeypatch.setattr(turns, "takes", lambda model: False)
    assert [all_of_it()] * 2 == in_turns


def test_a_graph_is_another_texts_only_once_its_text_is_over(model, paper):
    alone = [list(generate(model, [1], 50, seed=seed)) for seed in range(3)]
    assert paper.made == 1
    texts = [generate(model, [1], 50, seed=seed) for seed in range(3)]
    assert [*map(list, zip(*zip(*texts, strict=True), strict=True))] == alone
    assert paper.made == 3
    left = generate(model, [1], 50, seed=0)
    next(left)
    del left
    assert list(generate(model, [1], 50, seed=1)) == alone[1]
    assert paper.made == 3


def test_what_moves_or_is_asked_otherwise_takes_another_graph(model, paper):
    beam_search(model, [1], 20, 4)
    for width, exclude in [(3, (0,)), (4, (1,))]:
        beam_search(model, [1], 20, width, exclude=exclude)
    assert paper.made == 3
    for p in model.parameters():
        p.data = p.data.clone()
    beam_search(model, [1], 20, 4, exclude=(1,))
    assert paper.made == 4


def test_few_tokens_are_written_without_a_graph_until_they_are_many(model, paper):
    for _ in range(2):
        beam_search(model, [1], 4, 4)
    assert paper.made == 0
    beam_search(model, [1], 4, 4)
    assert paper.made == 1


def test_where_no_graph_can_be_made_the_text_is_written_all_the_same(model, paper, monkeypatch):
    expected = list(generate(model, [1], 30)), beam_search(model, [1], 30, 3)

    def refuse(turn, memory):
        raise RuntimeError("capturing")

    monkeypatch.setattr(paper, "record", refuse)
    turns._KEPT.clear()
    assert (list(generate(model, [1], 30)), beam_search(model, [1], 30, 3)) == expected
