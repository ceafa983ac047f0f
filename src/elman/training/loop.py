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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elman.defaults import learns, recording
from elman.errors import Diverged, UserError, WorkFailed
from elman.kernels import Explanation, allows, explain
from elman.kernels.cpu import KERNEL
from elman.language_model import Masks, State, reader_of
from elman.language_model.looking import Watch
from elman.language_model.masks import NO_MASKS
from elman.recurrence.operator import known_ids
from elman.scoring import metrics
from elman.text import batches
from elman.training import piecewise, saving
from elman.training.divergence import first_broken_tensor
from elman.training.interrupts import whole
from elman.training.optimisation import (
    Average,
    Optimisation,
    build_optimizer,
    learning_rate,
)
from elman.training.piecewise import Latest
from elman.training.processes import ALONE, LaneGroups, Processes
from elman.training.records import Epoch, Progress, Tally, Update, Validation
from elman.training.segments import Cut, Pass, Reading, Segment, one_pass
from elman.training.settings import Settings
from elman.training.state import CarriedState
from elman.training.update import choose, seen
from elman.training.whole_update import Outcome, Read, WholeUpdate

__all__ = [
    "CarriedState",
    "Optimisation",
    "Reading",
    "Settings",
    "Training",
    "Update",
    "Validation",
]

VALIDATION_LANES = 16
TOKENS_ON_GPU = 2**27  # 1 GiB of int64


@dataclass(frozen=True)
class Before:
    """Where a training stood before an update."""

    step: int
    epoch: int
    index: int
    tokens: float  # of the pass so far, as its tally has them
    seconds: float
    averaged: int  # updates whose weights the average has taken in


@dataclass(eq=False)
class Pending:
    """An update that was made, or is being made by a GPU; `numbers` (Σ nats, ‖g‖) once known."""

    outcome: Outcome
    tokens: int
    before: Before
    tally: Tally
    latest: Latest | None
    numbers: tuple[float, float] | None = None
    failure: WorkFailed | None = None


class Training:
    """The state of one training, and the loop that moves it on."""

    @learns
    def __init__(
        self,
        model: nn.Module,
        train_ids: Any,
        validation_ids: Any | None = None,
        settings: Settings | None = None,
        processes: Processes = ALONE,
    ) -> None:
        self.reader, self.settings = reader_of(model), Settings() if settings is None else settings
        self.model: Any = model
        self.processes = processes
        self.device = next(model.parameters()).device
        if not isinstance(self.settings, Settings):
            raise UserError(
                f"settings={self.settings!r} must be of the type Settings",
                hint="Training(model, train_ids, validation_ids, Settings(…))",
            )
        self.groups = LaneGroups(
            self.settings.reading.batch_size, self.settings.lane_groups, processes
        )
        self.train_ids = self._beside_model(self._known_ids(train_ids))
        self.validation_ids = None if validation_ids is None else self._known_ids(validation_ids)
        self._check_model()
        self._check_held_out()
        self.optimizer = build_optimizer(model, self.settings.optimisation)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.average = Average(model, self.settings.optimisation)
        self.carried = CarriedState()
        self.chance = _global_generators(self.device, self.settings.seed)
        self.step = self.epoch = self.index = 0
        self.tally = Tally()
        self._pending: deque[Pending] = deque()
        self.validated_at = -1
        self.best, self.best_step, self.worse = math.inf, 0, 0
        self.plateau, self.plateau_worse = 1.0, 0
        self._clock = time.perf_counter()
        self._passes = {0: self._one_pass(0)}  # too little text is refused here
        self._ahead: tuple[tuple[Pass, int], Segment] | None = None
        self._watch: Watch | None = None
        self._choose()

    def _choose(self) -> None:
        """Find the way that updates go, and remember what that depends on."""
        self._choice, self._seen = choose(self), seen(self)

    def _check_held_out(self) -> None:
        """Refuse what waits for validations where none will come."""
        waiting = {
            "schedule=plateau": self.settings.optimisation.schedule == "plateau",
            f"patience={self.settings.patience}": self.settings.patience > 0,
            f"validate_every={self.settings.validate_every}": self.settings.validate_every > 0,
        }
        for said, waits in waiting.items():
            if waits and self.validation_ids is None:
                raise UserError(
                    f"{said} means nothing without held-out tokens",
                    hint="hold some out (validation_ids of a Training), or leave it out",
                )

    def _check_model(self) -> None:
        reading = self.settings.reading
        refusal = self.reader.refusal(reading.carry_used, reading.memory_used)
        if refusal is not None:
            why, hint = refusal
            raise UserError(f"carry={reading.carry} memory={reading.memory} with {why}", hint=hint)
        if not any(p.requires_grad for p in self.model.parameters()):
            raise UserError(
                "no weight of this model wants a gradient, so there is nothing to train",
                hint="model.requires_grad_(True), or of the parts that are to learn",
            )
        self._check_agrees()
        self._take_time(reading)
        if reading.memory:
            self._check_memory(reading)
        if self.validation_ids is not None and len(self.validation_ids) < 2:
            raise UserError(
                f"{len(self.validation_ids)} held-out tokens leave nothing to predict",
                hint="a larger part for validation, or none",
            )

    def _check_agrees(self) -> None:
        if (recurrence := self.reader.recurrence) is not None:
            has = recurrence.carry, recurrence.memory, recurrence.time
            self.settings.reading.check_agrees(*has)

    def _take_time(self, reading: Reading) -> None:
        """Let the model run time in chunks, where that was asked for."""
        recurrence, time = self.reader.recurrence, reading.time_used
        if time is None or (recurrence is not None and recurrence.time == time):
            return
        if recurrence is None:
            raise UserError(
                f"chunks={reading.chunks}: this model has no recurrence of elman's to cut in time",
                hint="chunks=0, or a recurrent cell, such as cell=gru",
            )
        recurrence.time = time

    def _check_memory(self, reading: Reading) -> None:
        """Refuse a budget that has no room for one step of every lane."""
        ids = torch.zeros(1, reading.batch_size, dtype=torch.int64, device=self.device)
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(cuda), self.cast(), self.lent():
            self.reader.recurrence(self.model.inputs(ids, NO_MASKS))

    def _known_ids(self, ids: Any) -> Any:
        """One text in ids that the model knows."""
        ids = batches.flat_integers(ids)
        values = _as_array(ids)
        if len(values):
            self.reader.check_range(int(values.min()), int(values.max()))
        return ids

    def _beside_model(self, ids: Any) -> Any:
        """On the GPU with the model, where the ids take little of it."""
        if self.device.type == "cuda" and len(ids) <= TOKENS_ON_GPU:
            return torch.tensor(_as_array(ids), dtype=torch.int64, device=self.device)
        return ids

    def explain(self) -> Explanation:
        """Whether updates run `captured`, `native` or `piecewise`, and why not the faster way."""
        return self._choice.explanation

    def engine(self) -> str:
        """What computes an update, in one line, and why not a faster one.

        Two trainings that differ in it agree to rounding, not to the last bit.
        """
        update = self.explain()
        reasons = dict.fromkeys(r for r in update.reasons.values() if "the model is on" not in r)
        why = f" ({'; '.join(reasons)})" if reasons else ""
        output = "native" if KERNEL.library is not None and allows(KERNEL.name) else "plain"
        where = f"{output} output, {self.device.type}, torch {torch.__version__}"
        return f"{update.runs} updates{why}, {self._kernel()}, {where}"

    def _kernel(self) -> str:
        if self.reader.recurrence is None:
            return "no kernel of elman's"
        rows = self.settings.reading.batch_size
        ids = torch.zeros(1, rows, dtype=torch.int64, device=self.device)
        with torch.no_grad(), self.cast():
            xs = self.model.inputs(ids, NO_MASKS)
            return f"{explain(self.reader.recurrence, xs).runs} kernel"

    # ------------------------------------------------------------------ the loop

    def records(self) -> Iterator[Progress]:
        """Train to the end, yielding after every update, pass over the text and validation.

        Leave it at any record and call it again, or save and load in between: it goes on. So it
        does after Ctrl-C, which is heeded between two records.
        """
        return whole(self._records())

    def _records(self) -> Generator[Progress, None, None]:
        self._clock = time.perf_counter()
        while True:
            if self.index == 0 and self.tally.tokens:
                yield self._end_epoch()
            elif self._validation_is_due():
                yield self.validate()
            elif self.finished:
                self._hear_all()
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

    @property
    def _is_averaged_by_update(self) -> bool:
        """Whether updates take the weights into their average themselves."""
        return self._choice.update is not None and self._choice.update.averages

    def _validation_is_due(self) -> bool:
        if self.validation_ids is None or self.validated_at == self.step or self.step == 0:
            return False
        every = self.settings.validate_every
        return self.finished or (every > 0 and self.step % every == 0)

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
        read = self.tally.tokens, self.tally.seconds
        before = Before(self.step, self.epoch, self.index, *read, self.average.count)
        reads, epoch = self.reads(), self.epoch
        length = len(reads)
        indices = range(self.index, min(self.index + self.settings.accumulate, length))
        segments = [self._segment(reads, index) for index in indices]
        rate = learning_rate(self.settings.optimisation, self.step, self.progress, self.plateau)
        tokens = self.groups.batch * sum([segment.scored for segment in segments])
        outcome = self._all_or_nothing(segments, rate)
        pending = Pending(outcome, tokens, before, self.tally, self.latest)
        self._advance(indices.stop, length)
        self._await(pending)
        progress = self.progress
        if not self._is_averaged_by_update:
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
        return self._told(pending, known)

    def _look_again(self) -> None:
        """Take notice of what was changed about the model since the last update."""
        if self._watch is not None and not self._watch.sees_a_change():
            return
        self._check_agrees()
        if seen(self) != self._seen:
            self._hear_all()
            self.optimizer.zero_grad()  # what moves no longer has none from now on
            self._choose()
        elif self._choice.update is not None:
            self._choice.update.look_again()
        self._watch = Watch(self.model, self.reader.recurrence)

    def _all_or_nothing(self, segments: list[Segment], rate: float) -> Outcome:
        """Move the weights once; what is raised meanwhile, by a hook or a model of the caller's,
        leaves all as it was."""
        noise, chance, carried = self.reader.noise, self.chance, self.carried.value
        drawn, averaged = noise.state_dict(), self.average.count
        try:
            if self._choice.update is not None:
                return self._update_whole(self._choice.update, segments, rate)
            return piecewise.update(self, [(s, *self.prepare(s)) for s in segments], rate)
        except BaseException:
            self.chance, self.carried.value, self.average.count = chance, carried, averaged
            noise.generators.clear()
            noise.load_state_dict(drawn)
            raise

    def _update_whole(self, whole: WholeUpdate, segments: list[Segment], rate: float) -> Outcome:
        """An update in one go."""
        share, first = 1 / len(segments), segments[0]
        reads = [
            Read(*self.prepare(s), s.fresh, share * s.scored / s.divisor, s.cut) for s in segments
        ]
        whole.start_from(None if first.fresh else self.carried.value)
        if self._is_averaged_by_update:
            whole.average(self.average.share(self._progress_after(len(segments))))
        self.latest = Latest(reads[0].x, whole.state, reads[0].masks, reads[0].y, reads[0].cut)
        outcome = whole(reads, rate)
        tokens = self.groups.batch * sum([segment.scored for segment in segments])
        self.carried.value = whole.state
        self._look_ahead(len(segments))

        def summed() -> tuple[float, float]:
            nats, norm = outcome()
            return nats * tokens, norm

        return summed

    def _told(self, pending: Pending, known: dict[str, Any]) -> Update:
        """The record of an update; what is not known yet is waited for when it is looked at."""
        if pending.numbers is None:
            numbers = partial(self._update_numbers, pending)
            return Update.late(known, numbers, lambda: pending.numbers is not None)
        known |= self._update_numbers(pending)
        return Update(**known)

    def _update_numbers(self, pending: Pending) -> dict[str, float]:
        """What the record of an update tells of its loss."""
        while pending.numbers is None:
            self._hear(pending)
        nats, norm = pending.numbers
        nats /= pending.tokens
        return {"nats": nats, "perplexity": metrics.perplexity(nats), "gradient_norm": norm}

    # ------------------------------------------------------------------ numbers that come late

    def _await(self, pending: Pending) -> None:
        """Hear of this update later, where that is possible, or now."""
        self._pending.append(pending)
        whole = self._choice.update
        late = 0
        if whole is not None and (whole.averages or not self.average.averages):
            late = whole.late
        while len(self._pending) > late:
            self._hear()

    def _hear_all(self) -> None:
        while self._pending:
            self._hear()

    def _hear(self, wanted: Pending | None = None) -> None:
        """Wait for the numbers of the oldest update whose numbers are not known."""
        if wanted is not None and wanted.failure is not None:
            raise wanted.failure
        pending = self._pending[0]
        nats, norm = pending.outcome()
        if not (math.isfinite(nats) and math.isfinite(norm)):
            raise self._failed(pending, nats, norm)
        self._pending.popleft()
        pending.numbers, pending.latest = (nats, norm), None
        pending.tally.nats += nats

    def _failed(self, pending: Pending, nats: float, norm: float) -> WorkFailed:
        """Go back to before this update: neither it nor those after it have moved anything."""
        before = pending.before
        self.step, self.epoch, self.index = before.step, before.epoch, before.index
        self.average.count = before.averaged
        assert pending.latest is not None, "what was heard of is no longer pending"
        self.tally, self.latest = pending.tally, pending.latest
        self.tally.tokens, self.tally.seconds = before.tokens, before.seconds
        whole, later = self._choice.update, list(self._pending)[1:]
        if whole is not None:
            if later or pending.latest.cut:  # whose gradients lie where those of this one were
                whole.look_back(pending.latest.read)
            whole.forgive()
        failure = self._diagnosis(nats, norm)
        for waiting in self._pending:
            waiting.failure = failure
        self._pending.clear()
        return failure

    def _end_epoch(self) -> Epoch:
        tally, self.tally = self.tally, Tally()
        tokens = int(tally.tokens)
        speed = tokens / tally.seconds
        known: dict[str, Any] = {"step": self.step, "epoch": self.epoch, "tokens": tokens}
        known["tokens_per_second"] = speed
        numbers = partial(self._epoch_numbers, tally, tokens)
        return Epoch.late(known, numbers, lambda: not self._waits_for(tally))

    def _waits_for(self, tally: Tally) -> bool:
        """Whether an update of this pass has not been heard of yet."""
        return any(pending.tally is tally for pending in self._pending)

    def _epoch_numbers(self, tally: Tally, tokens: int) -> dict[str, float]:
        while self._waits_for(tally):
            self._hear()
        nats = tally.nats / tokens
        return {"nats": nats, "perplexity": metrics.perplexity(nats)}

    def validate(self) -> Validation:
        """Score the held-out text with the averaged weights, where weights are averaged."""
        assert self.validation_ids is not None
        self._hear_all()
        with self.average.applied():
            nats = self._held_out_nats(self.validation_ids)
        improved = nats < self.best
        self.worse = 0 if improved else self.worse + 1
        self.plateau_worse = 0 if improved else self.plateau_worse + 1
        if improved:
            self.best, self.best_step = nats, self.step
        elif self.plateau_worse > self.settings.optimisation.plateau_patience:
            self.plateau *= self.settings.optimisation.plateau_factor
            self.plateau_worse = 0
        self.validated_at = self.step
        self._lap()
        return Validation(self.step, self.epoch, nats, metrics.perplexity(nats), improved)

    def _held_out_nats(self, ids: Any) -> float:
        """The mean over the held-out tokens, of which every process scores some lanes."""
        if not self.groups.divided:
            return metrics.evaluate(self.model, ids, lanes=VALIDATION_LANES).nats_per_token
        mine = [
            metrics.nats_of_lanes(self.model, ids, VALIDATION_LANES, part)
            for part in self.groups.of(VALIDATION_LANES)
        ]
        return sum(self.groups.numbers(mine)) / (len(ids) - 1)

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
        epoch = self.epoch if epoch is None else epoch
        if epoch not in self._passes:
            self._passes = {e: p for e, p in self._passes.items() if e == self.epoch}
            self._passes[epoch] = self._one_pass(epoch)
        return self._passes[epoch]

    def _advance(self, index: int, length: int) -> None:
        self.step += 1
        self.index = index
        if index == length:
            self.epoch, self.index = self.epoch + 1, 0

    def _segment(self, reads: Pass, index: int) -> Segment:
        ahead, self._ahead = self._ahead, None
        return ahead[1] if ahead is not None and ahead[0] == (reads, index) else reads[index]

    def _look_ahead(self, read: int) -> None:
        """Cut out what the next update reads first, while the GPU is busy with this one."""
        reads, index = self.reads(), self.index + read
        if index == len(reads):
            reads, index = self.reads(self.epoch + 1), 0
        self._ahead = ((reads, index), reads[index])

    def prepare(self, segment: Segment) -> tuple[Tensor, Tensor, Masks]:
        """Ids on the device, some of them hidden, and the masks of this window."""
        if not self.model.training:
            self.model.train()
        x, y = segment.x.to(self.device), segment.y.to(self.device)
        lanes, mine = self.groups.batch, self.groups.rows
        masks = self.reader.draw_masks(lanes)  # for every lane, whoever has it
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

    # ------------------------------------------------------------------ chance

    @contextmanager
    def chance_of(self, group: int = -1) -> Iterator[None]:
        """What draws from PyTorch's global generators, such as dropout, is lent our own states.

        A group of lanes draws from its own, whoever has it.
        """
        if not self.reader.draws_globally:
            yield
            return
        cuda = self.device.type == "cuda"
        with torch.random.fork_rng([self.device] if cuda else []):
            if group >= 0:
                key = np.random.SeedSequence([self.settings.seed, self.step, group])
                torch.manual_seed(int(key.generate_state(1, np.uint64)[0] >> 1))
                yield
                return
            torch.set_rng_state(self.chance["cpu"])
            if cuda:
                torch.cuda.set_rng_state(self.chance["cuda"], self.device)
            yield
            self.chance = {"cpu": torch.get_rng_state()}
            if cuda:
                self.chance["cuda"] = torch.cuda.get_rng_state(self.device)

    # ------------------------------------------------------------------ what went wrong

    def _diagnosis(self, nats: float, norm: float) -> WorkFailed:
        what = f"the loss became {nats}" if not math.isfinite(nats) else f"‖gradient‖ became {norm}"
        optimisation = self.settings.optimisation
        tries = [f"a smaller learning rate than {optimisation.learning_rate:g}"]
        if optimisation.clip is None or optimisation.clip > 1:
            tries.append("clipping to norm 1")
        if self.half:
            tries.append("float32 instead of bfloat16")
        with self.cast():
            origin = first_broken_tensor(self.model, self.reader, *self.latest[:3])
        return Diverged(
            f"{what} at step {self.step + 1}; it began in {origin}",
            hint="try " + " or ".join(tries),
        )

    # ------------------------------------------------------------------ saving

    def __getstate__(self) -> dict[str, Any]:
        """A copy has its own model, optimizer and chance, and goes on by itself."""
        self._hear_all()
        return {**vars(self), "_choice": None, "_watch": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        with recording():
            self._choose()

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that the rest of the training depends on: tensors by name, and plain numbers.

        The tensors are the training's own, as in torch: `copy.deepcopy` keeps them as they are now.
        """
        self._hear_all()
        return saving.saved(self)

    @learns
    def load_state_dict(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken, on this training's device."""
        saving.load(self, tensors, numbers)
        self._pending.clear()
        self._choose()  # a captured graph holds the optimizer's old state


def _as_array(ids: Any) -> Any:
    return ids.cpu().numpy() if isinstance(ids, Tensor) else ids  # torch orders no uint16


def _global_generators(device: torch.device, seed: int) -> dict[str, Tensor]:
    """Fresh states for PyTorch's global generators, from our seed and not from theirs."""
    states = {"cpu": torch.Generator().manual_seed(seed).get_state()}
    if device.type == "cuda":
        states["cuda"] = torch.Generator(device).manual_seed(seed).get_state()
    return states
