"""Updates on a GPU as CUDA graphs, one for each kind of segment, captured once and replayed."""

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, cast, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from elman import kernels
from elman.cells import named
from elman.kernels.cuda.small import Judge, take_in
from elman.language_model import LanguageModel, Masks, State
from elman.language_model.loss import in_pieces
from elman.language_model.masks import NO_MASKS
from elman.language_model.nests import over
from elman.recurrence.strand import Dropout, Given, Noise, draw_seed, drawn_before
from elman.training.graphed import Graphed, Pool, Update
from elman.training.optimisation import Average, gradient_norm, take_guarded_step
from elman.training.processes import LaneGroups
from elman.training.segments import Cut
from elman.training.state import CarriedState
from elman.training.whole_update import Outcome, Read, WholeUpdate, moved_by

if TYPE_CHECKING:
    from elman.training.loop import Training

Loss = Callable[[Tensor, Tensor, State, Masks, Cut | None], tuple[Tensor, State]]
"""The mean nats of y (batch, time) after x, and the state at the end."""

PLACES = 64
"""Updates on a GPU whose numbers are kept apart."""
MOST_GRAPHS = 256
"""Updates of how many kinds have a graph."""


class Kind(NamedTuple):
    """All about a window that is not in its tensors: what a graph is captured for."""

    steps: int  # it has room for
    weight: float | None  # of its mean nats; None: a tensor says, where steps have a ξ
    fresh: bool
    scored: int | None  # None: a plain window
    advance: int

    @classmethod
    def of(cls, read: Read, first: bool, room: Callable[[int], int]) -> "Kind":
        """Of a window of an update; before the first of them is whatever the update starts from."""
        steps, fresh, cut = read.x.shape[1], read.fresh and not first, read.cut
        if cut is None:
            return cls(steps, read.weight, fresh, None, steps)
        if cut.xi is None:
            return cls(steps, read.weight, fresh, cut.scored, cut.advance)
        assert cut.scored == cut.advance == steps, "what is cut at random is read once"
        return cls(room(steps), None, fresh, room(steps), room(steps))


Parts = tuple[Tensor, Tensor, Masks, Cut | None, Given, float | Tensor]
"""x and y of a window, its masks, how it is cut, what is drawn for it, and its weight."""
NO_TARGET = -100
"""In the place of a token: nothing is scored there."""


@final
class CapturedUpdate(WholeUpdate):
    """On a GPU, as a CUDA graph.

    The first update of a kind runs step by step, so that kernels are compiled and the optimizer has
    made its state; the second is captured.
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
        segments: int = 1,
        grain: int = 1,
        average: Average | None = None,
        groups: LaneGroups | None = None,
        chance: Callable[[], AbstractContextManager[None]] = nullcontext,
        capture: bool = True,
    ) -> None:
        super().__init__(model, optimizer, clip, batch)
        like, self.loss, self.groups = model.bias_q, loss, groups
        self.segments, self.grain, self.chance = segments, grain, chance
        self.rate = torch.zeros((), device=like.device)
        self.zero = torch.zeros_like(self.held[0][0, 0, 0])
        for group in optimizer.param_groups:
            group["lr"] = self.rate
        self.judge: Judge | None = None
        if kernels.allows("cuda") and Judge.takes(self.parameters):
            self.judge, self.late = Judge(like.device, clip, PLACES), PLACES - 1
            self.events = [torch.cuda.Event() for _ in range(PLACES)]
        self._average, self._share = average, 0.0
        self.share = torch.zeros_like(self.rate)
        self.averages = average is not None and self.judge is not None and _reads(average)
        pinned = {"pin_memory": like.is_cuda, "device": "cpu"}
        self.numbers = torch.zeros(2, dtype=like.dtype, **pinned)  # nats, ‖g‖
        self.capture, self.calls = capture, 0
        self._graphs: dict[tuple[Kind, ...], Graphed] = {}
        self._met = set[tuple[Kind, ...]]()
        self._pool: Pool | None = None
        self._joined = False
        self._stream: torch.cuda.Stream | None = None
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
        return _too_many_kinds(training)

    @classmethod
    def of(cls, training: "Training") -> "CapturedUpdate":
        """For windows of the training's shape."""
        rows, groups = training.groups.rows, training.groups
        together = groups if groups.processes.connected else None
        return cls(
            *moved_by(training),
            rows.stop - rows.start,
            training.read_window,
            segments=training.settings.accumulate,
            grain=max(8, training.settings.reading.window // 8),
            average=training.average,
            groups=together,
            chance=training.chance_of,
        )

    def __call__(self, reads: Sequence[Read], rate: float) -> Outcome:
        """Launches the update and returns; what it returns waits."""
        kinds = tuple([Kind.of(read, i == 0, self._room) for i, read in enumerate(reads)])
        inputs = self._tensors(kinds, reads)
        if rate != self._rate:
            self._rate = rate
            self.rate.fill_(rate)
        if self.capture and kinds not in self._graphs:
            self._capture(kinds, inputs)
        return self._run(self._graphs.get(kinds) or functools.partial(self._update, kinds), inputs)

    def _run(self, update: Update, inputs: Sequence[Tensor]) -> Outcome:
        place = self.calls % PLACES
        self.calls += 1
        update(*inputs)
        if self.judge is None:
            return self._wait
        self.events[place].record(self._current_stream())
        return functools.partial(self._told, self.judge, place)

    def average(self, share: float) -> None:
        """In a tensor, as all that changes from one replay to the next."""
        if share != self._share:
            self._share = share
            self.share.fill_(share)

    def _current_stream(self) -> torch.cuda.Stream:
        """What torch has for it, made once: to make it takes ten times as long as to ask which."""
        raw = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        if self._stream is None or self._stream.cuda_stream != raw:
            self._stream = torch.cuda.current_stream()
        return self._stream

    def _told(self, judge: Judge, place: int) -> tuple[float, float]:
        """Both numbers of one update, once the GPU has come so far."""
        self.events[place].synchronize()
        nats, norm = judge.numbers[place].tolist()
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
            torch.where(self.judge.broken, held, self.zero, out=held)

    def look_again(self) -> None:
        """Capture again: a graph knows the old places alone."""
        if self._graphs:
            torch.cuda.current_stream().synchronize()
            self._graphs.clear()
            self._met.clear()
            self._pool = None

    def look_back(self, read: Read) -> None:
        """Step by step: a graph's gradients lie where the next one's do."""
        kinds = (Kind.of(read, True, self._room),)
        self._run(functools.partial(self._update, kinds), self._tensors(kinds, [read]))()

    def forgive(self) -> None:
        """Let updates change something again."""
        if self.judge is not None:
            self.judge.forgive()

    def _capture(self, kinds: tuple[Kind, ...], inputs: Sequence[Tensor]) -> None:
        """Have a graph for a kind that comes again: it is made as soon as such an update is run."""
        if kinds not in self._met:
            self._met.add(kinds)
        elif len(self._graphs) < MOST_GRAPHS:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            for group in self.optimizer.param_groups:
                if "capturable" in group:
                    group["capturable"] = True
            update = functools.partial(self._update, kinds)
            with warnings.catch_warnings():  # that others run uncaptured is no news
                warnings.filterwarnings("ignore", message=".*capturable.*")
                self._graphs[kinds] = Graphed(update, inputs, warm_up=0, pool=self._pool)

    def _tensors(self, kinds: Sequence[Kind], reads: Sequence[Read]) -> list[Tensor]:
        """All that differs from one update to the next, as many for each window."""
        inputs, draws = [], self.model.draws_globally
        with self.chance() if draws else nullcontext():
            for kind, (x, y, masks, _, weight, cut) in zip(kinds, reads, strict=True):
                left = 0, kind.steps - x.shape[1]
                if left[1]:
                    x, y = pad(x, left), pad(y, left, value=NO_TARGET)
                inputs += [x, y] if kind.weight is None else self._windows(x, y)
                inputs += self._flat(masks)
                if cut is not None and cut.xi is not None:
                    numbers = cut.xi.new_tensor([len(cut.xi), weight])
                    inputs.append(_beside(x, torch.cat([numbers, pad(cut.xi, left, value=1)])))
                if draws:
                    between, noise = self._drawn(kind.steps)
                    inputs += [*between, *noise]
        return inputs

    def _room(self, steps: int) -> int:
        """For how many steps a segment of random length has room: few kinds, little left empty."""
        grain = self.grain
        while steps > 8 * grain:
            grain *= 2
        room = -(-steps // grain) * grain
        pieces = in_pieces(self.held[0].shape[1] * room, self.model.shape.vocab_size)
        return steps if pieces else room  # logits in pieces: every place is scored there

    def _drawn(self, steps: int) -> Given:
        """What a call of so many steps would draw, as the model would draw it."""
        seed, drop, rnn = int(draw_seed()), self.model.shape.dropout.layers, self.model.recurrence
        state, layers = self.held[0][0], len(self.held[0])
        like = state.expand(steps, *state.shape)
        between = [Dropout(drop, seed).mask(like, i, 0) for i in range(layers - 1)] if drop else []
        noise = named(rnn.running_cell).noise if rnn is not None and rnn.is_noisy else ()
        step = Noise(noise, seed)
        return Given(between, [step(state, i, 0, steps) for i in range(layers)] if noise else [])

    def _windows(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """x and y; or, where y is x one token on, both as one: one copy instead of two."""
        strides = x.stride()
        if self.calls == 0:
            self._joined = x.is_cuda and x.dtype == torch.int64 and strides[1] == 1
            self._joined = self._joined and y.data_ptr() == x.data_ptr() + 8
        if not self._joined:
            return [x, y]
        one = y.data_ptr() == x.data_ptr() + 8 and strides == y.stride()
        assert one, "windows of one training are all cut alike"
        rows, steps = x.shape
        return [x.as_strided((steps + 1, rows), strides[::-1])]  # time first

    def _update(self, kinds: Sequence[Kind], *inputs: Tensor) -> tuple[()]:
        self.optimizer.zero_grad()
        losses, after = list[Tensor](), self.state
        each = len(inputs) // len(kinds)
        for i, kind in enumerate(kinds):
            before = over(torch.zeros_like, after) if kind.fresh else after
            mine = self._parts(kind, inputs[i * each : (i + 1) * each])
            x, y, masks, cut, drawn, weight = mine
            with drawn_before(drawn) if any(drawn) else nullcontext():
                loss, after = self.loss(x, y, before, masks, cut)
                # to be handed its 1, torch would load sympy, two seconds of work
                (loss if kind.weight == 1 else loss * weight).backward()
            losses.append(loss.detach())
            after = over(torch.detach, after)
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
        broken = self._judged(self._sum(loss))
        for held, new in zip(self.held, CarriedState(after).state_dict().values(), strict=True):
            torch.where(broken, held, new, out=held)
        return ()

    def _parts(self, kind: Kind, inputs: Sequence[Tensor]) -> Parts:
        """What a window is made of again, as `_tensors` took it apart."""
        if self._joined and kind.weight is not None:
            inputs = [inputs[0][:-1].T, inputs[0][1:].T, *inputs[1:]]
        x, y, *flat = inputs
        layers, drop = len(self.held[0]), self.model.shape.dropout
        noise = [flat.pop() for _ in range(layers)] if drop.zoneout or drop.updates else []
        between = [flat.pop() for _ in range(layers - 1)] if drop.layers else []
        given, cut, weight = Given(between[::-1], noise[::-1]), None, kind.weight
        if weight is None:
            until, weight, xi = flat.pop().split([1, 1, kind.steps])
            lengths, weight = until.long().expand(len(x)), weight[0].to(self.rate.dtype)
            cut = Cut(kind.steps, kind.steps, xi, lengths)
        elif kind.scored is not None:
            cut = Cut(kind.scored, kind.advance)
        return x, y, self._masks(flat), cut, given, weight

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
            if self.averages and self._average is not None:
                averages, weights = self._average.averages, self._average.weights
                take_in(averages, weights, self.share, self.judge.broken)
            return self.judge.broken
        numbers = torch.stack([loss, gradient_norm(self.parameters)])
        broken = (numbers.sum() * 0).ne(0)  # 0 · ∞ and 0 · NaN are NaN, which is not 0
        scale = None if self.clip is None else (numbers[1] / self.clip).clamp(min=1.0)
        take_guarded_step(self.optimizer, broken.float(), scale)
        self.numbers.copy_(numbers, non_blocking=True)
        return broken

    def _flat(self, masks: Masks) -> list[Tensor]:
        if masks is NO_MASKS:
            return []
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


def _too_many_kinds(training: "Training") -> str | None:
    """Why updates that a graph could make one by one are of too many kinds; None: they are not."""
    settings, draws = training.settings, training.model.draws_globally
    several = f"accumulate={settings.accumulate} reads several segments"
    if not settings.reading.carry_used.windows and settings.accumulate > 1:
        return f"{several}, and carry={settings.reading.carry} others every time"
    if settings.reading.history and draws:
        return f"carry={settings.reading.carry} reads in two parts, each with noise of its own"
    if training.groups.divided and settings.accumulate > 1:
        return f"{several} of some lanes"
    if training.groups.divided and draws:
        return "every group of lanes draws dropout between layers, and noise, for itself"
    return None


def _beside(x: Tensor, numbers: Tensor) -> Tensor:
    """Numbers of the host where x is, without waiting for what the GPU does."""
    return numbers.pin_memory().to(x.device, non_blocking=True) if x.is_cuda else numbers


def _reads(average: Average) -> bool:
    """Whether `take_in` takes these arrays, if there are any."""
    arrays = [*average.averages, *average.weights[: len(average.averages)]]
    return all(a.is_contiguous() for a in arrays) and Judge.takes(average.averages)
