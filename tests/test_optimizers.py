"""torch's optimizers to the last bit, without torch's compiler."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from elman.training import optimizers

OPTIONS = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", {"foreach": True}),
]


def descend(kind, options):
    """Weights after six steps at a falling rate, and what was called around each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))
    x, calls = torch.randn(9, 7), []
    optimizer = kind(model.parameters(), 0.1, **options)
    optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    for _ in range(6):
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()
        decay.step()
    return [p.detach() for p in model.parameters()], calls


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_steps_schedules_and_hooks_are_torchs_to_the_last_bit(name, options):
    ours, calls = descend(getattr(optimizers, name), options)
    theirs, their_calls = descend(getattr(torch.optim, name), options)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert calls == their_calls == ["step"] * 6


def test_a_closure_is_called_with_gradients_and_answers_with_the_loss():
    model = nn.Linear(3, 2)
    optimizer = optimizers.SGD(model.parameters(), 0.1)

    def loss():
        optimizer.zero_grad()
        value = model(torch.ones(1, 3)).pow(2).sum()
        value.backward()
        return value

    with torch.no_grad():
        first = model(torch.ones(1, 3)).pow(2).sum()
    assert optimizer.step(loss) == first
    assert loss() < first


def test_an_optimizer_can_be_copied_and_pickled():
    optimizer = optimizers.Adam(nn.Linear(3, 2).parameters(), 0.1)
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(again) is optimizers.Adam
        again.step()


LIGHT = """
import sys, torch
from torch import nn
from elman.training.optimisation import Optimisation, build_optimizer, take_step
from elman.training.optimizers import HIDDEN

model = nn.Linear(3, 2)
optimizer = build_optimizer(model, Optimisation("adam", 0.01))
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    take_step(optimizer)
optimizer.load_state_dict(optimizer.state_dict())
print("torch._dynamo" in sys.modules)
import torch._dynamo
raw = torch.optim.Optimizer.zero_grad.__wrapped__
ours = getattr(raw, HIDDEN)
optimizer.zero_grad()
print(getattr(raw, HIDDEN) is not ours, model.weight.grad)

@torch.compile(backend="eager")
def update(x):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()

before = model.weight.clone()
update(torch.ones(1, 3))
print(not torch.equal(before, model.weight))
"""


def test_an_optimizer_does_not_load_torchs_compiler_and_is_hidden_from_it_once_it_is_there():
    ran = subprocess.run(
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.stdout.split("\n") == ["False", "True None", "True", ""], ran.stderr


FORECAST = """
import sys
import numpy as np
from elman import forecasting as f

x = np.sin(0.1 * np.arange(60))[:, None]
small = {"tau": 4, "hidden": 4}
for model in (f.Window(**small), f.Recurrent(**small, epochs=1), f.Global(2, **small, updates=2)):
    model.fit(x).predict(x, steps=2)
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""


def test_a_forecaster_does_not_load_torchs_compiler():
    ran = subprocess.run(
        [sys.executable, "-c", FORECAST], capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.stdout == "[]\n", ran.stderr
