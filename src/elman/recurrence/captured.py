"""Calls that come again and again, recorded as CUDA graphs: one launch each way, and little Python.

A small job keeps a GPU busy for less time than Python and autograd take to queue it. After a few
calls that agree in everything (shapes, switches, the stream, where the weights lie) the next one is
recorded, and those after it copy their input in, launch, and copy the results out. What is recorded
is what would run anyway, so the bits are the same.

What a backward pass reads lies in the recording. A recording is therefore lent to one call at a
time, until that call's node of autograd can no longer be asked; another call meanwhile has a
recording of its own, or runs as it would without any.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch._C import _autograd, _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from elman.cells import named
from elman.errors import WorkFailed
from elman.kernels import captures, largest, uncaptured
from elman.kernels.cuda import Cuda, graphs
from elman.kernels.cudnn import Cudnn
from elman.kernels.torchs import Whole
from elman.recurrence.operator import (
    Inputs,
    Recipe,
    apart,
    asks_for_weights,
    ids_are_known,
    is_mapped,
    mapped,
)
from elman.recurrence.ways import Outputs, Pulls, Way

FEW = 4
"""Calls of one kind that run as they are: to record one costs as much as several of these."""
SIDE_BY_SIDE = 4
"""Recordings of one kind, for calls whose backward passes are yet to come."""
SURELY, BY_AUTOGRAD = {True: 0.9, False: 0.8}, 200.0
"""How much shorter a captured call must be to be used: with a backward pass, and without one, where
less is to be gained than the host's speed varies; microseconds of autograd that it saves at least.
"""
WORTH, PATIENCE = 50, 2
"""Calls that a recording must serve to be worth its making; how often in a row it may not."""
MOVING = "the weights lie elsewhere at every few calls"
AS_IT_IS, AS_RECORDED = 20.0, 35.0
"""Microseconds of Python in a module's call before either is begun (an H200's host)."""
MOST, MOST_LARGE = 64, 8
"""Recordings of all modules together, and of how many of the `largest` they may take the memory.

The least recently used give way.
"""


# ---------------------------------------------------------------------- recordings


class Back(NamedTuple):
    """A recorded backward pass, for pulls on some of the outputs."""

    graph: graphs.Graph
    pulls: list[Tensor]
    gradients: list[Tensor]
    places: list[int]
    """where among all that may have a gradient each of these stands"""


@final
class Kind:
    """What calls agree in that one recording can serve; and what was found out about them."""

    def __init__(self, way: Way, keep: bool, device: int, stream: int) -> None:
        self.way, self.keep, self.device, self.stream = way, keep, device, stream
        self.pulled: set[tuple[bool, ...]] = set()
        """On which outputs there were pulls."""
        self.failed = ""
        """Why nothing more is recorded."""

    def recorder(self) -> graphs.Recorder:
        return graphs.recorder(self.device, self.stream)

    def tried(self, record: Callable[[], Any]) -> Any:
        """What `record` made; None where someone else is recording, or where it failed."""
        if not graphs.ONE_AT_A_TIME.acquire(blocking=False):
            return None
        try:
            with torch.inference_mode(False), torch.no_grad():
                return record()
        except RuntimeError as problem:  # said by `explain`; calls run as they are
            self.failed = str(problem).partition("\n")[0]
            return None
        finally:
            graphs.ONE_AT_A_TIME.release()


@final
class Recording:
    """A recorded forward pass, and the backward passes that were recorded since.

    `lent` is held from the forward pass until nothing will be asked of it any more.
    """

    def __init__(
        self, kind: Kind, x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> None:
        self.kind, self.lent = kind, threading.Lock()
        self.owner: weakref.ref[Any] | None = None
        self.recorder, self.backs = kind.recorder(), dict[tuple[bool, ...], Back]()
        self.memory = self.recorder.memory()
        way, keep = kind.way, kind.keep
        with self.recorder.aside():
            way.forward(x, state or way.first(x), weights, keep)  # as CUDA asks: once before
            with self.memory.used():
                self.x = torch.empty_like(x).copy_(x)  # laid out alike: products may sum otherwise
                self.state = [torch.empty_like(s) for s in state]
                self.first = self.state or way.first(x)
            self.graph, (ys, last, self.kept) = self.recorder.record(
                lambda: way.forward(self.x, self.first, weights, keep), self.memory
            )
            self.inputs, self.outputs = [self.x, *self.state], [ys, *last]
            aside, given = self.recorder.number, [x, *state]
            self.as_it_was, self.captured = self.recorder.microseconds(
                (
                    lambda: way.uncaptured_call(x, state, weights),
                    AS_IT_IS + (BY_AUTOGRAD if keep else 0),
                ),
                (lambda: self.run(given, aside), AS_RECORDED),
            )
            ys, last, _ = way.forward(x, state or self.first, weights, keep)
            check_bits(self.run(given, aside), [ys, *last])

    def pays(self) -> bool:
        """Whether it is the faster way. Both give the same bits, so this may be found by timing.

        Of a call with a backward pass the larger part is autograd's, which is not timed; where the
        GPU is busy for as long in the forward pass alone, nothing waits for that.
        """
        return self.captured < SURELY[self.kind.keep] * self.as_it_was

    def run(self, inputs: list[Tensor], stream: int) -> list[Tensor]:
        """ys and the last states, in memory of their own."""
        torch._foreach_copy_(self.inputs, inputs)
        self.graph.launch(stream)
        return copies(self.outputs)

    def pull(
        self, weights: Sequence[Tensor], pulls: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Pulls:
        """What the loss pulls on all that went in, from its pulls on what came out."""
        which = tuple([p is not None for p in pulls])
        if True not in which:
            return [None] * len(needs)
        back = self.backs.get(which) or self._record_back(which, weights, pulls, needs)
        if back is None or is_elsewhere(self.kind):
            return self._back(weights, pulls, needs)
        torch._foreach_copy_(back.pulls, [p for p in pulls if p is not None])
        back.graph.launch(self.kind.stream)
        gradients: Pulls = [None] * len(needs)
        for place, t in zip(back.places, copies(back.gradients), strict=True):
            gradients[place] = t
        return gradients

    def _back(
        self, weights: Sequence[Tensor], pulls: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Pulls:
        """The backward pass, not recorded."""
        n, way = 1 + len(self.state), self.kind.way
        unasked = [False] * (len(self.first) - len(self.state))  # zeros of our own
        wanted = [*needs[:n], *unasked, *needs[n:]]
        gradients = way.backward(self.x, self.first, weights, self.kept, pulls, wanted)
        del gradients[n : n + len(unasked)]
        return [t if wanted else None for t, wanted in zip(gradients, needs, strict=True)]

    def _record_back(
        self,
        which: tuple[bool, ...],
        weights: Sequence[Tensor],
        pulls: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> Back | None:
        """The backward pass recorded; None the first time, and where it cannot be."""
        kind = self.kind
        if which not in kind.pulled or kind.failed or is_elsewhere(kind):
            kind.pulled.add(which)
            return None
        back = kind.tried(lambda: self._recorded_back(weights, pulls, needs))
        if back is not None:
            self.backs[which] = back
        return back

    def _recorded_back(
        self, weights: Sequence[Tensor], pulls: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Back:
        with self.recorder.aside():
            with self.memory.used():
                pairs = zip(self.outputs, pulls, strict=True)
                given = [None if p is None else torch.empty_like(y).copy_(p) for y, p in pairs]
            before = self._back(weights, given, needs)  # as CUDA asks: once before
            graph, gradients = self.recorder.record(
                lambda: self._back(weights, given, needs), self.memory
            )
            places = [i for i, t in enumerate(gradients) if t is not None]
            some = [t for t in gradients if t is not None]
            graph.launch(self.recorder.number)
            check_bits(some, [t for t in before if t is not None])
        return Back(graph, [p for p in given if p is not None], some, places)

    def lend(self, node: Any) -> None:
        """Until this node of autograd is gone, or has been asked for the last time."""
        self.owner = weakref.ref(node, lambda _: self.free())

    def free(self) -> None:
        """Let another call have it."""
        owner, self.owner = self.owner, None
        if owner is not None:
            self.lent.release()


def check_bits(recorded: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """A recording that gives other numbers than the call itself is not used."""
    for a, b in zip(recorded, expected, strict=True):
        if not torch.equal(a.nan_to_num(), b.nan_to_num()):
            raise WorkFailed("a CUDA graph of it gives other bits")


def copies(tensors: list[Tensor]) -> list[Tensor]:
    """The same numbers in memory of their own, by one launch for all."""
    return list(torch._foreach_mul(tensors, 1.0))


# ---------------------------------------------------------------------- which call takes which

_CLOCK = itertools.count()


@final
class Recordings:
    """Those of one kind, each lent to one call at a time."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.made = kind, list[Recording]()
        self.calls, self.patience, self.used, self.served = 0, FEW, 0, 0

    def lent(
        self, x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Recording | None:
        """A recording that is this call's alone; None where it runs as it is."""
        self.used = next(_CLOCK)
        for recording in self.made:
            if recording.lent.acquire(blocking=False):
                self.served += 1
                return recording
        self.calls += 1
        if self.calls <= self.patience or self.kind.failed or len(self.made) >= SIDE_BY_SIDE:
            return None
        self.calls = 0
        recording = self.kind.tried(lambda: Recording(self.kind, x, state, weights))
        if recording is not None and not recording.pays():
            captured, as_it_was = recording.captured, recording.as_it_was
            self.kind.failed = f"it takes {captured:.0f} µs then, {as_it_was:.0f} as it is"
            return None
        if recording is not None:
            recording.lent.acquire()
            self.made.append(recording)
            _ALL.add(self)
            _make_room(self)
        return recording

    def drop(self) -> None:
        """Give way to others, and come back only after many more calls."""
        self.made, self.calls, self.patience = [], 0, 4 * self.patience


_ALL: weakref.WeakSet[Recordings] = weakref.WeakSet()


def _make_room(newest: Recordings) -> None:
    """Let the least recently used go where there are too many."""
    everyone = sorted(_ALL, key=lambda some: some.used)
    room = MOST_LARGE * largest(newest.made[-1].x.device)
    for some in everyone:
        made = [recording for others in everyone for recording in others.made]
        if len(made) <= MOST and sum(r.memory.nbytes for r in made) <= room:
            return
        if some is not newest and some.made:
            some.drop()


@final
class Repeated:
    """Calls of a module with inputs of one shape: which of them are recorded."""

    def __init__(self, way: Way, whole: Whole, device: int) -> None:
        self.way, self.whole, self.device = way, whole, device
        self.kinds: dict[Any, Recordings] = {}
        self.given_up, self.in_vain = False, 0
        """Whether no call of this shape is worth it, or can be recorded; how often few came again.
        """

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(None), ()  # a copied module records its own

    def __call__(
        self, x: Tensor, state: Sequence[Tensor] | None, weights: Sequence[Tensor]
    ) -> Outputs | None:
        """Outputs and last states; None where this call runs as it is."""
        state = state or ()
        grad, stream = torch.is_grad_enabled(), current_stream(self.device)
        if stream is None or type(x) is not Tensor or is_watched(grad):
            return None
        if {*map(type, weights)} != PARAMETERS:
            return None
        inputs = [x, *state]
        places = [
            (w.data_ptr(), w.shape, w.dtype, w.is_contiguous(), w.requires_grad) for w in weights
        ]
        wants = [t.requires_grad for t in inputs] if grad else ()
        key = (stream, _laid_out(x), switches(), grad, *wants, *places)
        recordings = self.kinds.get(key)
        if recordings is None:
            recordings = self._met(key, Kind(self.way, grad, self.device, stream))
        recording = recordings.lent(x, state, weights)
        if recording is None:
            if recordings.kind.failed and not recordings.made:
                self.given_up = True
            return None
        if grad and (True in wants or any(place[-1] for place in places)):
            ys, *last = _Recorded.apply(recording, len(state), *inputs, *weights)
            return ys, tuple(last)
        try:
            ys, *last = recording.run(inputs, stream)
        finally:
            recording.lent.release()
        return ys, tuple(last)

    def _met(self, key: Any, kind: Kind) -> Recordings:
        if len(self.kinds) >= SIDE_BY_SIDE:  # weights in another place at every call, say
            made = sum(len(some.made) for some in self.kinds.values())
            served = sum(some.served for some in self.kinds.values())
            self.in_vain = self.in_vain + 1 if served < WORTH * made else 0
            self.given_up = self.in_vain >= PATIENCE
            self.kinds.clear()
        return self.kinds.setdefault(key, Recordings(kind))

    def words(self) -> str:
        """For `explain`."""
        failed = [some.kind.failed for some in self.kinds.values() if some.kind.failed]
        if self.in_vain >= PATIENCE:
            failed = [MOVING]
        return f"not captured: {failed[0]}" if failed else WILL_BE


def _laid_out(x: Tensor) -> Any:
    """What the numbers may depend on besides x's own; of ids, whether they are looked at first."""
    return x.stride() if x.is_floating_point() else (x.dtype, ids_are_known())


PARAMETERS = {torch.nn.Parameter}
WILL_BE = f"captured after {FEW} calls"


class _Recorded(torch.autograd.Function):
    """A recorded call as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, n: int, *tensors: Tensor) -> Any:
        try:
            outputs = recording.run([*tensors[: 1 + n]], recording.kind.stream)
        except BaseException:
            recording.lent.release()
            raise
        ctx.save_for_backward(*tensors)
        ctx.recording, ctx.n = recording, n
        ctx.set_materialize_grads(False)
        recording.lend(ctx)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *pulls: Tensor | None) -> Any:
        if is_mapped(pulls):
            return mapped(_Recorded.backward, ctx, pulls)
        x, *rest = ctx.saved_tensors  # torch complains here if the weights have changed
        state, weights = rest[: ctx.n], rest[ctx.n :]
        needs, recording = ctx.needs_input_grad[2:], ctx.recording
        if torch.is_grad_enabled():
            asked = asks_for_weights(ctx, len(weights))
            way = recording.kind.way
            return None, None, *_differentiable(way, x, state, weights, pulls, asked)
        gradients = recording.pull(weights, pulls, needs)
        if not _autograd._get_current_graph_task_keep_graph():
            recording.free()
        return None, None, *gradients


def _differentiable(
    way: Way,
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    pulls: Sequence[Tensor | None],
    needs_dws: bool,
) -> Pulls:
    """The pulls by autograd, from a forward pass of its own, leaving a graph behind."""
    x, state, weights = apart(x), [*map(apart, state)], [*map(apart, weights)]
    ys, last = way.uncaptured_call(x, state, weights)
    ends = [(y, p) for y, p in zip((ys, *last), pulls, strict=True) if p is not None]
    leaves = [x, *state, *weights]
    asked = [t.requires_grad and (i <= len(state) or needs_dws) for i, t in enumerate(leaves)]
    wanted = [*itertools.compress(leaves, asked)]
    gradients = iter(
        torch.autograd.grad(
            [y for y, _ in ends], wanted, [p for _, p in ends], create_graph=True, allow_unused=True
        )
    )
    return [next(gradients) if wants else None for wants in asked]


# ---------------------------------------------------------------------- what is worth it


def refuses(recipe: Recipe, x: Inputs, whole: Whole, kernel: str) -> str | None:
    """Why calls like this one are not captured; None where they are."""
    if x.xs.is_cuda and torch.version.cuda is None:
        return "this torch was built for another kind of GPU"
    if not captures():
        return "ELMAN_CAPTURE=off"
    if x.seed is not None:
        return "chance is drawn anew at every call"
    if whole.rows == 0:
        return "the batch is empty"
    if kernel not in (Cuda.name, Cudnn.name) or x.lengths is not None:
        return "only rows of one length, on a GPU's own kernels"
    plain = recipe.carry.exact and recipe.memory.keeps_all
    if whole.pieces > 1 or (kernel == Cuda.name and not plain):
        return "its gradient or its memory is not the plain one"
    if named(recipe.cell).heads != 1 and (recipe.directions > 1 or whole.ids):
        return "a cell with heads runs both ways, and over ids, by the long way"
    return uncaptured(kernel, whole, x.xs.device)


# ---------------------------------------------------------------------- what is asked at every call


def current_stream(device: int) -> int | None:
    """The stream that is current; None where its device is not, or it is being recorded."""
    if torch._C._cuda_getDevice() != device or torch._C._cuda_isCurrentStreamCapturing():
        return None
    return torch._C._cuda_getCurrentRawStream(device)


def is_elsewhere(kind: Kind) -> bool:
    """Whether another stream than that of its recordings is current, or it is being recorded."""
    return current_stream(kind.device) != kind.stream


def is_watched(grad: bool) -> bool:
    """Whether someone wants to see more than tensors going in and coming out."""
    if torch._C._len_torch_dispatch_stack() or forward_ad._current_level >= 0:
        return True
    if _functorch.peek_interpreter_stack() is not None:
        return True
    if grad and _autograd._top_saved_tensors_default_hooks(True) is not None:
        return True
    count = torch._C._len_torch_function_stack()
    modes = map(torch._C._get_function_stack_at, range(count))
    return count > 0 and not all(isinstance(mode, DeviceContext) for mode in modes)


def switches() -> tuple[Any, ...]:
    """What else of torch the numbers may depend on, besides `kernels.settings`."""
    return (
        torch._C._get_deterministic_algorithms(),
        torch._C._get_cudnn_deterministic(),
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
    )
