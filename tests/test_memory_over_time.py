"""A hundred thousand calls leave a process as large as the first few did."""

import gc
import resource
from pathlib import Path

import pytest
import torch

from elman import nn
from elman.kernels.cpu import KERNEL
from elman.language_model import Dropout, LanguageModel
from elman.training import Optimisation, Reading, Settings, Training

pytestmark = pytest.mark.skipif(KERNEL.library is None, reason="the cpu kernel was not built")
CALLS = 100_000
GROWTH = 4 << 20
"""Bytes: 42 a call, where the least that a call could leave behind is one tensor of 500."""


def resident():
    """Bytes of this process in memory now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def growth(call, times):
    """How much larger the process is after so many calls than after the first tenth of them."""
    for _ in range(times // 10):
        call()
    before = resident()
    for _ in range(times - times // 10):
        call()
    return resident() - before


def forward_and_backward():
    layers, xs = nn.LSTM(5, 16, num_layers=2), torch.randn(4, 3, 5)

    def call():
        layers.zero_grad()
        layers(xs)[0].sum().backward()

    return call


def steps():
    model = LanguageModel(11, cell="gru", hidden_size=16, embedding_size=6).eval()
    step, ids = model.stepper(), torch.zeros(1, dtype=torch.int64)
    assert step is not None, "a model on a CPU has a stepper"
    return lambda: step(ids)


def updates():
    """A native update with everything that allocates: masks of each kind, layers, an average."""
    dropout = Dropout(tokens=0.1, inputs=0.2, layers=0.3, outputs=0.3, recurrent=0.4)
    model = LanguageModel(
        11, cell="lstm", hidden_size=16, layers=2, embedding_size=6, dropout=dropout
    )
    settings = Settings(
        epochs=10**9,
        accumulate=2,
        reading=Reading(3, 4),
        optimisation=Optimisation(optimizer="adamw", average="ema"),
    )
    training = Training(model, torch.randint(11, (5000,)), None, settings)
    assert training.explain().runs == "native"
    return training.update


JOBS = {make.__name__: make for make in (forward_and_backward, steps, updates)}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc to read a size from")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("job", JOBS)
def test_calls_leave_nothing_behind(job):
    assert growth(JOBS[job](), 1000) < GROWTH


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc to read a size from")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("job", JOBS)
def test_a_hundred_thousand_calls_leave_nothing_behind(job):
    assert growth(JOBS[job](), CALLS) < GROWTH
