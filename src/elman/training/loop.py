"""Training a language model: a loop that yields a record after every update and validation.

    for record in Training(model, train_ids, validation_ids, Settings()).records():
        ...

Nothing here prints or touches a file. Between two records the whole of a training is in its
`state_dict()`: weights, optimizer, averages, carried state, position, every random generator. Load
it into a fresh `Training` of the same settings and the records that follow are the same to the last
bit (on the same device with the same number of threads).
"""

import math
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from elman.defaults import learns, recording
from elman.kernels import Explanation
from elman.language_model import Masks, State, reader_of
from elman.language_model.looking import Watch
from elman.recurrence.operator import known_ids
from elman.training import chance, checks, pending, piecewise, saving, validation
from elman.training.interrupts import whole
from elman.training.optimisation import (
    Average,
    Optimisation,
    build_optimizer,
    learning_rate,
)
from elman.training.passes import Passes, beside_model, checked_ids
from elman.training.pending import Before, Pending
from elman.training.piecewise import Latest
from elman.training.processes import ALONE, LaneGroups, Processes
from elman.training.records import Progress, Tally, Update, Validation
from elman.training.segments import Cut, Pass, Reading, Segment, one_pass
from elman.training.settings import Settings
from elman.training.state import CarriedState
from elman.training.update import choose, engine, most_pending, run_update, seen

__all__ = [
    "CarriedState",
    "Optimisation",
    "Reading",
    "Settings",
    "Training",
    "Update",
    "Validation",
]


class Training:
    """The state of one training, and the loop that moves it on."""

    latest: Latest
    """What the newest update has read."""

    @learns
    def __init__(
        self,
        model: nn.Module,
        train_ids: Any,
        validation_ids: Any | None = None,
        settings: Settings | None = None,
        processes: Processes = ALONE,
    ) -> None:
        self.reader, self.settings = reader_of(model), checks.checked_settings(settings)
        self.model: Any = model
        self.processes = processes
        self.device = next(model.parameters()).device
        self.groups = LaneGroups(
            self.settings.reading.batch_size, self.settings.lane_groups, processes
        )
        self.train_ids = beside_model(checked_ids(self.reader, train_ids), self.device)
        self.validation_ids = validation_ids
        if validation_ids is not None:
            self.validation_ids = checked_ids(self.reader, validation_ids)
        checks.check(self)
        self.optimizer = build_optimizer(model, self.settings.optimisation)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.average = Average(model, self.settings.optimisation)
        self.carried = CarriedState()
        self.chance = chance.fresh(self.device, self.settings.seed)
        self.step = self.epoch = self.index = 0
        self.tally = Tally()
        self._pending: deque[Pending] = deque()
        self.validated_at = -1
        self.best, self.best_step, self.worse = math.inf, 0, 0
        self.plateau, self.plateau_worse = 1.0, 0
        self._clock = time.perf_counter()
        self._passes = Passes(self._one_pass)
        self._watch: Watch | None = None
        self._choose()

    def _choose(self) -> None:
        """Find the way that updates go, and remember what that depends on."""
        self._choice, self._seen = choose(self), seen(self)

    def explain(self) -> Explanation:
        """Whether updates run `captured`, `native` or `piecewise`, and why not the faster way."""
        return self._choice.explanation

    def engine(self) -> str:
        """What computes an update, in one line, and why not a faster one.

        Two trainings that differ in it agree to rounding, not to the last bit.
        """
        return engine(self, self.explain())

    # ------------------------------------------------------------------ the loop

    def records(self) -> Iterator[Progress]:
        """Train to the end, yielding after every update, pass over the text and validation.

        Leave it at any record and call it again, or save and load in between: it goes on. So it
        does after Ctrl-C, which stops it between two records.
        """
        return whole(self._records())

    def _records(self) -> Generator[Progress, None, None]:
        self._clock = time.perf_counter()
        while True:
            if self.index == 0 and self.tally.tokens:
                tally, self.tally = self.tally, Tally()
                yield pending.epoch_record(self, tally)
            elif validation.is_due(self):
                yield self.validate()
            elif self.finished:
                pending.hear_all(self)
                return
            else:
                yield self.update()

    @property
    def finished(self) -> bool:
        """All passes made, or `patience` validations in a row without a better one."""
        patience = self.settings.patience
        return self.epoch >= self.settings.epochs or (patience > 0 and self.worse >= patience)

    @property
    def progress(self) -> float:
        """The part of all passes that has been read, 0 to 1."""
        if self.epoch >= self.settings.epochs:
            return 1.0
        return self._progress_after(0)

    def _progress_after(self, segments: int) -> float:
        """The same once so many more segments of this pass have been read."""
        read = (self.index + segments) / len(self.reads())
        return (self.epoch + read) / self.settings.epochs

    @learns
    def update(self) -> Update:
        """Read the next segments, carry their losses back, and move the weights once.

        The weights have moved when this returns, or will have before anything else on their GPU:
        there, the record's nats and ‖g‖ are waited for when they are first looked at, so that the
        next update can be prepared meanwhile.
        """
        self._look_again()
        if self.index == 0:
            self.tally = Tally()
        before = Before.now(self)
        reads, epoch = self.reads(), self.epoch
        length = len(reads)
        indices = range(self.index, min(self.index + self.settings.accumulate, length))
        segments = [self._passes.segment(reads, index) for index in indices]
        rate = learning_rate(self.settings.optimisation, self.step, self.progress, self.plateau)
        tokens = self.groups.batch * sum([segment.scored for segment in segments])
        outcome = run_update(self, segments, rate)
        made = Pending(outcome, tokens, before, self.tally, self.latest)
        self._advance(indices.stop, length)
        pending.add(self, made, most_pending(self))
        progress = self.progress
        if not self._choice.averages:
            self.average.update(progress)
        seconds = self._lap()
        self.tally.tokens += tokens
        self.tally.seconds += seconds
        known = {
            "step": self.step,
            "epoch": epoch,
            "learning_rate": rate,
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "progress": progress,
        }
        return pending.update_record(self, made, known)

    def _look_again(self) -> None:
        """Take notice of what was changed about the model since the last update."""
        if self._watch is not None and not self._watch.sees_a_change():
            return
        checks.check_agrees(self)
        if seen(self) != self._seen:
            pending.hear_all(self)
            self.optimizer.zero_grad()  # what is frozen now keeps no gradient
            self._choose()
        elif self._choice.update is not None:
            self._choice.update.look_again()
        self._watch = Watch(self.model, self.reader.recurrence)

    def validate(self) -> Validation:
        """Score the held-out text with the averaged weights, where weights are averaged."""
        return validation.validate(self)

    def _lap(self) -> float:
        now, before = time.perf_counter(), self._clock
        self._clock = now
        return max(now - before, 1e-9)

    # ------------------------------------------------------------------ reading

    def _one_pass(self, epoch: int) -> Pass:
        reading, seed = self.settings.reading, self.settings.seed
        return one_pass(self.train_ids, reading, seed=seed, epoch=epoch, rows=self.groups.rows)

    def reads(self, epoch: int | None = None) -> Pass:
        """The segments of a pass over the text; None: of the one that is being made."""
        return self._passes.get(self.epoch if epoch is None else epoch, being_read=self.epoch)

    def _advance(self, index: int, length: int) -> None:
        self.step += 1
        self.index = index
        if index == length:
            self.epoch, self.index = self.epoch + 1, 0

    def prepare(self, segment: Segment) -> tuple[Tensor, Tensor, Masks]:
        """Ids on the device, some of them hidden, and the masks of this window."""
        if not self.model.training:
            self.model.train()
        x, y = segment.x.to(self.device), segment.y.to(self.device)
        lanes, mine = self.groups.batch, self.groups.rows
        masks = self.reader.draw_masks(lanes)  # for the lanes of every process
        hidden = self.reader.hide_tokens(x, lanes, mine.start)
        return hidden, y, masks.of(mine) if self.groups.divided else masks

    def read_window(
        self, x: Tensor, y: Tensor, state: State, masks: Masks, cut: Cut | None = None
    ) -> tuple[Tensor, State]:
        """The mean nats of a window whose ids are known, and the state after it."""
        with known_ids():
            if cut is not None:
                return self.read_segment(x, y, state, masks, cut)
            with self.cast():
                hs, after = self.reader.states(x, state, masks)
                return self.reader.mean_nats(hs, y.T, masks), after

    def read_segment(
        self, x: Tensor, y: Tensor, state: State, masks: Masks, cut: Cut
    ) -> tuple[Tensor, State]:
        """The mean nats of a segment's newest steps, and the state where the next one starts."""
        with self.cast(), self.lent(cut.xi, cut.until):
            hs, after = piecewise.states_of(self, x, state, masks, cut.advance)
            newest = hs[len(hs) - cut.scored :], y[:, -cut.scored :].T
            return self.reader.mean_nats(*newest, masks), after

    def cast(self) -> torch.autocast:
        """bfloat16 inside this block, where it was asked for."""
        return torch.autocast(self.device.type, torch.bfloat16, self.half)

    @property
    def half(self) -> bool:
        """Whether products are taken in bfloat16."""
        return self.settings.precision == "bfloat16"

    def lent(
        self, xi: Tensor | None = None, until: Tensor | None = None
    ) -> AbstractContextManager[None]:
        """Inside this block the model carries by ξ (None: all) and keeps what the reading says."""
        return self.reader.lent(xi, self.settings.reading.memory_used, until)

    def chance_of(self, group: int = -1) -> AbstractContextManager[None]:
        """Inside this block PyTorch's global generators (of dropout, say) have our own states.

        A group of lanes draws from its own, whichever process has it.
        """
        return chance.lent(self, group)

    # ------------------------------------------------------------------ saving

    def __getstate__(self) -> dict[str, Any]:
        """A copy has its own model, optimizer and chance, and goes on by itself."""
        pending.hear_all(self)
        return {**vars(self), "_choice": None, "_watch": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        with recording():
            self._choose()

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that the rest of the training depends on: tensors by name, and plain numbers.

        The tensors are the training's own, as in torch: `copy.deepcopy` keeps them as they are now.
        """
        pending.hear_all(self)
        return saving.saved(self)

    @learns
    def load_state_dict(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken, on this training's device."""
        saving.load(self, tensors, numbers)
        self._pending.clear()
        self._choose()  # a captured graph holds the optimizer's old state
