"""What a training refuses before it begins: a model or a text that its settings do not suit."""

from typing import TYPE_CHECKING

import torch

from elman.errors import UserError
from elman.language_model.masks import NO_MASKS
from elman.training.settings import Settings

if TYPE_CHECKING:
    from elman.training.loop import Training


def checked_settings(settings: Settings | None) -> Settings:
    """These, or the usual ones."""
    if settings is None:
        return Settings()
    if not isinstance(settings, Settings):
        raise UserError(
            f"settings={settings!r} must be of the type Settings",
            hint="Training(model, train_ids, validation_ids, Settings(…))",
        )
    return settings


def check(training: "Training") -> None:
    """Refuse what cannot be trained, or not as the settings say."""
    _check_reads(training)
    _check_learns(training)
    check_agrees(training)
    _take_time(training)
    _check_room(training)
    _check_held_out(training)


def _check_reads(training: "Training") -> None:
    """Refuse a carry or a memory that the model cannot be read by."""
    reading = training.settings.reading
    refusal = training.reader.refusal(reading.carry_used, reading.memory_used)
    if refusal is not None:
        why, hint = refusal
        raise UserError(f"carry={reading.carry} memory={reading.memory} with {why}", hint=hint)


def _check_learns(training: "Training") -> None:
    if not any(p.requires_grad for p in training.model.parameters()):
        raise UserError(
            "no weight of this model wants a gradient, so there is nothing to train",
            hint="model.requires_grad_(True), or of the parts that are to learn",
        )


def check_agrees(training: "Training") -> None:
    """Refuse a model that was given another carry, memory or time than the settings say."""
    if (recurrence := training.reader.recurrence) is not None:
        has = recurrence.carry, recurrence.memory, recurrence.time
        training.settings.reading.check_agrees(*has)


def _take_time(training: "Training") -> None:
    """Let the model run time in chunks, where that was asked for."""
    reading, recurrence = training.settings.reading, training.reader.recurrence
    time = reading.time_used
    if time is None or (recurrence is not None and recurrence.time == time):
        return
    if recurrence is None:
        raise UserError(
            f"chunks={reading.chunks}: this model has no recurrence of elman's to cut in time",
            hint="chunks=0, or a recurrent cell, such as cell=gru",
        )
    recurrence.time = time


def _check_room(training: "Training") -> None:
    """Refuse a budget of memory that has no room for one step of every lane."""
    reading, device = training.settings.reading, training.device
    if not reading.memory:
        return
    ids = torch.zeros(1, reading.batch_size, dtype=torch.int64, device=device)
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda), training.cast(), training.lent():
        training.reader.recurrence(training.model.inputs(ids, NO_MASKS))


def _check_held_out(training: "Training") -> None:
    """Refuse a held-out text with nothing to predict; without one, options about validations."""
    settings, ids = training.settings, training.validation_ids
    if ids is not None:
        if len(ids) < 2:
            raise UserError(
                f"{len(ids)} held-out tokens leave nothing to predict",
                hint="a larger part for validation, or none",
            )
        return
    waiting = {
        "schedule=plateau": settings.optimisation.schedule == "plateau",
        f"patience={settings.patience}": settings.patience > 0,
        f"validate_every={settings.validate_every}": settings.validate_every > 0,
    }
    for said, waits in waiting.items():
        if waits:
            raise UserError(
                f"{said} means nothing without held-out tokens",
                hint="hold some out (validation_ids of a Training), or leave it out",
            )
