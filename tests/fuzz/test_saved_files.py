"""Saved n-gram models, and tables to forecast, with one thing wrong in them."""

import numpy as np
import pytest
from harness import cases, mutate_bytes, run_in_process

from elman import NgramModel
from elman.errors import UserError

pytestmark = pytest.mark.fuzz

TEXT = "the cat sat on the mat, and the dog sat by the cat.\n" * 8


def test_ngram_models(tmp_path):
    """Whatever is flipped, cut or added: refused in words, or the same probabilities."""
    path = tmp_path / "model"
    model = NgramModel.fit(TEXT, 3)
    model.save(path)
    ids = np.arange(12)
    data, expected = path.read_bytes(), model.score(ids).tolist()
    refused = 0
    for chance in cases(60):
        changed = mutate_bytes(data, chance)
        path.write_bytes(changed)
        try:
            found = NgramModel.load(path)
        except UserError:
            refused += 1
            continue
        assert changed == data
        assert found.score(ids).tolist() == expected
    assert refused


ROWS = "time,x,y\n" + "".join(f"{t},{t % 7 + 0.5 * t},{(t * 13) % 11}\n" for t in range(60))
METHODS = ("last", "seasonal", "mean", "drift", "linear")


def test_tables(tmp_path):
    path = tmp_path / "table.csv"
    for chance in cases(25):
        data = ROWS.encode()
        for _ in range(chance.choice([1, 1, 2, 5])):
            data = mutate_bytes(data, chance)
        path.write_bytes(data)
        words = ["forecast", str(path), "--column", chance.choice(["x", "y", "x"])]
        words += ["--model", chance.choice(METHODS), "--steps", "3", "--json"]
        run_in_process(words)
