"""A training's whole update without autograd's tape, or any Python, between its parts.

lookup → recurrence → output → loss → back through time → clip → step, and the state carried on

At the notes' sizes Python costs a CPU a tenth of an update, and a GPU more than the mathematics. An
update that is the same work on the same shapes every time needs none: on a CPU it is three native
calls over memory and jobs made once; on a GPU it is captured once (`graphed.py`) and replayed,
and what differs from one to the next (ids, masks, learning rate, state) lies in tensors.
"""

import abc
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from elman import cells, kernels
from elman.kernels.cpu import DOUBLE, FLOAT, HALF, KERNEL, Windows
from elman.language_model import LanguageModel, Masks, State
from elman.training.graphed import Graphed, tensors_of
from elman.training.optimisation import clip_gradients, gradient_norm, take_step
from elman.training.state import CarriedState

Loss = Callable[[Tensor, Tensor, State, Masks], tuple[Tensor, State]]
"""The mean nats of y (batch, time) after x, and the state at the end."""

Told = Callable[[], tuple[float, float]]
"""Gives (nats, ‖g‖) once they are known."""


class WholeUpdate(abc.ABC):
    """`update(x, y, masks, rate)` moves the weights, and `state` goes on by itself.

    What it returns gives (nats, ‖g‖), waiting for them where it must. A loss or norm that is not
    finite changes neither weights nor state.
    """

    def __init__(
        self,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        clip: float | None,
        batch: int,
    ) -> None:
        self.model, self.optimizer, self.clip = model, optimizer, clip
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        shape = (model.shape.layers, batch, model.hidden_size)
        states = cells.of_model(model.cell).states
        self.held = [model.bias_q.detach().new_zeros(shape) for _ in states]

    @abc.abstractmethod
    def __call__(self, x: Tensor, y: Tensor, masks: Masks, rate: float) -> Told: ...

    @property
    def state(self) -> State:
        """The state after the last update, as the model takes it; overwritten by the next."""
        return (self.held[0], self.held[1]) if len(self.held) == 2 else self.held[0]

    def start_from(self, state: State) -> None:
        """Go on from `state`; None is the state before any text."""
        given = list(CarriedState(state).state_dict().values()) if state is not None else []
        for i, held in enumerate(self.held):
            if state is None:
                held.zero_()
            elif given[i] is not held:
                held.copy_(given[i])


@final
class NativeUpdate(WholeUpdate):
    """On a CPU: `elman.kernels.cpu.Windows`, for one-hot tokens and nothing hidden but tokens."""

    def __init__(
        self,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        clip: float | None,
        windows: tuple[int, int],
        *,
        half: bool = False,
    ) -> None:
        super().__init__(model, optimizer, clip, windows[0])
        job = model.recurrence.job(torch.zeros(windows[::-1], dtype=torch.int64), self.state)
        kind = HALF if half else DOUBLE if model.bias_q.dtype == torch.float64 else FLOAT
        self.windows = Windows(KERNEL, job, self.held, model.weight_hq, model.bias_q, kind)
        pairs = zip(self.windows.weights, self.windows.gradients, strict=True)
        self.pairs = [(w, g) for w, g in pairs if w.requires_grad]

    @staticmethod
    def suits(model: LanguageModel, half: bool) -> bool:
        """Whether the native kernel runs this model, and nothing lies between its parts."""
        drop, weight = model.shape.dropout, model.bias_q
        plain = model.embedding is None and not drop.outputs and not drop.recurrent
        dtypes = (torch.float32,) if half else (torch.float32, torch.float64)
        if not plain or weight.device.type != "cpu" or weight.dtype not in dtypes:
            return False
        job = model.recurrence.job(torch.zeros(1, 1, dtype=torch.int64))
        native = kernels.select(job) is KERNEL and all(
            p.is_contiguous() for p in model.parameters()
        )
        return native and (not half or KERNEL.variant(HALF) is not None)

    def __call__(self, x: Tensor, y: Tensor, masks: Masks, rate: float) -> Told:
        """Returns when all is done."""
        nats = self.windows(x.T, y.T)
        for weight, gradient in self.pairs:
            weight.grad = gradient.detach()  # model.double() and the like change .grad in place
        norm = clip_gradients(self.parameters, self.clip)
        if math.isfinite(nats) and math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            take_step(self.optimizer)
            self.windows.carry()
        return lambda: (nats, norm)


@final
class CapturedUpdate(WholeUpdate):
    """On a GPU, as one CUDA graph.

    The first call runs step by step, so that kernels are compiled and the optimizer has made its
    state; then it is captured.
    """

    def __init__(
        self,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        clip: float | None,
        batch: int,
        loss: Loss,
        *,
        capture: bool = True,
    ) -> None:
        super().__init__(model, optimizer, clip, batch)
        like, self.loss = model.bias_q, loss
        self.rate = torch.zeros((), device=like.device)
        for group in optimizer.param_groups:
            group["lr"] = self.rate
        self.told = torch.zeros(2, dtype=like.dtype, pin_memory=like.is_cuda)  # read by the host
        self.capture, self.calls = capture, 0
        self._graph: Graphed | None = None
        self._rate = 0.0
        self._shape: tuple[bool, bool, list[str]] = (False, False, [])

    def __call__(self, x: Tensor, y: Tensor, masks: Masks, rate: float) -> Told:
        """Launches the update and returns; what it returns waits."""
        inputs = [x, y, *self._flat(masks)]
        if rate != self._rate:
            self._rate = rate
            self.rate.fill_(rate)
        if self._graph is None and self.capture and self.calls > 0:
            self._graph = self._captured(inputs)
        self.calls += 1
        (self._graph or self._update)(*inputs)
        return self._told

    def _told(self) -> tuple[float, float]:
        if self.rate.is_cuda:
            torch.cuda.current_stream().synchronize()
        nats, norm = self.told.tolist()
        return nats, norm

    def _captured(self, inputs: Sequence[Tensor]) -> Graphed:
        for group in self.optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
        changes = [*tensors_of(self.model, self.optimizer), *self.held]
        with warnings.catch_warnings():  # that it also runs uncaptured, to warm up, is no news
            warnings.filterwarnings("ignore", message=".*capturable.*")
            return Graphed(self._update, inputs, changes=changes)

    def _update(self, x: Tensor, y: Tensor, *flat: Tensor) -> tuple[()]:
        self.optimizer.zero_grad()
        loss, after = self.loss(x, y, self.state, self._masks(flat))
        loss.backward()
        told = torch.stack([loss.detach(), gradient_norm(self.parameters)])
        broken = (told.sum() * 0).ne(0)  # 0 · ∞ and 0 · NaN are NaN, which is not 0
        self._tell_optimizer(broken, told[1])
        self.optimizer.step()
        for held, new in zip(self.held, CarriedState(after).state_dict().values(), strict=True):
            torch.where(broken, held, new.detach(), out=held)
        self.told.copy_(told, non_blocking=True)
        return ()

    def _tell_optimizer(self, broken: Tensor, norm: Tensor) -> None:
        """To divide g by max(1, ‖g‖/θ), or to do nothing: by the two numbers that torch's fused
        optimizers look for, made for losses that were scaled."""
        optimizer: Any = self.optimizer
        optimizer.found_inf = broken.float()
        if self.clip is not None:
            optimizer.grad_scale = (norm / self.clip).clamp(min=1.0)

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


def suits(model: LanguageModel) -> bool:
    """Whether the model does the same on every window: nothing drawn, cut or kept in between."""
    recurrence: Any = model.recurrence
    return (
        isinstance(recurrence, nn.Module)
        and recurrence.carry.exact
        and recurrence.memory.keeps_all
        and not model.shape.dropout.layers
    )
