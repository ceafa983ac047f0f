"""What several processes compute, printed as JSON by the first: `torchrun … several_processes.py`.

A script, not a test: `test_processes.py` runs it, and computes the same alone.
"""

import contextlib
import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elman import LanguageModel
from elman.language_model import Dropout
from elman.nn import GRU
from elman.training import Optimisation, Processes, Reading, Settings, Training
from elman.training.captured_update import CapturedUpdate
from elman.training.processes import leave

IDS = torch.randint(12, (2000,), generator=torch.Generator().manual_seed(5)).numpy()
HELD_OUT = torch.randint(12, (9000,), generator=torch.Generator().manual_seed(6)).numpy()
TRUNCATED = Reading(batch_size=10, window=7)
SETTINGS = Settings(
    epochs=1,
    lane_groups=4,
    validate_every=5,
    seed=3,
    reading=TRUNCATED,
    optimisation=Optimisation(learning_rate=1e-2, average="ema"),
)


class Plain(nn.Module):
    """A module of somebody else's, whose state is (rows, …)."""

    def __init__(self):
        super().__init__()
        self.embedding, self.cell = nn.Embedding(12, 5), nn.GRUCell(5, 6)
        self.out, self.drop = nn.Linear(6, 12), nn.Dropout(0.2)

    def forward(self, ids, state):
        h = torch.zeros(len(ids), 6) if state is None else state
        hs = []
        for x in self.embedding(ids).unbind(1):
            h = self.cell(x, h)
            hs.append(h)
        return self.out(self.drop(torch.stack(hs, 1))), h


def lstm(**options):
    return LanguageModel(12, cell="lstm", hidden_size=9, **options)


CASES = {
    "native": (lambda: lstm(layers=2, dropout=Dropout(tokens=0.1)), SETTINGS),
    "masks": (
        lambda: lstm(
            layers=2,
            embedding_size=5,
            dropout=Dropout(0.1, 0.2, 0.2, 0.3, 0.2),
        ),
        replace(SETTINGS, accumulate=2),
    ),
    "sliding": (lstm, replace(SETTINGS, reading=replace(TRUNCATED, carry="sliding", history=5))),
    "randomized": (lstm, replace(SETTINGS, reading=replace(TRUNCATED, carry="randomized"))),
    "full": (lstm, replace(SETTINGS, reading=replace(TRUNCATED, carry="full"), epochs=3)),
    "random": (lstm, replace(SETTINGS, reading=replace(TRUNCATED, sampling="random"))),
    "mlp": (lambda: LanguageModel(12, cell="mlp", hidden_size=9, context=3), SETTINGS),
    "plain": (Plain, SETTINGS),
}


def training(name, processes):
    model, settings = CASES[name]
    torch.manual_seed(1)
    return Training(model(), IDS, HELD_OUT, settings, processes)


def digest(trained):
    """Weights, optimizer, averages, lanes, nats: all that a checkpoint holds but the time."""
    tensors, numbers = trained.state_dict()
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    numbers.pop("epoch_seconds")
    found.update(json.dumps(numbers, sort_keys=True).encode())
    return found.hexdigest()


def trained(name, processes):
    """Five updates and a validation; saved, loaded into another training, and on for seven more."""
    first = training(name, processes)
    records = first.records()
    for _ in range(6):
        next(records, None)
    second = training(name, processes)
    second.load_state_dict(*first.state_dict())
    records = second.records()
    for _ in range(7):
        next(records, None)
    return {"sha256": digest(second), "best": second.best, "step": second.step}


def captured(processes):
    """The update that a GPU captures, run here step by step, gradients summed by all-reduce."""
    torch.manual_seed(1)
    model = lstm(embedding_size=5, dropout=Dropout(tokens=0.1, outputs=0.2))
    settings = replace(SETTINGS, lane_groups=0, validate_every=0)
    train = Training(model, IDS, settings=settings, processes=processes)
    whole = CapturedUpdate.of(train)
    whole.capture = False
    train._choice = train._choice._replace(update=whole)
    nats = [train.update().nats for _ in range(6)]
    return [*nats, *(float(p.detach().norm()) for p in model.parameters())]


def wrapped(wrap):
    """Two windows through a GRU that torch distributes, a state carried for each lane; gradients.

    Every process has as many lanes: torch's wrappers take the plain mean over processes.
    """
    torch.manual_seed(0)
    x = torch.randn(2, 6, 4, 3)  # windows, time, lanes, input
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mine = slice(rank * 4 // size, (rank + 1) * 4 // size) if wrap else slice(None)
    rnn = GRU(3, 5, num_layers=2)
    module = wrap(rnn) if wrap else rnn
    state = None
    for window in x:
        module.zero_grad()
        ys, state = module(window[:, mine].contiguous(), state)
        (ys**2).mean().backward()
        state = state.detach()
    return [_whole(p.grad) for p in rnn.parameters()]


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def distributed_modules():
    from torch import distributed
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group("gloo")
    plain, errors = wrapped(None), {}
    for name, wrap in (("ddp", DistributedDataParallel), ("fsdp", fully_shard)):
        pairs = zip(wrapped(wrap), plain, strict=True)
        errors[name] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    distributed.barrier()
    return errors


def threads_left():
    """The threads of gloo that this process still has."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends at this moment
            names.append(path.read_text().strip())
    return [name for name in names if "gloo" in name]


def main(names):
    torch.set_num_threads(1)
    processes = Processes.from_environment()
    found = {name: trained(name, processes) for name in names}
    if processes.size == 2:
        found["captured"] = captured(processes)
    processes.wait()
    leave()
    found["threads"] = threads_left()
    if processes.size == 2:
        found["modules"] = distributed_modules()
    if processes.first:
        print(json.dumps(found), flush=True)
    os._exit(0)  # FSDP2's own caches hold its group, with threads that may abort an ordinary end


if __name__ == "__main__":
    main(sys.argv[1:])
