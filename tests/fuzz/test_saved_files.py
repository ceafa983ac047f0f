"""Everything that elman saves, with one thing wrong in it: refused in words, or read as it was.

Read straight by the functions that commands read with, so that thousands a minute are tried.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from harness import cases, mutate_bytes, mutate_json

from elman import NgramModel, Vocab
from elman.cli import run as elman
from elman.errors import Unreadable, UserError
from elman.forecasting import saving
from elman.runs import Run, checkpoints

pytestmark = pytest.mark.fuzz

TEXT = "the cat sat on the mat, and the dog sat by the cat.\n" * 8


class Kind(NamedTuple):
    """A kind of saved file: one of it, what a reader makes of it, in a form to compare."""

    path: Path
    read: Callable[[], Any]
    spare: Callable[[Any, Any], bool] = lambda found, whole: False
    """What else than the whole may be found."""


def plain(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: t.tolist() for name, t in tensors.items()}


def checkpoint(path: Path, name: str) -> Callable[[], Any]:
    def read():
        tensors, numbers = checkpoints.read(path / f"{name}.safetensors", name)
        return plain(tensors), numbers

    return read


def ngrams(path: Path) -> Callable[[], Any]:
    ids = np.arange(12)
    return lambda: NgramModel.load(path).score(ids).tolist()


def forecaster(folder: Path) -> Callable[[], Any]:
    def read():
        saved = saving.load_ensemble(folder)
        states = [m.state() for f in saved.ensemble.fitted.values() for m in f.models]
        return (
            repr(saved.reading),
            saved.columns,
            [{k: v.tolist() for k, v in s.items()} for s in states],
        )

    return read


@pytest.fixture(scope="module")
def kinds(tmp_path_factory, tiny_run) -> dict[str, Kind]:
    home = tmp_path_factory.mktemp("kinds")
    run = shutil.copytree(tiny_run(), home / "run")
    NgramModel.fit(TEXT, 3).save(home / "ngrams")
    Vocab(list(TEXT)).save(home / "vocab.json")
    words = ["forecast", "sunspots", "--model", "linear", "--windows", "1", "--steps", "2"]
    assert elman([*words, "--out", str(home / "linear")]) == 0
    metrics = lambda: Run.open(run).metrics()  # noqa: E731
    vocab = lambda: Vocab.load(home / "vocab.json").token_freqs  # noqa: E731
    return {
        "model": Kind(run / "model.safetensors", checkpoint(run, "model")),
        "state": Kind(run / "state.safetensors", checkpoint(run, "state")),
        "n-grams": Kind(home / "ngrams", ngrams(home / "ngrams")),
        "vocabulary": Kind(home / "vocab.json", vocab),
        "forecaster": Kind(home / "linear" / "model.safetensors", forecaster(home / "linear")),
        "forecaster's config": Kind(home / "linear" / "config.json", forecaster(home / "linear")),
        "metrics": Kind(
            run / "metrics.jsonl",
            metrics,
            lambda found, whole: is_part(found, whole),  # lines that are gone, whole ones
        ),
    }  # fmt: skip


def is_part(found: list, whole: list) -> bool:
    """Whether every record is one of the whole, as it was written."""
    return all(record in whole for record in found)


KINDS = ("model", "state", "n-grams", "vocabulary", "forecaster", "forecaster's config", "metrics")


@pytest.mark.parametrize("name", KINDS)
def test_saved_files(name, kinds):
    kind = kinds[name]
    data, whole = kind.path.read_bytes(), kind.read()
    refused = 0
    for chance in cases(60):
        changed = mutate_bytes(data, chance)
        if kind.path.suffix == ".json" and chance.random() < 0.3:
            changed = json.dumps(mutate_json(json.loads(data), chance)).encode()
        kind.path.write_bytes(changed)
        try:
            found = kind.read()
        except UserError:
            refused += 1
            continue
        assert found == whole or kind.spare(found, whole), "other numbers, without a word"
    kind.path.write_bytes(data)
    assert refused
    assert kind.read() == whole


@pytest.mark.parametrize("name", KINDS)
def test_a_bit_of_every_region_of_a_saved_file(name, kinds):
    """The header byte by byte, the rest in strides: no flip changes a result without a word.

    And what is damaged is not called unreadable.
    """
    kind = kinds[name]
    data, whole = kind.path.read_bytes(), kind.read()
    silent = []
    for at in [*range(64), *range(64, len(data), max(1, len(data) // 150))]:
        kind.path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        try:
            found = kind.read()
        except UserError as refusal:
            silent += [at] if isinstance(refusal, Unreadable) else []
            continue
        if found != whole and not kind.spare(found, whole):
            silent.append(at)
    kind.path.write_bytes(data)
    assert silent == []
