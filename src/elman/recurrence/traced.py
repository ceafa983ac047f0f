"""The recurrence in torch's own operators, for tools that record what a module does.

`torch.jit.trace`, `torch.export` and both exporters to ONNX run a module once and keep the
operations that they know; of a kernel of ours they would keep nothing but its results, as
constants. While one of them records, or inside a transform of `torch.func`, the forward pass is
torch's own operator (`aten::lstm`, …) with the same weights. The same holds under a mode that sees
every operation (one that counts them, or makes fake tensors), where tangents flow forward, and for
tensors of a class of their own, which need not have memory. A cell that torch does not have, a
projection on its way to ONNX, what `torch.vmap` runs over, and tangents on a GPU or of an lstm go
step by step: the recorded copy then takes sequences of that one length and refuses others.
"""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad
from torch.nn.functional import dropout, one_hot

from elman.cells import Cell, State, Weights, is_torchs, named
from elman.errors import UserError
from elman.gradients.carry import Carry
from elman.kernels import cudnn
from elman.recurrence.operator import Inputs, Recipe


def listening() -> bool:
    """Whether torch records what runs, or transforms it, as `torch.func` does."""
    if torch.compiler.is_compiling():
        return torch.jit.is_tracing() or torch.compiler._is_exporting_flag
    return is_watched()


def is_watched() -> bool:
    """The same of a call that is not being compiled."""
    # is_exporting() itself is True inside torch.compile, too, with torch 2.11
    if torch._C._is_tracing() or torch.compiler._is_exporting_flag:
        return True
    return _functorch.peek_interpreter_stack() is not None or _ALOUD.get()


def is_seen() -> bool:
    """Whether that may be so, a mode sees operations, or tangents flow: asked at every call."""
    if torch._C._is_tracing() or torch.compiler._is_exporting_flag:
        return True
    if _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return True
    return torch._C._len_torch_dispatch_stack() > 0


_ALOUD = contextvars.ContextVar("in torch's own operators", default=False)


@contextlib.contextmanager
def aloud() -> Iterator[None]:
    """Inside this block everything runs in torch's own operators."""
    token = _ALOUD.set(True)
    try:
        yield
    finally:
        _ALOUD.reset(token)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """No tracer's warnings: checks read the example's sizes, which the trace leaves out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        yield


def recurrence(
    recipe: Recipe,
    x: Inputs,
    training: bool,
    batch_sizes: Tensor | None = None,
    batch_first: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """ys and the last states, as `operator.recurrence`; xs may be a `PackedSequence`'s data.

    With `batch_first` xs and ys are (B, T, …).
    """
    check_gradient(recipe.carry, training)
    cell = named(recipe.cell)
    if cell.noise:
        raise UserError(
            f"{cell.name} draws numbers for every step, which a traced or exported copy cannot",
            hint="call .eval() first to export for inference",
        )
    unknown = recipe.projected and torch.onnx.is_in_onnx_export()
    if forward_ad._current_level >= 0:  # cuDNN has no tangents, nor has oneDNN's lstm
        is_onednns = cell.torch_mode == "LSTM" and batch_sizes is None
        unknown = unknown or x.xs.is_cuda or is_onednns
    if unknown or not is_torchs(cell) or _is_mapped((x.xs, *x.stacked, *x.weights)):
        if batch_sizes is not None:
            raise unpackable(cell.name + (" with a projection" if recipe.projected else ""))
        if not batch_first:
            return _unrolled(recipe, cell, x, training)
        ys, last = _unrolled(recipe, cell, x._replace(xs=x.xs.transpose(0, 1)), training)
        return ys.transpose(0, 1), last
    if not x.xs.is_floating_point():
        W_ih = x.weights[0]
        x = x._replace(xs=one_hot(x.xs, W_ih.shape[1]).to(W_ih.dtype))
    return _torchs(recipe, cell, x, training, batch_sizes, batch_first)


def _is_mapped(tensors: Sequence[Tensor]) -> bool:
    """Whether `torch.vmap` runs over one of them: it knows no recurrent operator of torch's."""
    if torch.compiler.is_compiling():  # which cannot be asked, and does not map
        return False
    for tensor in tensors:
        while _functorch.is_functorch_wrapped_tensor(tensor):
            if _functorch.is_batchedtensor(tensor):
                return True
            tensor = _functorch.get_unwrapped(tensor)
    return False


def check_gradient(carry: Carry, training: bool) -> None:
    """Refuse to write down for training what has another gradient here."""
    if training and not carry.exact:
        raise UserError(
            f"a traced or exported copy has torch's gradient, the exact one: in training it, "
            f"{carry} would be lost",
            hint="call .eval() first to export for inference, or set carry = Full()",
        )


def unpackable(what: str) -> UserError:
    """Why rows of different lengths cannot be written down step by step."""
    return UserError(
        f"a packed sequence cannot be traced or exported through {what}: its steps are written "
        "down one by one, for rows of one length",
        hint="pass a padded tensor",
    )


def _torchs(
    recipe: Recipe,
    cell: Cell,
    x: Inputs,
    training: bool,
    batch_sizes: Tensor | None,
    batch_first: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """By torch's own operator."""
    operator = getattr(torch._VF, str(cell.torch_mode).lower())
    first = list(x.stacked) if len(x.stacked) > 1 else x.stacked[0]
    layers = len(x.weights) // recipe.each // recipe.directions
    options = (recipe.bias, layers, recipe.dropout, training, recipe.directions == 2)
    transformed = x.xs.is_cuda and _is_transformed()  # cuDNN asks for the memory of every tensor
    with cudnn.OFF if transformed else contextlib.nullcontext():
        if batch_sizes is not None:
            ys, *last = operator(x.xs, batch_sizes, first, list(x.weights), *options)
        else:
            ys, *last = operator(x.xs, first, list(x.weights), *options, batch_first)
    return ys, tuple(last)


def _is_transformed() -> bool:
    """Whether `torch.func` makes something else of what runs: the compiler cannot be asked."""
    compiling = torch.compiler.is_compiling()
    return not compiling and _functorch.peek_interpreter_stack() is not None


def _unrolled(
    recipe: Recipe, cell: Cell, x: Inputs, training: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Step by step, by the cell itself."""
    xs, last = x.xs, []
    layers = recipe.layers(x.weights)
    for i in range(0, len(layers), recipe.directions):
        if i > 0 and training and recipe.dropout:
            xs = dropout(xs, recipe.dropout)
        ys = []
        for place in range(i, i + recipe.directions):
            first = tuple(s[place] for s in x.stacked)
            y, after = _walk(cell, layers[place], xs.unbind(), first, backwards=place > i)
            ys.append(y)
            last.append(after)
        xs = torch.cat(ys, -1)
    return xs, tuple(map(torch.stack, zip(*last, strict=True)))


def _walk(
    cell: Cell, w: Weights, xs: Sequence[Tensor], state: State, backwards: bool
) -> tuple[Tensor, State]:
    """One layer in one direction: every h_t where its x_t was, and the state at the end."""
    ys = []
    for x in reversed(xs) if backwards else xs:
        state, _ = cell.step(w, x, state)
        ys.append(state[0])
    return torch.stack(ys[::-1] if backwards else ys), state
