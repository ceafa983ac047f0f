"""A training between two records, as tensors by name and plain numbers, and back again.

What is loaded into a fresh training of the same settings goes on to the last bit as the one that
was saved. Nothing here touches a file: `elman.runs.checkpoints` does.
"""

import math
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from elman.errors import UserError
from elman.language_model.nests import over, rows_of
from elman.training.records import Tally
from elman.training.segments import Pass, one_pass
from elman.training.state import CarriedState

if TYPE_CHECKING:
    from elman.training.loop import Training

Parts = dict[str, dict[str, Tensor]]
"""Saved tensors: those of `weights`, of the `optimizer`, … by the rest of their names."""

NUMBERS = (
    "step",
    "epoch",
    "index",
    "validated_at",
    "best",
    "best_step",
    "worse",
    "plateau",
    "plateau_worse",
)
"""The fields of a training that say where it is."""


def saved(training: "Training") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All that the rest of the training depends on."""
    model, reader, average = training.model, training.reader, training.average
    tensors = {f"weights/{n}": p.detach() for n, p in model.named_parameters()}
    names = {id(p): n for n, p in model.named_parameters()}
    tensors |= {f"buffers/{n}": b for n, b in model.named_buffers()}
    for parameter, values in training.optimizer.state.items():
        for key, value in values.items():
            if not isinstance(value, Tensor):
                value = torch.tensor(value, device="cpu")
            tensors[f"optimizer/{names[id(parameter)]}/{key}"] = value
    for w, a in zip(average.weights, average.averages, strict=False):
        tensors[f"average/{names[id(w)]}"] = a
    tensors |= {f"carried/{n}": t for n, t in _all_lanes(training).state_dict().items()}
    tensors |= {f"noise/{n}": t for n, t in reader.noise.state_dict().items()}
    tensors |= {f"chance/{n}": t for n, t in training.chance.items()}
    numbers = {name: getattr(training, name) for name in NUMBERS}
    numbers |= {f"epoch_{name}": value for name, value in asdict(training.tally).items()}
    numbers |= {"averaged": average.count, "noise": reader.noise.seed}
    return tensors, numbers | {"cut_by": training.settings.reading.cut_by}


def _all_lanes(training: "Training") -> CarriedState:
    """The state of every lane of the batch, from all processes."""
    groups, processes = training.groups, training.processes
    dim = training.reader.lane_dim if groups.divided else 0

    def whole(tensor: Tensor) -> Tensor:
        return processes.gathered(tensor.cpu().contiguous(), dim, groups.sizes)

    if processes.size == 1:
        return training.carried
    return CarriedState(over(whole, training.carried.value))


def load(training: "Training", tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Put a training where `saved` was taken, on its own device."""
    parts = _by_first_name(tensors)
    _load_weights(training, parts)
    _load_optimizer(training, parts.get("optimizer", {}))
    _load_carried(training, parts.get("carried", {}))
    _load_numbers(training, numbers)
    _cut_anew(training, numbers.get("cut_by"))
    names = [f.name for f in fields(Tally)]  # runs of elman 0.1.0 have none
    training.tally = Tally(**{name: numbers.get(f"epoch_{name}", 0.0) for name in names})
    training.average.count = numbers["averaged"]
    noise = training.reader.noise
    noise.seed = numbers["noise"]
    noise.generators.clear()  # one that had drawn nothing yet was not saved
    noise.load_state_dict(parts.get("noise", {}))
    training.chance |= parts.get("chance", {})


def _by_first_name(tensors: dict[str, Tensor]) -> Parts:
    """`{"a/b/c": t}` → `{"a": {"b/c": t}}`."""
    parts: Parts = {}
    for name, tensor in tensors.items():
        first, rest = name.split("/", 1)
        parts.setdefault(first, {})[rest] = tensor
    return parts


def _load_weights(training: "Training", parts: Parts) -> None:
    parameters = dict(training.model.named_parameters())
    buffers = dict(training.model.named_buffers())
    _check_fit("weights", parts, parameters)
    _check_fit("buffers", parts, buffers)
    average = training.average
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(parts["weights"][name])
        for name, buffer in buffers.items():
            buffer.copy_(parts["buffers"][name])
        for w, a in zip(average.weights, average.averages, strict=False):
            name = next(n for n, p in parameters.items() if p is w)
            a.copy_(parts["average"][name])


def _check_fit(part: str, parts: Parts, model: dict[str, Any]) -> None:
    """Refuse a saved training of another model, before anything of this one is touched."""
    theirs = {name: tuple(tensor.shape) for name, tensor in parts.get(part, {}).items()}
    ours = {name: tuple(tensor.shape) for name, tensor in model.items()}
    odd = sorted({name for name, _ in theirs.items() ^ ours.items()})
    if odd:
        there, here = (shapes.get(odd[0], "absent") for shapes in (theirs, ours))
        raise UserError(
            f"the saved training does not fit this model: {odd[0]} is {there} there, {here} here",
            hint="load it into a training of the model that it was saved from",
        )


def _load_optimizer(training: "Training", saved: dict[str, Tensor]) -> None:
    parameters, state = dict(training.model.named_parameters()), training.optimizer.state
    state.clear()
    for name, value in saved.items():
        owner, key = name.rsplit("/", 1)
        state[parameters[owner]][key] = value.to(training.device).clone()


def _load_carried(training: "Training", saved: dict[str, Tensor]) -> None:
    """The state between windows, of this process's lanes; the training it is from may go on."""
    carried = training.carried
    carried.load_state_dict({name: tensor.clone() for name, tensor in saved.items()})
    if training.processes.size > 1:
        carried.value = rows_of(carried.value, training.reader.lane_dim, training.groups.rows)
    carried.to(training.device)


def _load_numbers(training: "Training", numbers: dict[str, Any]) -> None:
    """Where it is; numbers that no training can have reached are refused."""
    never_validated = {"best": math.inf} if numbers["best"] is None else {}
    for name in NUMBERS:
        value, kind = (numbers | never_validated)[name], type(getattr(training, name))
        if not isinstance(value, (int, kind)) or isinstance(value, bool):
            raise ValueError(f"its {name} is {value!r}")
        setattr(training, name, value)
    t = training
    counts = t.epoch, t.best_step, t.validated_at + 1, t.worse, t.plateau_worse
    possible = min(*counts, t.index) >= 0 and max(counts) <= t.step + 1
    if not possible or t.index >= len(_saved_pass(training, numbers.get("cut_by"))):
        raise ValueError(
            f"it claims to be in pass {t.epoch}, at segment {t.index}, after {t.step} updates"
        )


def _saved_pass(training: "Training", cut_by: Any) -> Pass:
    """The pass as it was cut when the training was saved; runs of elman 0.2 do not say how."""
    settings = training.settings
    if cut_by in (None, settings.reading.cut_by):
        return training.reads()
    reading = replace(settings.reading, **cut_by)
    return one_pass(training.train_ids, reading, seed=settings.seed, epoch=training.epoch)


def _cut_anew(training: "Training", cut_by: Any) -> None:
    """Find the place in a pass that is cut otherwise than the one it was saved in.

    The state goes on as it is: a few tokens off its place, as it would be after any cut.
    """
    if training.index == 0 or cut_by in (None, training.settings.reading.cut_by):
        return
    reads = training.reads()
    training.index = reads.after(_saved_pass(training, cut_by).share(training.index))
    if training.index == len(reads):
        training.epoch, training.index = training.epoch + 1, 0
