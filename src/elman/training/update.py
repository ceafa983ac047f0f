"""What an update of a training is, and which of three ways runs it.

    h_0 ← the state the last window ended in         cut off from what made it
    L   ← mean nats of the window's tokens           lookup → recurrence → output → loss
    g   ← ∂L/∂w                                      back through time, as far as the carry says
    g   ← min(1, θ/‖g‖) g                            clipping
    w   ← optimizer(w, g)                            unless L or ‖g‖ is not finite

    piecewise   any model, any segment: autograd, part by part (`piecewise.py`)
    native      on a CPU: native calls over memory and jobs made once, no autograd
    captured    on a GPU: one CUDA graph, captured once and replayed (`graphed.py`)

At the notes' sizes Python costs a CPU a tenth of an update, and a GPU more than the mathematics. An
update that is the same work on the same shapes every time needs none: what differs from one to the
next (ids, masks, learning rate, state) lies in tensors. `choose` takes the fastest way that suits,
and says why the others do not: `elman.kernels.explain(training)`.
"""

import abc
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast, final

import torch
from torch import Tensor

from elman import cells, kernels
from elman.kernels import Explanation
from elman.kernels.cpu import DOUBLE, FLOAT, HALF, KERNEL, Ends, Hidden, Windows
from elman.kernels.cuda.small import Judge
from elman.language_model import LanguageModel, Masks, State
from elman.language_model.loss import in_pieces
from elman.recurrence.strand import Dropout
from elman.training.graphed import Graphed, tensors_of
from elman.training.optimisation import (
    clip_gradients,
    gradient_norm,
    take_guarded_step,
    take_step,
)
from elman.training.processes import GradientSum, LaneGroups
from elman.training.state import CarriedState

if TYPE_CHECKING:
    from elman.training.loop import Training

Loss = Callable[[Tensor, Tensor, State, Masks], tuple[Tensor, State]]
"""The mean nats of y (batch, time) after x, and the state at the end."""

PLACES = 64
"""Updates on a GPU whose numbers are kept apart."""

Outcome = Callable[[], tuple[float, float]]
"""Gives (nats, ‖g‖), waiting for them where it must."""


class Choice(NamedTuple):
    """How a training updates: in one go, or (None) piece by piece; and why."""

    update: "WholeUpdate | None"
    explanation: Explanation


def choose(training: "Training") -> Choice:
    """The fastest way to run every update of this training, and why not the others."""
    reasons = {}
    for way in (CapturedUpdate, NativeUpdate):
        reason = _differs(training) or way.refuses(training)
        if reason is None:
            return Choice(way.of(training), Explanation(way.name, reasons))
        reasons[way.name] = reason
    return Choice(None, Explanation("piecewise", reasons))


def _differs(training: "Training") -> str | None:
    """Why two updates of this training are not the same work on the same shapes."""
    settings = training.settings
    reasons = {
        f"carry={settings.reading.carry} reads segments of other shapes": (
            not settings.reading.carry_used.windows
        ),
        "a memory budget has states computed again": settings.reading.memory,
    }
    for reason, holds in reasons.items():
        if holds:
            return reason
    return training.reader.irregular()


class Read(NamedTuple):
    """One window of an update, x and y (batch, time)."""

    x: Tensor
    y: Tensor
    masks: Masks
    fresh: bool = False  # the state before it is the state before any text
    weight: float = 1.0  # of its mean nats in the loss of the update

    def of(self, rows: slice) -> "Read":
        """Some rows of it."""
        return self._replace(x=self.x[rows], y=self.y[rows], masks=self.masks.of(rows))


class WholeUpdate(abc.ABC):
    """`update(reads, rate)` moves the weights, and `state` goes on by itself.

    A loss or norm that is not finite changes neither weights nor state.
    """

    name: ClassVar[str]
    late: int = 0
    """How many updates may follow before an outcome has to be asked for. Once one has failed, those
    that follow change nothing, until `forgive`."""

    def __init__(
        self,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        clip: float | None,
        batch: int,
    ) -> None:
        self.model, self.optimizer, self.clip = model, optimizer, clip
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        sizes = cells.of_model(model.cell).state_sizes(model.hidden_size)
        shapes = [(model.shape.layers, batch, n) for n in sizes]
        self.held = [model.bias_q.detach().new_zeros(shape) for shape in shapes]

    @staticmethod
    @abc.abstractmethod
    def refuses(training: "Training") -> str | None:
        """Why this way does not suit the training; None if it does."""

    @classmethod
    @abc.abstractmethod
    def of(cls, training: "Training") -> "WholeUpdate":
        """This way, for the updates of a training."""

    @abc.abstractmethod
    def __call__(self, reads: Sequence[Read], rate: float) -> Outcome:
        """From the state that it was told to start from."""

    @property
    def state(self) -> State:
        """The state after the last update, as the model takes it; overwritten by the next."""
        return (self.held[0], self.held[1]) if len(self.held) == 2 else self.held[0]

    def start_from(self, state: State) -> None:
        """Go on from `state`; None is the state before any text."""
        given = list(CarriedState(state).state_dict().values()) if state is not None else []
        for i, held in enumerate(self.held):
            if state is None:
                self._forget(held)
            elif given[i] is not held:
                held.copy_(given[i])

    def _forget(self, held: Tensor) -> None:
        held.zero_()

    def forgive(self) -> None:
        """Let updates change something again; of most there is nothing to forgive."""
        return


@final
class NativeUpdate(WholeUpdate):
    """On a CPU: `elman.kernels.cpu.Windows`, one window after the other."""

    name = "native"
    repeats: ClassVar[float] = 2.0
    """How often a window must read a token on average for the embedding's products by token."""

    def __init__(
        self, training: "Training", moved: "Moved", windows: tuple[int, int], group: int = -1
    ) -> None:
        super().__init__(*moved, windows[0])
        model, self.group, self.chance = moved[0], group, training.chance_of
        kind = HALF if training.half else DOUBLE if model.bias_q.dtype == torch.float64 else FLOAT
        E = None if model.embedding is None else model.embedding.weight
        W_hq = model.weight_hq if E is None or not model.shape.tied else E
        ids = torch.zeros(windows[::-1], dtype=torch.int64, device="cpu")
        xs = ids if E is None else E.new_zeros(*ids.shape, E.shape[1])
        job = model.recurrence.job(xs, self.state)
        ends = Ends(E, W_hq, model.bias_q)
        hides = model.shape.dropout.inputs > 0
        by_token = E is not None and not hides and self.repeats * len(E) <= ids.numel()
        self.windows = Windows(KERNEL, job, self.held, ends, kind, by_token=by_token)
        pairs = zip(self.windows.weights, self.windows.gradients, strict=True)
        self.pairs = [(w, g) for w, g in pairs if w.requires_grad]

    @staticmethod
    def refuses(training: "Training") -> str | None:
        """Whether the native kernel runs the model."""
        model, half = training.model, training.half
        weight = model.bias_q
        dtypes = (torch.float32,) if half else (torch.float32, torch.float64)
        if weight.device.type != "cpu":
            return f"the model is on {weight.device.type}"
        if weight.dtype not in dtypes:
            return f"the weights are {weight.dtype}"
        ids = torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
        explanation = kernels.explain(model.recurrence, ids)
        if explanation.runs != KERNEL.name:
            return explanation.reasons.get(KERNEL.name, f"ELMAN_KERNELS names {explanation.runs}")
        if not all(p.is_contiguous() for p in model.parameters()):
            return "some weights lie scattered in memory"
        if half and KERNEL.variant(HALF) is None:
            return "this processor has no bfloat16 products"
        reading = training.settings.reading
        if in_pieces(reading.batch_size * reading.window, len(weight)):
            return "the logits of a window are too many to be in memory all at once"
        return None

    @classmethod
    def of(cls, training: "Training") -> "WholeUpdate":
        """For windows of the training's shape, or of the shapes of its groups of lanes."""
        reading = training.settings.reading
        if training.groups.divided:
            return GroupedUpdate(training)
        return cls(training, _moved(training), (reading.batch_size, reading.window))

    def __call__(self, reads: Sequence[Read], rate: float) -> Outcome:
        """Returns when all is done."""
        before = [held.clone() for held in self.held] if len(reads) > 1 else self.held
        nats = self.gradient(reads) / sum(read.y.numel() for read in reads)
        norm = clip_gradients(self.parameters, self.clip)
        if math.isfinite(nats) and math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            take_step(self.optimizer)
            self.windows.carry()
        else:
            torch._foreach_copy_(self.held, before)
        return lambda: (nats, norm)

    def gradient(self, reads: Sequence[Read]) -> float:
        """The gradient of the windows in `.grad`, and the sum of their losses."""
        total = 0.0
        with self.chance(self.group):
            for i, read in enumerate(reads):
                if i > 0:
                    self.windows.carry()
                    if read.fresh:
                        self.start_from(None)
                hidden = self._hidden(read.masks)
                nats = self.windows(read.x.T, read.y.T, hidden, read.weight)
                total += nats * read.y.numel()
                for weight, gradient in self.pairs:  # model.double() and the like change .grad
                    if i > 0 and weight.grad is not None:
                        weight.grad += gradient
                    else:
                        weight.grad = gradient.clone() if len(reads) > 1 else gradient.detach()
        return total

    def _hidden(self, masks: Masks) -> Hidden:
        """The masks as the kernel takes them, those between layers drawn here."""
        between, drop = [], self.model.shape.dropout.layers
        if drop:
            drawn = Dropout(drop, int(torch.randint(2**62, (), device="cpu")))
            gaps = range(self.model.shape.layers - 1)
            between = [drawn.mask(self.windows.dhs[i], i, 0) for i in gaps]
        return Hidden(masks.inputs, masks.outputs, [*masks.recurrent.values()], between)


@final
class GroupedUpdate(WholeUpdate):
    """The native calls for one group of lanes after the other, summed over all processes."""

    name = "native"

    def __init__(self, training: "Training") -> None:
        self.groups = training.groups
        own, window = self.groups.own, training.settings.reading.window
        moved = _moved(training)
        super().__init__(*moved, sum(g.rows.stop - g.rows.start for g in own))
        self.parts = [
            NativeUpdate(training, moved, (g.rows.stop - g.rows.start, window), g.group)
            for g in own
        ]

    @staticmethod
    def refuses(training: "Training") -> str | None:
        """Where the native calls do not suit."""
        return NativeUpdate.refuses(training)

    @classmethod
    def of(cls, training: "Training") -> "GroupedUpdate":
        """For the groups of the training."""
        return cls(training)

    def __call__(self, reads: Sequence[Read], rate: float) -> Outcome:
        """Returns when all is done, here and elsewhere."""
        total = GradientSum(self.groups, self.parameters)
        for lanes, part in zip(self.groups.own, self.parts, strict=True):
            for mine, held in zip(part.held, self.held, strict=True):
                mine.copy_(held[:, lanes.rows])
            total.add(lanes, part.gradient([read.of(lanes.rows) for read in reads]))
        steps = sum(read.y.shape[1] for read in reads)
        nats = float(total.finish()) / (self.groups.batch * steps)
        norm = clip_gradients(self.parameters, self.clip)
        if math.isfinite(nats) and math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            take_step(self.optimizer)
            self._carry()
        return lambda: (nats, norm)

    def _carry(self) -> None:
        for lanes, part in zip(self.groups.own, self.parts, strict=True):
            part.windows.carry()
            for mine, held in zip(part.held, self.held, strict=True):
                held[:, lanes.rows].copy_(mine)


@final
class CapturedUpdate(WholeUpdate):
    """On a GPU, as one CUDA graph.

    The first call runs step by step, so that kernels are compiled and the optimizer has made its
    state; then it is captured.
    """

    name = "captured"

    def __init__(
        self,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        clip: float | None,
        batch: int,
        loss: Loss,
        *,
        groups: LaneGroups | None = None,
        capture: bool = True,
    ) -> None:
        super().__init__(model, optimizer, clip, batch)
        like, self.loss, self.groups = model.bias_q, loss, groups
        self.rate, self.one = (torch.full((), n, device=like.device) for n in (0.0, 1.0))
        for group in optimizer.param_groups:
            group["lr"] = self.rate
        self.judge: Judge | None = None
        if kernels.allows("cuda") and Judge.takes(self.parameters):
            self.judge, self.late = Judge(like.device, clip, PLACES), PLACES - 1
            self.events = [torch.cuda.Event() for _ in range(PLACES)]
        pinned = {"pin_memory": like.is_cuda, "device": "cpu"}
        self.numbers = torch.zeros(2, dtype=like.dtype, **pinned)  # nats, ‖g‖
        self.capture, self.calls = capture, 0
        self._graph: Graphed | None = None
        self._joined = False
        self._rate = 0.0
        self._shape: tuple[bool, bool, list[str]] = (False, False, [])

    @staticmethod
    def refuses(training: "Training") -> str | None:
        """Whether there is a GPU, and an optimizer that runs on it without asking back."""
        if training.device.type != "cuda":
            return f"the model is on {training.device.type}"
        if not all(group.get("fused") for group in training.optimizer.param_groups):
            return f"{type(training.optimizer).__name__} is not fused"
        if training.groups.exact:
            return f"lane_groups={training.groups.count} reads the lanes in several parts"
        if training.settings.accumulate > 1:
            return f"accumulate={training.settings.accumulate} reads several segments"
        if training.model.shape.dropout.layers:
            return "dropout between layers is drawn for each step"
        return None

    @classmethod
    def of(cls, training: "Training") -> "CapturedUpdate":
        """For windows of the training's shape."""
        rows, groups = training.groups.rows, training.groups
        together = groups if groups.processes.connected else None
        return cls(*_moved(training), rows.stop - rows.start, training.read_window, groups=together)

    def __call__(self, reads: Sequence[Read], rate: float) -> Outcome:
        """Launches the update and returns; what it returns waits."""
        ((x, y, masks, *_),) = reads
        inputs = [*self._windows(x, y), *self._flat(masks)]
        if rate != self._rate:
            self._rate = rate
            self.rate.fill_(rate)
        if self._graph is None and self.capture and self.calls > 0:
            self._graph = self._captured(inputs)
        place = self.calls % PLACES
        self.calls += 1
        (self._graph or self._update)(*inputs)
        if self.judge is None:
            return self._wait
        self.events[place].record()
        return functools.partial(self._told, self.judge, place)

    def _told(self, judge: Judge, place: int) -> tuple[float, float]:
        """Both numbers of one update, once the GPU has come so far."""
        self.events[place].synchronize()
        nats, norm = judge.told[place].tolist()
        return nats, norm

    def _wait(self) -> tuple[float, float]:
        if self.rate.is_cuda:
            torch.cuda.current_stream().synchronize()
        nats, norm = self.numbers.tolist()
        return nats, norm

    def _forget(self, held: Tensor) -> None:
        if self.judge is None:
            held.zero_()
        else:  # the state that a failed update began with has to be there when it is looked at
            torch.where(self.judge.broken, held, torch.zeros_like(held), out=held)

    def forgive(self) -> None:
        """Let updates change something again."""
        if self.judge is not None:
            self.judge.forgive()

    def _captured(self, inputs: Sequence[Tensor]) -> Graphed:
        for group in self.optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
        changes = [*tensors_of(self.model, self.optimizer), *self.held]
        changes += [] if self.judge is None else self.judge.changes()
        with warnings.catch_warnings():  # that it also runs uncaptured, to warm up, is no news
            warnings.filterwarnings("ignore", message=".*capturable.*")
            return Graphed(self._update, inputs, changes=changes)

    def _windows(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """x and y; or, where y is x one token on, both as one: one copy instead of two."""
        one = x.is_cuda and y.data_ptr() == x.data_ptr() + 8 and x.stride() == y.stride()
        one = one and x.stride(1) == 1 and x.dtype == torch.int64
        if self.calls == 0:
            self._joined = one
        if not self._joined:
            return [x, y]
        assert one, "windows of one training are all cut alike"
        return [x.as_strided((x.shape[1] + 1, len(x)), x.stride()[::-1])]  # time first

    def _update(self, *inputs: Tensor) -> tuple[()]:
        if self._joined:
            inputs = (inputs[0][:-1].T, inputs[0][1:].T, *inputs[1:])
        x, y, *flat = inputs
        self.optimizer.zero_grad()
        loss, after = self.loss(x, y, self.state, self._masks(flat))
        loss.backward(self.one.to(loss.dtype))
        broken = self._judged(self._sum(loss.detach()))
        for held, new in zip(self.held, CarriedState(after).state_dict().values(), strict=True):
            torch.where(broken, held, new.detach(), out=held)
        return ()

    def _sum(self, nats: Tensor) -> Tensor:
        """Leave the gradient of all processes' lanes in `.grad`; their mean nats."""
        if self.groups is None:
            return nats
        part = self.groups.own[0].part
        gradients = [cast(Tensor, p.grad) for p in self.parameters]
        flat = torch.cat([g.reshape(-1) for g in gradients] + [nats.reshape(1)]).mul_(part)
        total = self.groups.processes.all_reduce(flat)
        *parts, mean = total.split([g.numel() for g in gradients] + [1])
        torch._foreach_copy_(
            gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=True)]
        )
        return mean[0]

    def _judged(self, loss: Tensor) -> Tensor:
        """Step by g / max(1, ‖g‖/θ), unless loss or ‖g‖ is not finite; whether one is not."""
        if self.judge is not None:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            self.judge(gradients, loss)
            scale = None if self.clip is None else self.judge.scale
            take_guarded_step(self.optimizer, self.judge.refuse, scale)
            return self.judge.broken
        numbers = torch.stack([loss, gradient_norm(self.parameters)])
        broken = (numbers.sum() * 0).ne(0)  # 0 · ∞ and 0 · NaN are NaN, which is not 0
        scale = None if self.clip is None else (numbers[1] / self.clip).clamp(min=1.0)
        take_guarded_step(self.optimizer, broken.float(), scale)
        self.numbers.copy_(numbers, non_blocking=True)
        return broken

    def _flat(self, masks: Masks) -> list[Tensor]:
        self._shape = (masks.inputs is not None, masks.outputs is not None, [*masks.recurrent])
        return [
            m for m in (masks.inputs, masks.outputs, *masks.recurrent.values()) if m is not None
        ]

    def _masks(self, flat: Sequence[Tensor]) -> Masks:
        rest = list(flat)
        inputs, outputs, names = self._shape
        return Masks(
            rest.pop(0) if inputs else None,
            rest.pop(0) if outputs else None,
            dict(zip(names, rest, strict=True)),
        )


Moved = tuple[LanguageModel, torch.optim.Optimizer, float | None]


def _moved(training: "Training") -> Moved:
    """What every update moves, and how far at most."""
    return training.model, training.optimizer, training.settings.optimisation.clip
