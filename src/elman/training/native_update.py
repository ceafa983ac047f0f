"""Updates on a CPU in native calls over memory and jobs made once, without autograd."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, final

import torch

from elman import kernels
from elman.kernels.cpu import DOUBLE, FLOAT, HALF, KERNEL, Ends, Hidden, Windows
from elman.language_model import Masks
from elman.language_model.loss import in_pieces
from elman.recurrence.strand import Dropout
from elman.training.optimisation import clip_gradients, take_step
from elman.training.processes import GradientSum
from elman.training.whole_update import Moved, Outcome, Read, WholeUpdate, moved_by

if TYPE_CHECKING:
    from elman.training.loop import Training


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
        if model.shape.dropout.zoneout or model.shape.dropout.updates:
            return "zoneout or recurrent dropout is drawn for each step"
        ids = torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
        explanation = kernels.explain(model.recurrence, ids)
        if explanation.runs != KERNEL.name:
            return explanation.reasons.get(KERNEL.name, f"ELMAN_KERNELS names {explanation.runs}")
        if not all(p.is_contiguous() for p in model.parameters()):
            return "some weights lie scattered in memory"
        if half and KERNEL.variant(HALF) is None:
            return "this processor has no bfloat16 products"
        reading = training.settings.reading
        if not reading.carry_used.windows:
            return f"carry={reading.carry} reads segments of other shapes"
        if in_pieces(reading.batch_size * reading.window, len(weight)):
            return "the logits of a window are too many to be in memory all at once"
        return None

    @classmethod
    def of(cls, training: "Training") -> "WholeUpdate":
        """For windows of the training's shape, or of the shapes of its groups of lanes."""
        reading = training.settings.reading
        if training.groups.divided:
            return GroupedUpdate(training)
        return cls(training, moved_by(training), (reading.batch_size, reading.window))

    def __call__(self, reads: Sequence[Read], rate: float) -> Outcome:
        """Returns when all is done."""
        before = [held.clone() for held in self.held] if len(reads) > 1 else self.held
        nats = self.gradient(reads) / sum(read.y.numel() for read in reads)
        norm, stepped = _step(self, nats, rate)
        if stepped:
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
        moved = moved_by(training)
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
        norm, stepped = _step(self, nats, rate)
        if stepped:
            self._carry()
        return lambda: (nats, norm)

    def _carry(self) -> None:
        for lanes, part in zip(self.groups.own, self.parts, strict=True):
            part.windows.carry()
            for mine, held in zip(part.held, self.held, strict=True):
                held[:, lanes.rows].copy_(mine)


def _step(update: WholeUpdate, nats: float, rate: float) -> tuple[float, bool]:
    """Clip the gradient and step, unless nats or ‖g‖ is not finite: ‖g‖, and whether it did."""
    norm = clip_gradients(update.parameters, update.clip)
    finite = math.isfinite(nats) and math.isfinite(norm)
    if finite:
        for group in update.optimizer.param_groups:
            group["lr"] = rate
        take_step(update.optimizer)
    return norm, finite
