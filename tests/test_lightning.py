"""The Lightning example of docs/training.md does what a plain loop does."""

import importlib.util
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from elman import LanguageModel
from elman.training import CarriedState
from test_docs import ROOT, Block, blocks, run

PAGE = ROOT / "docs" / "training.md"
MARKED = re.compile(r"^```python no-run lightning\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> dict[str, Any]:
    """The page's names after its example has run; Lightning goes by two names."""
    names = [n for n in ("lightning", "pytorch_lightning") if importlib.util.find_spec(n)]
    if not names:
        pytest.skip("Lightning is not installed")
    page = PAGE.read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own advice, about workers and loggers
        patch.chdir(tmp_path_factory.mktemp("lightning"))
        patch.setitem(sys.modules, "lightning", importlib.import_module(names[0]))
        for block in blocks(page):
            if block.line > page[: page.index("## In Lightning")].count("\n"):
                break
            run(block, str(PAGE), namespace)
        found = MARKED.search(page)
        assert found is not None
        line = page.count("\n", 0, found.start("code")) + 1
        run(Block(line, found["code"]), str(PAGE), namespace)
        namespace["checkpoint"] = Path("example.ckpt").absolute()
        namespace["trainer"].save_checkpoint(namespace["checkpoint"])
    return namespace


def test_its_weights_are_those_of_a_loop_that_carries_the_state(example):
    torch.manual_seed(0)
    model = LanguageModel(len(example["vocab"]), cell="lstm", hidden_size=32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        state = CarriedState()
        for x, y in example["windows"]:
            logits, after = model(x, state.value)
            state.carry(after)
            optimizer.zero_grad()
            cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    for mine, theirs in zip(model.parameters(), example["reader"].model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_the_carried_state_is_part_of_its_checkpoints(example):
    reader = example["Reader"](len(example["vocab"]))
    value = (torch.randn(1, 16, 32), torch.randn(1, 16, 32))
    reader.state.carry(value)
    checkpoint: dict[str, Any] = {}
    reader.on_save_checkpoint(checkpoint)
    other = example["Reader"](len(example["vocab"]))
    other.on_load_checkpoint(checkpoint)
    torch.testing.assert_close(other.state.value, value, rtol=0, atol=0)
    stored = torch.load(example["checkpoint"], weights_only=True)
    assert "carried" in stored, "Lightning calls the hooks"
