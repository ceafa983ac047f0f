"""The book: both languages run the same code, every chapter has its exercises, names exist."""

import importlib
import re
from pathlib import Path

import pytest

from publishing.pages import DOCS, blocks

CHAPTERS = sorted(path.name for path in (DOCS / "book").glob("0*.md"))
NOTES = [
    "load_array",
    "init_weights",
    "get_net",
    "train",
    "evaluate_loss",
    "DATA_HUB",
    "download",
    "plot",
    "read_time_machine",
    "tokenize",
    "Vocab",
    "count_corpus",
    "load_corpus_time_machine",
    "seq_data_iter_random",
    "seq_data_iter_sequential",
    "SeqDataLoader",
    "load_data_time_machine",
    "one_hot",
    "get_params",
    "init_rnn_state",
    "rnn",
    "RNNModelScratch",
    "begin_state",
    "predict_ch8",
    "grad_clipping",
    "train_epoch_ch8",
    "train_ch8",
    "sgd",
    "Timer",
    "Accumulator",
    "Animator",
    "try_gpu",
    "RNN",
    "GRU",
    "LSTM",
    "RNNModel",
]
"""Every function and class that the notes' code defines or calls by a name of its textbook."""


def resolve(name: str):
    """The object of a dotted name: the longest module in it, then attributes."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(name)


def code_of(path: Path) -> list[str]:
    return [block.code for block in blocks(path.read_text(encoding="utf-8"))]


def test_there_are_eight_chapters_and_an_index_that_links_them():
    assert len(CHAPTERS) == 8
    index = (DOCS / "book" / "index.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((0\d-[\w-]+\.md)\)", index) == CHAPTERS


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_ends_with_three_exercises_and_their_solutions(chapter):
    page = (DOCS / "book" / chapter).read_text(encoding="utf-8")
    before, solutions = page.split("\n## Solutions\n")
    exercises = before.split("\n## Exercises\n")[1]
    assert re.findall(r"^(\d)\. ", exercises, re.MULTILINE) == ["1", "2", "3"]
    assert "*(beyond the notes)*" in exercises.split("\n3. ")[1]
    assert re.findall(r"^\*\*(\d)\.\*\*", solutions, re.MULTILINE) == ["1", "2", "3"]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_checks_what_it_says(chapter):
    code = code_of(DOCS / "book" / chapter)
    assert len(code) >= 8
    assert sum("assert" in block for block in code) >= len(code) // 2


def concordance(language: str = "") -> str:
    return (DOCS / language / "concordance.md").read_text(encoding="utf-8")


def test_the_concordance_has_every_name_of_the_notes():
    firsts = re.findall(r"^\| (`[^|]*)\|", concordance(), re.MULTILINE)
    named = {word.split(".")[-1] for cell in firsts for word in re.findall(r"`([^`]+)`", cell)}
    assert set(NOTES) - named == set()


def test_every_name_of_the_concordance_exists():
    page = concordance()
    elsewhere = set(re.findall(r"`(elman\.[\w.]+)`", page))
    assert len(elsewhere) >= 40
    for name in sorted(elsewhere):
        resolve(name)
    table = page.split("## Equations")[1].split("Perplexity is")[0]
    equations = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\|[^|]*\|([^|]*)\|", table, re.M)))
    assert len(equations) >= 20
    for name in equations:
        resolve(f"elman.gradients.equations.{name}")
    for row in re.findall(r"^\| `[^|]*\| ([^|]*) \| `elman", page, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", row):
            resolve(f"elman.notes.{name}")
