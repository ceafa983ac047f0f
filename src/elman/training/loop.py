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
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from elman.errors import UserError, WorkFailed
from elman.kernels import Explanation, allows, explain
from elman.kernels.cpu import KERNEL
from elman.language_model import Masks, State, reader_of
from elman.language_model.nests import joined, over, rows_of
from elman.options import check, option
from elman.recurrence.operator import known_ids
from elman.scoring import metrics
from elman.text import batches
from elman.training.divergence import first_broken_tensor
from elman.training.optimisation import (
    PANEL,
    Average,
    Optimisation,
    build_optimizer,
    clip_gradients,
    learning_rate,
    take_step,
)
from elman.training.processes import ALONE, GradientSum, LaneGroups, Processes
from elman.training.records import Epoch, Progress, Update, Validation
from elman.training.segments import Pass, Reading, Segment, one_pass
from elman.training.state import CarriedState
from elman.training.update import Outcome, Read, WholeUpdate, choose

__all__ = [
    "CarriedState",
    "Optimisation",
    "Reading",
    "Settings",
    "Training",
    "Update",
    "Validation",
]

PRECISIONS = ("float32", "bfloat16")
VALIDATION_LANES = 16
TOKENS_ON_GPU = 2**27  # 1 GiB of int64
NO_MASKS = Masks(None, None, {})

Prepared = tuple[Segment, Tensor, Tensor, Masks]
"""A segment with its ids and targets, of this process's lanes, as they are read."""


@dataclass(frozen=True)
class Settings:
    """A whole training: how to read, how to update, for how long."""

    epochs: int = option(10, "Passes over the text", panel=PANEL, at_least=1, later=True)
    accumulate: int = option(1, "Segments per update", panel=PANEL, at_least=1)
    validate_every: int = option(
        0, "Updates; 0: twenty times, or a tenth of the time", panel=PANEL, at_least=0
    )
    patience: int = option(
        0,
        "Stop after so many validations without a better one; 0: never",
        panel=PANEL,
        at_least=0,
        later=True,
    )
    precision: str = option(
        "float32", "Of the products, by autocast", panel=PANEL, choices=PRECISIONS
    )
    lane_groups: int = option(
        0,
        "Groups of lanes, summed in a fixed order: as many processes as you like, up to so many, "
        "end in the same weights; 0: in the fastest order",
        panel=PANEL,
        at_least=0,
    )
    seed: int = option(0, "Same seed, same model", panel="Run", at_least=0)
    reading: Reading = field(default_factory=Reading)
    optimisation: Optimisation = field(default_factory=Optimisation)

    def __post_init__(self) -> None:
        check(self)
        for name, kind in (("reading", Reading), ("optimisation", Optimisation)):
            if not isinstance(getattr(self, name), kind):
                raise UserError(
                    f"{name}={getattr(self, name)!r} must be of the type {kind.__name__}",
                    hint=f"elman.training.{kind.__name__}(…)",
                )


@dataclass
class Tally:
    """A pass over the text so far."""

    nats: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0


class Latest(NamedTuple):
    """What an update has read."""

    x: Tensor
    state: State
    masks: Masks
    y: Tensor

    @property
    def read(self) -> Read:
        """As a `WholeUpdate` takes it."""
        return Read(self.x, self.y, self.masks)


@dataclass(eq=False)
class Pending:
    """An update that was made, or is being made by a GPU; `numbers` (Σ nats, ‖g‖) once known."""

    outcome: Outcome
    tokens: int
    before: tuple[int, int, int, float, float]
    tally: Tally
    latest: Latest | None
    numbers: tuple[float, float] | None = None
    failure: WorkFailed | None = None


class Training:
    """The state of one training, and the loop that moves it on."""

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
        self._choice = choose(self)

    def _check_model(self) -> None:
        reading = self.settings.reading
        refusal = self.reader.refusal(reading.carry_used, reading.memory_used)
        if refusal is not None:
            why, hint = refusal
            raise UserError(f"carry={reading.carry} memory={reading.memory} with {why}", hint=hint)
        if (recurrence := self.reader.recurrence) is not None:
            reading.check_agrees(recurrence.carry, recurrence.memory, recurrence.time)
        self._take_time(reading)
        if reading.memory:
            self._check_memory(reading)
        if self.validation_ids is not None and len(self.validation_ids) < 2:
            raise UserError(
                f"{len(self.validation_ids)} held-out tokens leave nothing to predict",
                hint="a larger part for validation, or none",
            )

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
        with self._cast(), self._lent():
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
        ids = torch.zeros(1, self.settings.reading.batch_size, dtype=torch.int64)
        with torch.no_grad(), self._cast():
            xs = self.model.inputs(ids.to(self.device), Masks(None, None, {}))
            return f"{explain(self.reader.recurrence, xs).runs} kernel"

    # ------------------------------------------------------------------ the loop

    def records(self) -> Iterator[Progress]:
        """Train to the end, yielding after every update, pass over the text and validation.

        Leave it at any record and call it again, or save and load in between: it goes on.
        """
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
        return (self.epoch + self.index / len(self._pass())) / self.settings.epochs

    def _validation_is_due(self) -> bool:
        if self.validation_ids is None or self.validated_at == self.step or self.step == 0:
            return False
        every = self.settings.validate_every
        return self.finished or (every > 0 and self.step % every == 0)

    def update(self) -> Update:
        """Read the next segments, carry their losses back, and move the weights once.

        The weights have moved when this returns, or will have before anything else on their GPU:
        there, the record's nats and ‖g‖ are waited for when they are first looked at, so that the
        next update can be prepared meanwhile.
        """
        if self.index == 0:
            self.tally = Tally()
        before = (self.step, self.epoch, self.index, self.tally.tokens, self.tally.seconds)
        reads, epoch = self._pass(), self.epoch
        indices = range(self.index, min(self.index + self.settings.accumulate, len(reads)))
        segments = [self._segment(reads, index) for index in indices]
        rate = learning_rate(self.settings.optimisation, self.step, self.progress, self.plateau)
        tokens = sum(self.groups.batch * segment.scored for segment in segments)
        if self._choice.update is not None:
            outcome = self._update_whole(self._choice.update, segments, rate)
        else:
            outcome = self._update_piecewise(segments, rate)
        pending = Pending(outcome, tokens, before, self.tally, self._latest)
        self._advance(indices.stop, len(reads))
        self._await(pending)
        self.average.update(self.progress)
        seconds = self._lap()
        self.tally.tokens += tokens
        self.tally.seconds += seconds
        known: dict[str, Any] = {
            "step": self.step,
            "epoch": epoch,
            "learning_rate": rate,
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "progress": self.progress,
        }
        if pending.numbers is None:
            return Update.late(known, partial(self._update_numbers, pending))
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
        late = 0 if whole is None or self.average.averages else whole.late
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
        self.step, self.epoch, self.index, tokens, seconds = pending.before
        assert pending.latest is not None, "what was heard of is no longer pending"
        self.tally, self._latest = pending.tally, pending.latest
        self.tally.tokens, self.tally.seconds = tokens, seconds
        whole, later = self._choice.update, list(self._pending)[1:]
        if whole is not None:
            if later:  # whose gradients lie where those of this one were
                whole([pending.latest.read], 0.0)()
            whole.forgive()
        failure = self._diagnosis(nats, norm)
        for waiting in self._pending:
            waiting.failure = failure
        self._pending.clear()
        return failure

    def _update_piecewise(self, segments: list[Segment], rate: float) -> Outcome:
        """Segment after segment, then clip and step; gives the sum of the losses, and ‖g‖."""
        prepared = [(segment, *self._prepared(segment)) for segment in segments]
        if self.groups.divided:
            nats = self._gradient_of_groups(prepared)
        else:
            nats = self._gradient(prepared, self.carried)
        norm = clip_gradients(self.parameters, self.settings.optimisation.clip)
        if math.isfinite(nats) and math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            take_step(self.optimizer)
        return lambda: (nats, norm)

    def _gradient(self, prepared: list[Prepared], carried: CarriedState, group: int = -1) -> float:
        """The gradient of the segments in `.grad`, and the sum of their losses."""
        self.optimizer.zero_grad()
        with self.chance_of(group):
            return sum(self._read(*each, 1 / len(prepared), carried) for each in prepared)

    def _gradient_of_groups(self, prepared: list[Prepared]) -> float:
        """The same, one group of lanes after the other, summed with those of other processes."""
        total, dim, states = GradientSum(self.groups, self.parameters), self.reader.lane_dim, []
        for lanes in self.groups.own:
            rows = lanes.rows
            carried = CarriedState(rows_of(self.carried.value, dim, rows))
            part = [
                (segment, x[rows], y[rows], masks.of(rows)) for segment, x, y, masks in prepared
            ]
            total.add(lanes, self._gradient(part, carried, lanes.group))
            states.append(carried.value)
        self.carried.value = joined(states, dim)
        return float(total.finish())

    def _update_whole(self, whole: WholeUpdate, segments: list[Segment], rate: float) -> Outcome:
        """The same in one go."""
        share, first = 1 / len(segments), segments[0]
        reads = [Read(*self._prepared(s), s.fresh, share * s.scored / s.divisor) for s in segments]
        whole.start_from(None if first.fresh else self.carried.value)
        self._latest = Latest(reads[0].x, whole.state, reads[0].masks, reads[0].y)
        outcome = whole(reads, rate)
        tokens = sum(self.groups.batch * segment.scored for segment in segments)
        self.carried.value = whole.state
        self._look_ahead(len(segments))

        def summed() -> tuple[float, float]:
            nats, norm = outcome()
            return nats * tokens, norm

        return summed

    def _end_epoch(self) -> Epoch:
        tally, self.tally = self.tally, Tally()
        tokens = int(tally.tokens)
        speed = tokens / tally.seconds
        known: dict[str, Any] = {"step": self.step, "epoch": self.epoch, "tokens": tokens}
        known["tokens_per_second"] = speed
        return Epoch.late(known, partial(self._epoch_numbers, tally, tokens))

    def _epoch_numbers(self, tally: Tally, tokens: int) -> dict[str, float]:
        while any(pending.tally is tally for pending in self._pending):
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

    def _pass(self, epoch: int | None = None) -> Pass:
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
        reads, index = self._pass(), self.index + read
        if index == len(reads):
            reads, index = self._pass(self.epoch + 1), 0
        self._ahead = ((reads, index), reads[index])

    def _prepared(self, segment: Segment) -> tuple[Tensor, Tensor, Masks]:
        """Ids on the device, some of them hidden, and the masks of this window."""
        if not self.model.training:
            self.model.train()
        x, y = segment.x.to(self.device), segment.y.to(self.device)
        lanes, mine = self.groups.batch, self.groups.rows
        masks = self.reader.draw_masks(lanes)  # for every lane, whoever has it
        hidden = self.reader.hide_tokens(x, lanes, mine.start)
        return hidden, y, masks.of(mine) if self.groups.divided else masks

    def _read(
        self,
        segment: Segment,
        x: Tensor,
        y: Tensor,
        masks: Masks,
        share: float,
        carried: CarriedState,
    ) -> float:
        """Forward and backward through one segment; returns the sum of its losses in nats."""
        state = None if segment.fresh else carried.value
        self._latest = Latest(x, state, masks, y)
        if self.settings.reading.carry_used.exact:
            return self._read_lane(x, y, masks, share / (len(x) * segment.divisor))
        with self._cast(), self._lent(segment.xi):
            hs, after = self._run(x, state, masks, segment)
            y = y[:, -segment.scored :]
            loss = self.reader.mean_nats(hs[len(hs) - segment.scored :], y.T, masks)
        carried.carry(after)
        weight = share * segment.scored / segment.divisor
        (loss if weight == 1 else loss * weight).backward()
        return loss.item() * y.numel()

    def read_window(self, x: Tensor, y: Tensor, state: State, masks: Masks) -> tuple[Tensor, State]:
        """The mean nats of a plain window, and the state after it."""
        with self._cast(), known_ids():
            hs, after = self.reader.states(x, state, masks)
            return self.reader.mean_nats(hs, y.T, masks), after

    def _read_lane(self, x: Tensor, y: Tensor, masks: Masks, scale: float) -> float:
        """Forward and backward through whole lanes, the losses taken piece by piece."""

        def loss(hs: Tensor, start: int) -> Tensor:
            piece = y[:, start : start + len(hs)]
            return self.reader.mean_nats(hs, piece.T, masks) * (piece.numel() * scale)

        with self._cast(), self._lent():
            total, _ = self.reader.read_back(x, masks, loss)
        return total.item() / scale

    def _cast(self) -> torch.autocast:
        """bfloat16 inside this block, where it was asked for."""
        return torch.autocast(self.device.type, torch.bfloat16, self.half)

    @property
    def half(self) -> bool:
        """Whether products are taken in bfloat16."""
        return self.settings.precision == "bfloat16"

    def _run(self, x: Tensor, state: State, masks: Masks, segment: Segment) -> tuple[Tensor, State]:
        """h_t of the segment, time first, and the state where the next segment starts."""
        if segment.advance == x.shape[1]:
            return self.reader.states(x, state, masks)
        if segment.advance == 0:  # a sliding window that still reaches back to the text's start
            return self.reader.states(x, state, masks)[0], state
        early, middle = self.reader.states(x[:, : segment.advance], state, masks)
        late, _ = self.reader.states(x[:, segment.advance :], middle, masks)
        return torch.cat([early, late]), middle

    def _lent(self, xi: Tensor | None = None) -> AbstractContextManager[None]:
        """Inside this block the model carries by ξ (None: all) and keeps what the reading says."""
        return self.reader.lent(xi, self.settings.reading.memory_used)

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
        with self._cast():
            origin = first_broken_tensor(self.model, self.reader, *self._latest[:3])
        return WorkFailed(
            f"{what} at step {self.step + 1}; it began in {origin}",
            hint="try " + " or ".join(tries),
        )

    # ------------------------------------------------------------------ saving

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

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that the rest of the training depends on: tensors by name, and plain numbers."""
        self._hear_all()
        tensors = {f"weights/{n}": p.detach() for n, p in self.model.named_parameters()}
        names = {id(p): n for n, p in self.model.named_parameters()}
        tensors |= {f"buffers/{n}": b for n, b in self.model.named_buffers()}
        for parameter, values in self.optimizer.state.items():
            for key, value in values.items():
                tensors[f"optimizer/{names[id(parameter)]}/{key}"] = torch.as_tensor(value)
        for w, a in zip(self.average.weights, self.average.averages, strict=False):
            tensors[f"average/{names[id(w)]}"] = a
        tensors |= {f"carried/{n}": t for n, t in self._all_lanes().state_dict().items()}
        tensors |= {f"noise/{n}": t for n, t in self.reader.noise.state_dict().items()}
        tensors |= {f"chance/{n}": t for n, t in self.chance.items()}
        numbers = {name: getattr(self, name) for name in self.NUMBERS}
        numbers |= {f"epoch_{name}": value for name, value in asdict(self.tally).items()}
        numbers |= {"averaged": self.average.count, "noise": self.reader.noise.seed}
        return tensors, numbers | {"cut_by": self.settings.reading.cut_by}

    def _all_lanes(self) -> CarriedState:
        """The state of every lane of the batch, from all processes."""
        groups, dim = self.groups, self.reader.lane_dim if self.groups.divided else 0

        def whole(tensor: Tensor) -> Tensor:
            return self.processes.gathered(tensor.cpu().contiguous(), dim, groups.sizes)

        if self.processes.size == 1:
            return self.carried
        return CarriedState(over(whole, self.carried.value))

    def load_state_dict(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken, on this training's device."""
        parts = _by_first_name(tensors)
        parameters = dict(self.model.named_parameters())
        _check_fit("weights", parts, parameters)
        _check_fit("buffers", parts, dict(self.model.named_buffers()))
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(parts["weights"][name])
            for name, buffer in self.model.named_buffers():
                buffer.copy_(parts["buffers"][name])
            for w, a in zip(self.average.weights, self.average.averages, strict=False):
                name = next(n for n, p in parameters.items() if p is w)
                a.copy_(parts["average"][name])
        self._load_optimizer(parts.get("optimizer", {}), parameters)
        self.carried.load_state_dict(parts.get("carried", {}))
        if self.processes.size > 1:
            dim, rows = self.reader.lane_dim, self.groups.rows
            self.carried.value = rows_of(self.carried.value, dim, rows)
        self.carried.to(self.device)
        self._load_numbers(numbers)
        self._cut_anew(numbers.get("cut_by"))
        names = [f.name for f in fields(Tally)]  # runs of elman 0.1.0 have none
        self.tally = Tally(**{name: numbers.get(f"epoch_{name}", 0.0) for name in names})
        self._pending.clear()
        self.average.count = numbers["averaged"]
        self.reader.noise.seed = numbers["noise"]
        self.reader.noise.load_state_dict(parts.get("noise", {}))
        self.chance |= parts.get("chance", {})
        self._choice = choose(self)  # a captured graph holds the optimizer's old state

    def _load_numbers(self, numbers: dict[str, Any]) -> None:
        """Where it is; numbers that no training can have reached are refused."""
        never_validated = {"best": math.inf} if numbers["best"] is None else {}
        for name in self.NUMBERS:
            value, kind = (numbers | never_validated)[name], type(getattr(self, name))
            if not isinstance(value, (int, kind)) or isinstance(value, bool):
                raise ValueError(f"its {name} is {value!r}")
            setattr(self, name, value)
        counts = self.epoch, self.best_step, self.validated_at + 1, self.worse, self.plateau_worse
        possible = min(*counts, self.index) >= 0 and max(counts) <= self.step + 1
        if not possible or self.index >= len(self._saved_pass(numbers.get("cut_by"))):
            raise ValueError(
                f"it claims to be in pass {self.epoch}, at segment {self.index}, after {self.step} "
                "updates"
            )

    def _saved_pass(self, cut_by: Any) -> Pass:
        """The pass as it was cut when the training was saved; runs of elman 0.2 do not say how."""
        if cut_by in (None, self.settings.reading.cut_by):
            return self._pass()
        reading = replace(self.settings.reading, **cut_by)
        return one_pass(self.train_ids, reading, seed=self.settings.seed, epoch=self.epoch)

    def _cut_anew(self, cut_by: Any) -> None:
        """Find the place in a pass that is cut otherwise than the one it was saved in.

        The state goes on as it is: a few tokens off its place, as it would be after any cut.
        """
        if self.index == 0 or cut_by in (None, self.settings.reading.cut_by):
            return
        self.index = self._pass().after(self._saved_pass(cut_by).share(self.index))
        if self.index == len(self._pass()):
            self.epoch, self.index = self.epoch + 1, 0

    def _load_optimizer(self, saved: dict[str, Tensor], parameters: dict[str, Any]) -> None:
        self.optimizer.state.clear()
        for name, value in saved.items():
            owner, key = name.rsplit("/", 1)
            parameter = parameters[owner]
            self.optimizer.state[parameter][key] = value.to(self.device).clone()


def _as_array(ids: Any) -> Any:
    return ids.cpu().numpy() if isinstance(ids, Tensor) else ids  # torch orders no uint16


def _global_generators(device: torch.device, seed: int) -> dict[str, Tensor]:
    """Fresh states for PyTorch's global generators, from our seed and not from theirs."""
    states = {"cpu": torch.Generator().manual_seed(seed).get_state()}
    if device.type == "cuda":
        states["cuda"] = torch.Generator(device).manual_seed(seed).get_state()
    return states


def _check_fit(part: str, saved: dict[str, dict[str, Tensor]], model: dict[str, Any]) -> None:
    """Refuse a saved training of another model, before anything of this one is touched."""
    theirs = {name: tuple(tensor.shape) for name, tensor in saved.get(part, {}).items()}
    ours = {name: tuple(tensor.shape) for name, tensor in model.items()}
    odd = sorted({name for name, _ in theirs.items() ^ ours.items()})
    if odd:
        there, here = (shapes.get(odd[0], "absent") for shapes in (theirs, ours))
        raise UserError(
            f"the saved training does not fit this model: {odd[0]} is {there} there, {here} here",
            hint="load it into a training of the model that it was saved from",
        )


def _by_first_name(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """`{"a/b/c": t}` → `{"a": {"b/c": t}}`."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        first, rest = name.split("/", 1)
        parts.setdefault(first, {})[rest] = tensor
    return parts
