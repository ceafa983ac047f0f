"""Calls of the compiled operator that are ready: one native call on a CPU, launches on a GPU.

A small call takes less time than a stack takes to be put together. What tells the compiler the
shapes of what is kept for the backward pass (`shaped`) and what computes it (`ready`) must agree
about which calls these are; all others run as a `Stack`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor

from elman.cells import named
from elman.kernels import Kernel, cpu, cuda, settings
from elman.kernels.cpu import masks
from elman.kernels.cpu.calls import DTYPES, Asked, Prepared, Use, kept_count, prepare
from elman.kernels.cpu.library import plain
from elman.kernels.cuda import calls, wider
from elman.kernels.cuda.equations import body
from elman.recurrence import native, prepared
from elman.recurrence.operator import Inputs, Recipe, selected


class Ready(Protocol):
    """One such call."""

    def forward(self, keep: bool) -> list[Tensor] | None:
        """ys, the last states and what is kept, sharing no memory; None: another way, this time."""
        ...

    def backward(
        self,
        kept: Sequence[Tensor],
        dys: Tensor | None,
        dlast: Sequence[Tensor | None],
        needs_dxs: bool,
    ) -> list[Tensor]:
        """The pulls on the first states, the weights, and (where needed) xs."""
        ...


def shaped(
    recipe: Recipe, x: Inputs, kernel: Kernel, keep: bool, drops: bool
) -> list[Tensor] | None:
    """Tensors of the shapes that `forward` gives; None where no such call runs these inputs."""
    if _is_native(recipe, x, kernel, drops):
        return _native_shapes(recipe, x, keep)
    if _is_launched(recipe, x, kernel, drops):
        return _launched_shapes(recipe, x, keep)
    return None


def ready(recipe: Recipe, x: Inputs) -> Ready | None:
    """The call that runs these inputs; None where a stack does."""
    shapes = [(t.shape, t.dtype) for t in x.flat()]
    others = torch.get_num_threads(), settings(x.weights[0].dtype), x.xs.device
    asked = native.takes(recipe), x.lengths is None, x.seed is None
    key = (recipe.cell, recipe.directions, recipe.carry.exact, *asked, *others, *shapes)
    known = _PREPARED.get(key, _UNKNOWN)
    if known is _UNKNOWN:
        known = _prepared(recipe, x)
        if not wider.is_recorded(x.xs):
            if len(_PREPARED) > 1000:
                _PREPARED.clear()
            _PREPARED[key] = known
    if known is None:
        return None
    return Native(known, recipe, x) if isinstance(known, Prepared) else Launched(known, x)


_PREPARED: dict[Hashable, Prepared | calls.Prepared | wider.Wider | None] = {}
"""By all that a call's shapes depend on, without weights; None: another way."""
_UNKNOWN: Any = object()


def _prepared(recipe: Recipe, x: Inputs) -> Prepared | calls.Prepared | wider.Wider | None:
    kernel, drops = selected(recipe, x), x.seed is not None
    if _is_native(recipe, x, kernel, drops):
        weights = [plain(w, w.dtype) for w in x.weights]
        call = prepare(x.xs, weights, recipe.directions, lambda: recipe.job(x), apart=True)
        assert call is not None, "shapes were told of such a call"
        return call.bare()
    if _is_launched(recipe, x, kernel, drops):
        return wider.prepared(recipe.job(x), one_by_one=False)
    return None


# ---------------------------------------------------------------- in one native call, on a CPU


def _is_native(recipe: Recipe, x: Inputs, kernel: Kernel, drops: bool) -> bool:
    if kernel is not cpu.KERNEL or not native.takes(recipe) or x.lengths is not None:
        return False
    real = x.weights[0].dtype
    if real not in DTYPES or (drops and not masks.drops_as_torch(real)):
        return False
    return x.xs.dtype in (real, torch.int64) and all(t.dtype is real for t in x.flat()[1:])


def _native_shapes(recipe: Recipe, x: Inputs, keep: bool) -> list[Tensor]:
    """What comes out, and one tensor that holds what is kept."""
    (steps, rows), h = x.xs.shape[:2], x.stacked[0]
    found = _outputs(recipe, x)
    if not keep:
        return found
    layers = h.shape[0] // recipe.directions
    size = (layers, recipe.directions, (steps, rows), h.shape[2], h.dtype.itemsize)
    return [*found, h.new_empty(kept_count(named(recipe.cell), *size))]


def _outputs(recipe: Recipe, x: Inputs) -> list[Tensor]:
    """Outputs and last states, without numbers."""
    (steps, rows), h = x.xs.shape[:2], x.stacked[0]
    ys = h.new_empty(steps, rows, recipe.directions * h.shape[2])
    return [ys, *[s.new_empty(s.shape) for s in x.stacked]]


@final
class Native:
    """By our CPU kernel."""

    def __init__(self, prepared: Prepared, recipe: Recipe, x: Inputs) -> None:
        self.prepared, real = prepared, prepared.dtype
        self.xs, self.weights = plain(x.xs, prepared.input_dtype), x.weights
        self.state = [plain(s, real) for s in x.stacked]
        dropout = recipe.dropout if x.seed is not None else 0.0
        self.use = Use(None, dropout, int(x.seed)) if x.seed is not None and dropout else None

    def forward(self, keep: bool) -> list[Tensor] | None:
        """None where ids are out of range, for others to say so."""
        weights = [plain(w, self.prepared.dtype) for w in self.weights]
        found = self.prepared.forward(self.xs, self.state, keep, self.use, weights)
        if found is None:
            return None
        ys, last, kept = found
        return [ys, *last, *([] if kept is None else [kept])]

    def backward(
        self,
        kept: Sequence[Tensor],
        dys: Tensor | None,
        dlast: Sequence[Tensor | None],
        needs_dxs: bool,
    ) -> list[Tensor]:
        """See `Ready`."""
        asked = Asked(needs_dxs and self.xs.is_floating_point(), True, True)
        pulls = (dys, dlast, asked, self.use)
        dxs, first, dws = self.prepared.backward(self.xs, self.weights, None, kept[0], *pulls)
        return [d for d in (*first, *dws, dxs) if d is not None]


# ---------------------------------------------------------------- in launches that are prepared


def _is_launched(recipe: Recipe, x: Inputs, kernel: Kernel, drops: bool) -> bool:
    if kernel is not cuda.KERNEL or drops or x.lengths is not None:
        return False
    return prepared.is_plain(recipe, x) and recipe.chunks is None


def _launched_shapes(recipe: Recipe, x: Inputs, keep: bool) -> list[Tensor]:
    """What comes out, and of every layer the tracks that it keeps."""
    found, cell, h = _outputs(recipe, x), named(recipe.cell), x.stacked[0]
    if not keep:
        return found
    steps, rows = x.xs.shape[:2]
    units = cuda.KERNEL.width(next(recipe.job(x).pieces()))
    for _ in range(h.shape[0]):
        widths = cell.state_sizes(units)
        found += [h.new_empty((steps + 1) * rows, width) for width in widths]
        if gates := body(cell).kept:
            found.append(h.new_empty(steps * rows, gates * units))
    return found


@final
class Launched:
    """By our CUDA kernel."""

    def __init__(self, prepared: calls.Prepared | wider.Wider, x: Inputs) -> None:
        self.prepared, self.given = prepared, x
        self.xs = x.xs.contiguous()
        self.weights = prepared.read([w.contiguous() for w in x.weights])

    def forward(self, keep: bool) -> list[Tensor]:
        """See `Ready`."""
        ys, last, kept = self.prepared.forward(self.xs, self.given.stacked, self.weights, keep)
        tracks = [t for trace in kept for t in trace if t is not None] if keep else []
        return [ys.clone() if keep else ys.contiguous(), *last, *tracks]

    def backward(
        self,
        kept: Sequence[Tensor],
        dys: Tensor | None,
        dlast: Sequence[Tensor | None],
        needs_dxs: bool,
    ) -> list[Tensor]:
        """See `Ready`."""
        wanted = self.traces(kept), dys, dlast, needs_dxs, True
        dxs, first, dws = self.prepared.backward(self.xs, self.weights, *wanted)
        found = [*first, *dws, *([] if dxs is None else [dxs])]
        like = [*self.given.stacked, *self.given.weights, self.given.xs]
        return [d.to(t.dtype).contiguous() for d, t in zip(found, like, strict=False)]

    def traces(self, kept: Sequence[Tensor]) -> list[calls.Kept]:
        """What is kept, layer by layer, as the kernel reads it."""
        cell, rest = self.prepared.cell, iter(kept)
        two, gates = len(self.prepared.widths) > 1, body(cell).kept > 0
        return [
            calls.Kept(next(rest), next(rest) if two else None, next(rest) if gates else None)
            for _ in range(self.prepared.layers)
        ]
