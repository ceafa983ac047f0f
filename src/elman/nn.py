"""Drop-in `RNN`, `GRU` and `LSTM`: `torch.nn`'s modules, plus a carry, a memory and a time.

Constructor, call, outputs, initialisation, parameter names and state dict are those of
`torch.nn`, so a model changes sides by changing an import. What is added:

- `carry=` says what part of the gradient flows back through time (default `Full()`, exact);
- `memory=` says what is kept for the backward pass (default `Stored()`);
- `time=` says whether steps run one after the other (default `Stepped()`) or in chunks side by side
  (`Chunked()`); `seams` then tells how well the chunks of the last call met;
- `zoneout=` and `update_dropout=` put noise into every step of a training (`elman.cells.noisy`);
- an integer input is read as one-hot rows: ids of shape (T, B), or (B, T) with `batch_first`, or
  (T,) unbatched, below `input_size`; they are looked up, never multiplied;
- `RNN(nonlinearity="linear")`, the recurrence without a nonlinearity;
- `Layers(cell, …)`, the same for every cell in `elman.cells.CELLS`, also those torch does not have;
- `Recurrent(…)`, either that, or any module of your own a step at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, NamedTuple, Self, final, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from elman.cells import CELLS, Cell, is_torchs, named, with_noise
from elman.cells.base import diagonal_blocks
from elman.errors import UserError
from elman.gradients.carry import Carry, Full
from elman.gradients.chunks import Chunked, Stepped, Time
from elman.gradients.memory import Memory, Stored
from elman.kernels import Job, Kernel, aten, cudnn, is_sooner, runs_whole, select, settings
from elman.kernels.cpu import KERNEL, calls, masks
from elman.kernels.cudnn import Cudnn, Network, Whole
from elman.kernels.products import HALF
from elman.recurrence import (
    captured,
    compiled,
    custom,
    native,
    packed,
    piecewise,
    prepared,
    traced,
    ways,
    whole,
)
from elman.recurrence.chunked import SHORT, InChunks
from elman.recurrence.operator import UNDRAWN, Inputs, Recipe, recurrence
from elman.recurrence.piecewise import Loss
from elman.recurrence.seams import Chunks, Seams
from elman.recurrence.strand import is_cast, uncast

__all__ = ["GRU", "LSTM", "RNN", "Layers", "Recurrent", "of"]

FULL, STORED, STEPPED = Full(), Stored(), Stepped()
LONG_WAY, IN_FLOAT32 = "the long way", "in float32"


class Settled(NamedTuple):
    """How calls of one shape are run."""

    how: str | prepared.Call | Whole
    """The long way, a call of our kernel that is ready, or the stack for torch.nn's own call."""
    again: captured.Repeated | None
    """The same, captured where it is repeated."""


class _Module(torch.nn.RNNBase):
    """What all have in common: from what the caller passes to time-first tensors and back."""

    cell: str
    carry: Carry
    memory: Memory
    time: Time
    repeatable: bool = False
    """Whether a call must give the same bits in a CUDA graph as outside of one, and the same masks
    from the same state of torch's generators: not cuDNN's."""
    _settled: dict[Hashable, Settled]
    _prepared: calls.Prepared | None = None
    _equations: str = ""
    """Of a declared cell, which equations this module was made for."""
    _chunks: Chunks | None = None
    zoneout: float = 0.0
    update_dropout: float = 0.0
    _running: str = ""

    def __init__(
        self,
        cell: str,
        *args: Any,
        carry: Carry,
        memory: Memory,
        time: Time = STEPPED,
        zoneout: float = 0.0,
        update_dropout: float = 0.0,
        **options: Any,
    ) -> None:
        mode = named(cell).torch_mode
        super().__init__(mode or "RNN_TANH", *args, **options)
        self.cell, self._equations = cell, named(cell).fingerprint
        if mode is None:
            self._resize(named(cell))
        self.carry, self.memory, self.time = carry, memory, time
        self._begin_noise(zoneout, update_dropout)

    def _begin_noise(self, zoneout: Any, update_dropout: Any) -> None:
        for name, p in (("zoneout", zoneout), ("update_dropout", update_dropout)):
            if not isinstance(p, int | float) or isinstance(p, bool) or not 0 <= p < 1:
                raise UserError(f"{name}={p!r} must be a probability, at least 0 and below 1")
        noisy = zoneout > 0 or update_dropout > 0
        if noisy and self.proj_size:
            raise UserError("zoneout and update_dropout do not go with proj_size")
        self._check_noise_goes_with(self.carry, noisy)
        self._run_by(zoneout, update_dropout)
        super().__setattr__("zoneout", zoneout)
        super().__setattr__("update_dropout", update_dropout)

    def _check_noise_goes_with(self, carry: Carry, noisy: bool) -> None:
        if noisy and self.bidirectional and carry.in_blocks:
            raise UserError(
                f"zoneout and update_dropout in both directions do not go with {carry}",
                hint="Truncated() cuts the gradient, too, and goes with both",
            )

    @property
    def is_noisy(self) -> bool:
        """Whether steps have zoneout or recurrent dropout."""
        return self.zoneout > 0 or self.update_dropout > 0

    @property
    def running_cell(self) -> str:
        """The cell by which a call runs now: with noise, one that draws or its expectation."""
        return self._running or self.cell

    def _run_by(self, zoneout: float, updates: float) -> None:
        """Find out which cell that is, whenever something about it changes."""
        running = ""
        if zoneout or updates:
            running = with_noise(self.cell, zoneout, updates, self.training)
        super().__setattr__("_running", running)  # a plain value to torch.compile
        super().__setattr__("_settled", {})

    @property
    def seams(self) -> Seams:
        """How well the chunks of the last call and of its backward pass met, with `Chunked`."""
        return Seams() if self._chunks is None else self._chunks.seams

    def _resize(self, cell: Cell) -> None:
        """Give the parameters as many rows as a cell that `torch.nn` does not have wants."""
        if cell.heads and self.hidden_size % cell.heads:
            raise UserError(
                f"hidden_size={self.hidden_size} does not fall into the {cell.heads} heads of "
                f"{cell.name}"
            )
        for name in self._flat_weights_names:
            p = getattr(self, name)
            setattr(self, name, torch.nn.Parameter(p.new_empty(cell.gates * len(p), *p.shape[1:])))
        if cell.parameters:
            like = getattr(self, self._flat_weights_names[0])
            for names in self._all_weights:
                name = names[0].replace("weight_ih", "own")
                p = like.new_empty(len(cell.parameters), self.hidden_size)
                setattr(self, name, torch.nn.Parameter(p))
                names.append(name)
            self._flat_weights_names = [name for names in self._all_weights for name in names]
            self._init_flat_weights()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `torch.nn`; a cell's own numbers start where the cell says, its heads apart."""
        super().reset_parameters()
        cell = named(getattr(self, "cell", "tanh"))
        with torch.no_grad():
            for name in self._flat_weights_names:
                if name.startswith("own"):
                    for row, value in zip(
                        getattr(self, name), cell.parameters.values(), strict=True
                    ):
                        row.fill_(value) if value is not None else None
                elif name.startswith("weight_hh") and cell.heads != 1:
                    W_hh = getattr(self, name)
                    if cell.heads == 0:  # not one of many that are summed: not drawn small
                        W_hh.uniform_()
                    W_hh.mul_(diagonal_blocks(W_hh, cell.heads))

    def flatten_parameters(self) -> None:
        """As `torch.nn`, for cells that cuDNN has; bfloat16 too, which torch forgets."""
        if named(getattr(self, "cell", "tanh")).torch_mode is not None:
            super().flatten_parameters()
            weights = [w for w in self._flat_weights if isinstance(w, Tensor)]
            if len(weights) == len(self._flat_weights_names):
                cudnn.flatten_bfloat16(self._network(self.mode), weights)

    def _run(
        self, input: Tensor | PackedSequence, state: Sequence[Tensor] | None
    ) -> tuple[Tensor | PackedSequence, tuple[Tensor, ...]]:
        """Output and last state, in the caller's layout."""
        if not torch.compiler.is_compiling() and named(self.cell).fingerprint != self._equations:
            raise UserError(
                f"{self.cell} was declared again, with other equations, after this module was made",
                hint="make the module again, or give the other cell a name of its own",
            )
        if torch.jit.is_tracing():
            with traced.quietly():
                return self._run_any(input, state)
        plain = type(input) is Tensor
        if torch.compiler.is_compiling() or (plain and (input.is_cuda or self._is_torchs(input))):
            return self._run_any(input, state)
        return self._plain_call(input, state) or self._run_any(input, state)

    def _run_any(
        self, input: Tensor | PackedSequence, state: Sequence[Tensor] | None
    ) -> tuple[Tensor | PackedSequence, tuple[Tensor, ...]]:
        if isinstance(input, PackedSequence):
            return self._run_packed(input, state)
        cast = input.is_cuda and torch.is_autocast_enabled("cuda")
        if cast and (done := self._autocast_call(input, state)):
            return done
        key = self._key(input, state)
        how = None if key is None else self._settled.get(key)
        if how is not None and (done := self._settled_call(how, input, state)):
            return done
        xs, first = self._time_first(input, state)
        if key is not None and how is None:  # from now on; and now, since bits may differ
            how = self._settle(xs, first)
            self._remember(key, how)
            if done := self._settled_call(how, input, state):
                return done
        ys, last = self._recur(xs, first)
        return self._as_given(input, ys), self._states_as_given(input, last)

    def _is_torchs(self, input: Tensor) -> bool:
        """Whether no native call is worth trying: under autocast it is, also for narrow inputs."""
        return self._asks_torch(input) and not torch.is_autocast_enabled("cpu")

    def _asks_torch(self, input: Tensor) -> bool:
        """Whether torch's own layers, which take whole stacks, may be the fastest for this."""
        if input.is_cuda or not input.is_cpu or self.repeatable:
            return input.is_cuda
        return self.proj_size > 0 or input.dtype in HALF or KERNEL.library is None

    def _plain_call(
        self, input: Tensor | PackedSequence, state: Sequence[Tensor] | None
    ) -> tuple[Tensor | PackedSequence, tuple[Tensor, ...]] | None:
        """The same in native code on a CPU, nothing cut; None: another kind of call."""
        if not self._is_plain(input):
            return None
        recipe = self._recipe() if torch.is_grad_enabled() else None
        if recipe is not None and not native.takes(recipe):
            return None
        own, names = self._parameters, self._flat_weights_names
        weights = [w for name in names if (w := own.get(name)) is not None]
        if len(weights) < len(names):  # a parametrized one is elsewhere
            return None
        drops = self._drops()
        if drops and not masks.drops_as_torch(weights[0].dtype):
            return None
        xs, pack = self._rows_of(input)
        if pack is None and isinstance(input, PackedSequence):
            return None
        call, cast = self._prepared, self._autocast(weights[0])
        if call is None or not call.suits(xs, state, weights, pack, cast):
            job = functools.partial(self._asked, input, state)
            self._prepared = call = self._prepare(xs, pack, state, weights, cast, job)
            if call is None or not call.suits(xs, state, weights, pack, cast):
                return None
        use = native.use_of(pack, drops)
        if recipe is None:
            result = call(xs, state, use)
        else:
            result = native.recurrence(call, recipe, xs, state, weights, use)
        if result is None or (pack is None and not self.batch_first):
            return result
        ys, last = result
        if isinstance(input, PackedSequence):
            return input._replace(data=ys), last
        return ys.transpose(0, 1), last

    def _rows_of(self, input: Tensor | PackedSequence) -> tuple[Tensor, calls.Pack | None]:
        """Inputs as native code reads them, and how they are packed."""
        if isinstance(input, PackedSequence):
            return input.data, calls.packed(*input)
        return input.transpose(0, 1).contiguous() if self.batch_first else input, None

    def _prepare(
        self,
        xs: Tensor,
        pack: calls.Pack | None,
        state: Sequence[Tensor] | None,
        weights: list[Any],
        cast: torch.dtype | None,
        job: Callable[[], Job],
    ) -> calls.Prepared | None:
        """What native code needs to know, from the last call where only lengths have changed."""
        call = self._prepared and self._prepared.resized(xs, pack)
        if call is not None and call.suits(xs, state, weights, pack, cast):
            return call
        return calls.prepare(xs, weights, 2 if self.bidirectional else 1, job, pack, cast)

    def _asked(self, input: Tensor | PackedSequence, state: Sequence[Tensor] | None) -> Job:
        if not isinstance(input, PackedSequence):
            return self.job(input, state)
        data = input.data
        if self._autocast(getattr(self, self._flat_weights_names[0])):
            data, state = _widened(data, state)
        with uncast(data):
            first = self._checked_pack(input._replace(data=data), state)
            return self._packed_job(self._inputs(data, first), input.batch_sizes)

    def _is_plain(self, input: Tensor | PackedSequence) -> bool:
        """Whether this is a batch or a pack on a CPU, nothing being cut, dropped at most."""
        packed = isinstance(input, PackedSequence)
        given = input.data if packed else input
        if type(given) is not Tensor or not given.is_cpu or self._cuts(input) or self.is_noisy:
            return False
        if traced.listening() or forward_ad._current_level >= 0:  # no gradient, but a tangent
            return False
        if self.proj_size:
            return False
        return packed or self._is_batched(given)

    def _drops(self) -> float:
        """With which probability a call now drops what goes from layer to layer."""
        return self.dropout if self.training and self.num_layers > 1 else 0.0

    def _autocast(self, weight: Tensor) -> torch.dtype | None:
        """What autocast makes of float32 on a CPU; None where it is off, or finds another dtype."""
        if not torch.is_autocast_enabled("cpu") or weight.dtype != torch.float32:
            return None
        return torch.get_autocast_dtype("cpu")

    def _casts_inside(self, input: Tensor) -> bool:
        """Whether the kernel does autocast's work, and is handed everything in float32."""
        weights = [self._parameters.get(name) for name in self._flat_weights_names]
        if not self._is_plain(input) or any(w is None or not self._autocast(w) for w in weights):
            return False
        return not torch.is_grad_enabled() or native.takes(self._recipe())

    def _autocast_call(
        self, input: Tensor, state: Sequence[Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Under autocast on a GPU: in float32, what comes out being cast; None where not so."""
        if not self._stays_in_float32(input, state):
            return None
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind)
        torch.set_autocast_enabled(kind, False)  # the context manager takes 3 µs
        try:
            given = None if state is None else [s.float() for s in state]
            ys, last = self._run_any(input.float(), given)
        finally:
            torch.set_autocast_enabled(kind, True)
        assert isinstance(ys, Tensor)
        return ys.to(dtype), tuple([s.to(dtype) for s in last])

    def _stays_in_float32(self, input: Tensor, state: Sequence[Tensor] | None) -> bool:
        """Whether that is sooner than to cast all weights: settled once for each shape."""
        if torch.compiler.is_compiling() or traced.listening() or self.repeatable:
            return False
        if self._chunks is not None or not (state is None or _are_tensors(state)):
            return False
        if not input.is_floating_point() or self._parameter_dtype() != torch.float32:
            return False
        dtype = torch.get_autocast_dtype(input.device.type)
        mode = (torch.is_grad_enabled(), self.training, self.dropout, input.requires_grad)
        key = dtype, input.shape, input.device, mode, settings(torch.float32)
        settled = self._settled.get(key)
        if settled is None:
            narrow = self._job(self._inputs(*self._time_first(input, state)))
            sooner = is_sooner(self._float32_job(input, state), narrow)
            settled = Settled(IN_FLOAT32 if sooner else LONG_WAY, None)
            self._remember(key, settled)
        return settled.how == IN_FLOAT32

    def _float32_job(self, x: Tensor, state: Sequence[Tensor] | None) -> Job:
        """What the kernels are asked to run under autocast where only what comes out is cast."""
        x, state = _widened(x, state)
        with uncast(x):
            return self._job(self._inputs(*self._time_first(x, state)))

    def _key(self, input: Tensor, state: Sequence[Tensor] | None) -> Hashable:
        """All that decides whether a call may go to torch.nn's own function as it is.

        None where it never may. A small call takes torch less time than our checks would: shapes
        that have passed them once, and that cuDNN then ran, are not looked at again.
        """
        if not self._asks_torch(input) or input.dim() != 3 or self._cuts(input):
            return None
        kind = self._kind(input, state)
        return None if kind is None else (input.shape, kind)

    def _packed_key(self, input: PackedSequence, state: Sequence[Tensor] | None) -> Hashable:
        """The same for rows of different lengths: how many, how long, but not which."""
        data, sizes = input.data, input.batch_sizes
        if not data.is_cuda or data.dim() != 2 or self._chunks is not None:
            return None
        kind = self._kind(data, state)
        return None if kind is None else (sizes.shape[0], int(sizes[0]), data.shape[1], kind)

    def _kind(self, input: Tensor, state: Sequence[Tensor] | None) -> Hashable:
        """The part of a key that is not the input's shape."""
        if torch.compiler.is_compiling() or traced.listening() or forward_ad._current_level >= 0:
            return None
        if not (state is None or _are_tensors(state)):
            return None
        cast = torch.get_autocast_dtype(input.device.type) if is_cast(input.device) else None
        if cast is not None and not self._torch_casts(input):
            return None
        if self.dropout and self.training and whole.recomputes():
            return None
        dtype = input.dtype
        states = None if state is None else tuple([(s.shape, s.dtype, s.device) for s in state])
        mode = (torch.is_grad_enabled(), self.training, self.dropout, input.requires_grad)
        return dtype, input.device, states, mode, cast, settings(dtype)

    def _torch_casts(self, input: Tensor) -> bool:
        """Whether autocast is left to torch's own function: on a CPU, from float32 weights."""
        kind = self._parameter_dtype()
        return input.is_cpu and kind == torch.float32 and input.dtype != torch.float64

    def _remember(self, key: Hashable, settled: Settled) -> None:
        if len(self._settled) > 1000:  # sequences of every length
            self._settled.clear()
        self._settled[key] = settled

    def _settle(self, xs: Tensor, first: Sequence[Tensor]) -> Settled:
        """How calls like this one are to be run: by cuDNN in one go, by our kernel in one, or by
        the long way."""
        x = self._inputs(xs, first)
        stack = self._whole(x)
        theirs = runs_whole(stack, xs.device, lambda: self._job(x))
        if xs.is_cpu:
            return Settled(aten.prepared(stack) if theirs else LONG_WAY, None)
        if not theirs:
            how = prepared.prepare(self._recipe(), x, self.batch_first) or LONG_WAY
            return Settled(how, self._repeated(x, stack, how))
        how = self._as_torch(x, stack)
        return Settled(how, self._repeated(x, stack, how, Cudnn.name))

    def _as_torch(self, x: Inputs, stack: Whole) -> str | Whole:
        """What is handed straight to torch.nn's own function, or the long way there."""
        plain = stack.pieces == 1 and not stack.ids
        return stack if plain and cudnn.lie_together(stack.network, x.weights) else LONG_WAY

    def _repeated(
        self, x: Inputs, stack: Whole, how: str | prepared.Call | Whole, kernel: str = ""
    ) -> captured.Repeated | None:
        """What captures these calls where they are repeated; None where nothing does."""
        recipe = self._recipe(len(x.xs))
        ours = None if kernel else select(recipe.job(x))
        if captured.refuses(recipe, x, stack, ours.name if ours else kernel) is not None:
            return None
        if ours is None:
            way = ways.ByCudnn(stack.network, self.batch_first, how != LONG_WAY)
        elif isinstance(how, prepared.Call):
            way = ways.ByCall(how)
        else:
            sizes = named(self.cell).state_sizes(self.hidden_size)
            way = ways.ByStack(recipe, ours, self.batch_first, sizes)
        return captured.Repeated(way, stack, x.xs.device.index)

    def _settled_call(
        self, settled: Settled, input: Tensor, state: Sequence[Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The call as it was settled; None where it takes the long way."""
        how, again = settled
        again = None if again is None or again.given_up else again
        if how == LONG_WAY and again is None:
            return None
        weights = self._weights()
        if again is not None and (done := again(input, state or (), weights)):
            return done
        if how == LONG_WAY:
            return None
        if isinstance(how, prepared.Call):
            return how(input, state or (), weights) if how.prepared.suits(weights) else None
        assert isinstance(how, Whole)
        cast = self._autocast(weights[0]) if input.is_cpu else None
        if state is None:
            state = self._zeros(how.rows, input.dtype, input.device)
        if cast is not None:  # torch's products are cast, but not all that comes out
            state = [s.float() for s in state]
        ys, last = cudnn.as_torch(how.network, self.batch_first, input, state, weights, how.dropout)
        return (ys, last) if cast is None else (ys.to(cast), tuple([s.to(cast) for s in last]))

    def _weights(self) -> list[Any]:
        own, names = self._parameters, self._flat_weights_names
        return [own[n] if n in own else getattr(self, n) for n in names]  # parametrized: elsewhere

    def _zeros(self, rows: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """The initial state where the caller passed none."""
        places = self.num_layers * (2 if self.bidirectional else 1)
        sizes = named(self.cell).state_sizes(self.hidden_size, self.proj_size)
        return [torch.zeros(places, rows, n, dtype=dtype, device=device) for n in sizes]

    def _run_packed(
        self, input: PackedSequence, state: Sequence[Tensor] | None
    ) -> tuple[PackedSequence, tuple[Tensor, ...]]:
        """Rows of different lengths: a row that has ended holds its state."""
        key = self._packed_key(input, state)
        settled = None if key is None else self._settled.get(key)
        if settled is None:
            state = self._checked_pack(input, state)
        elif state is None:
            state = self._zeros(int(input.batch_sizes[0]), input.data.dtype, input.data.device)
        if input.sorted_indices is not None:
            state = [s.index_select(1, input.sorted_indices) for s in state]
        if key is not None and settled is None:
            settled = self._settle_packed(input, state)
            self._remember(key, settled)
        done = None if settled is None else self._settled_packed(settled, input, state)
        ys, last = done or self._recur_packed(input.data, input.batch_sizes, state)
        if input.unsorted_indices is not None:
            last = tuple([s.index_select(1, input.unsorted_indices) for s in last])
        return input._replace(data=ys), last

    def _settled_packed(
        self, settled: Settled, input: PackedSequence, first: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The call as it was settled; None where it takes the long way."""
        how, (data, sizes) = settled.how, input[:2]
        if how == LONG_WAY:
            return None
        weights = self._weights()
        if isinstance(how, Whole):
            return cudnn.as_torch(how.network, False, data, first, weights, how.dropout, sizes)
        assert isinstance(how, prepared.Call)
        if not how.prepared.suits(weights):
            return None
        places = packed.places(sizes, len(data), data.device)
        ys, last = how(places.padded(data), first, weights, places.lengths)
        return places.packed(ys), last

    def _checked_pack(
        self, input: PackedSequence, state: Sequence[Tensor] | None
    ) -> Sequence[Tensor]:
        """The first states, as the caller has them."""
        self._check_input(input.data[None], batched=True, time=1)
        rows = input.batch_sizes[0]  # in a trace not a number, but what tells it
        rows = rows if torch.jit.is_tracing() else int(rows)
        return self._checked_state(rows, input.data.device, state)

    def _recur_packed(
        self, data: Tensor, batch_sizes: Tensor, first: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The recurrence of packed rows: as it is for torch's own, padded for all others."""
        if traced.listening():
            x = self._inputs(data, first).drawn()
            return traced.recurrence(self._recipe(), x, self.training, batch_sizes)
        if data.is_cpu and not torch.compiler.is_compiling():
            _check_pack(len(data), batch_sizes.tolist())
        asks = self._asks_torch(data) and (data.is_cuda or forward_ad._current_level < 0)
        if asks and self._chunks is None and not torch.compiler.is_compiling():
            x = self._inputs(data, first)
            if (stack := self._packed_whole(x, batch_sizes)) is not None:
                return self._by_torch(stack, x, batch_sizes)
        if data.is_cuda and self._chunks is None and not torch.compiler.is_compiling():
            places = packed.places(batch_sizes, len(data), data.device)
            ys, last = self._recur(places.padded(data), first, places.lengths)
            return places.packed(ys), last
        xs, lengths = pad_packed_sequence(PackedSequence(data, batch_sizes))
        ys, last = self._recur(xs, first, lengths)
        return pack_padded_sequence(ys, lengths).data, last

    def _settle_packed(self, input: PackedSequence, first: Sequence[Tensor]) -> Settled:
        """How packed calls like this one are to be run: by cuDNN in one go, by our kernel in one,
        or by the long way."""
        x = self._inputs(input.data, first)
        stack = self._packed_whole(x, input.batch_sizes)
        if stack is not None:
            return Settled(self._as_torch(x, stack), None)
        places = packed.places(input.batch_sizes, len(x.xs), x.xs.device)
        x = x._replace(xs=places.padded(x.xs), lengths=places.lengths)
        return Settled(prepared.prepare(self._recipe(), x, False) or LONG_WAY, None)

    def _packed_whole(self, x: Inputs, batch_sizes: Tensor) -> Whole | None:
        """The packed stack, where cuDNN runs it."""
        stack = self._described(x, len(batch_sizes), int(batch_sizes[0]), packed=True)
        runs = runs_whole(stack, x.xs.device, lambda: self._packed_job(x, batch_sizes))
        return stack if runs else None

    def _packed_job(self, x: Inputs, batch_sizes: Tensor) -> Job:
        stack = self._described(x, len(batch_sizes), int(batch_sizes[0]), packed=True)
        places = packed.places(batch_sizes, len(x.xs), x.xs.device)
        padded = x._replace(xs=places.padded(x.xs), lengths=places.lengths)
        return replace(self._job(padded), whole=stack)

    def _recur(
        self, xs: Tensor, state: Sequence[Tensor], lengths: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The recurrence itself, everything time first."""
        x = self._inputs(xs, state, lengths)
        if traced.listening():
            return traced.recurrence(self._recipe(), x.drawn(), self.training)
        if torch.compiler.is_compiling():
            x = x.drawn()
            out = compiled.recurrence(*x, *self._plain(), self._how, torch.is_grad_enabled())
            return out[0], tuple(out[1 : 1 + len(state)])
        recipe = self._recipe(len(xs))
        asks = self._asks_torch(x.xs) and (x.xs.is_cuda or forward_ad._current_level < 0)
        if asks and lengths is None and recipe.chunks is None:
            stack = self._whole(x)
            if runs_whole(stack, xs.device, lambda: self._job(x)):
                return self._by_torch(stack, x)  # which draws by itself
        return recurrence(recipe, x.drawn())

    def _by_torch(
        self, stack: Whole, x: Inputs, batch_sizes: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The recurrence by torch's own layers."""
        if x.xs.is_cpu:
            return whole.recurrence_on_a_cpu(stack, x, batch_sizes)
        return whole.recurrence(stack, x, batch_sizes)

    def _whole(self, x: Inputs) -> Whole:
        """The stack as torch's own layers would be handed it."""
        steps, rows = x.xs.shape[:2]
        return self._described(x, steps, rows)

    def _described(self, x: Inputs, steps: int, rows: int, packed: bool = False) -> Whole:
        recipe = self._recipe(steps)
        stack = whole.described(recipe, self._network(), x, steps, rows, packed)
        if recipe.chunks is not None:
            return stack._replace(apart="time runs in chunks, and it runs a whole sequence")
        if not self.repeatable:
            return stack
        return stack._replace(apart="its bits are not the same in a CUDA graph and outside of one")

    def _network(self, mode: str | None = None) -> Network:
        cell = named(self._running or getattr(self, "cell", "tanh"))
        return Network(
            mode or (cell.torch_mode if Cudnn.name in cell.kernels else None),
            self.bias,
            self.input_size,
            self.hidden_size,
            self.proj_size,
            self.num_layers,
            2 if self.bidirectional else 1,
        )

    def _inputs(self, xs: Tensor, state: Sequence[Tensor], lengths: Tensor | None = None) -> Inputs:
        """All tensors that go into the recurrence, in autocast's dtype where it is on.

        No chance is drawn yet: to be asked what would run must not change what comes next.
        """
        weights = [getattr(self, name) for name in self._flat_weights_names]
        for name, w in zip(self._flat_weights_names, weights, strict=True):
            if not w.is_floating_point():
                raise UserError(
                    f"{name} of {type(self).__name__} has dtype {w.dtype}, weights are real",
                    hint=f"module.{name}.data = module.{name}.data.to(torch.float32)",
                )
        if (heads := named(self.cell).heads) != 1:
            for i, name in enumerate(self._flat_weights_names):
                if name.startswith("weight_hh"):
                    weights[i] = weights[i] * diagonal_blocks(weights[i], heads)
        dtype = weights[0].dtype
        if is_cast(xs.device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(xs.device.type)
        drops = self.dropout > 0 and self.num_layers > 1
        draws = self.training and (drops or self.is_noisy)
        return Inputs(
            _as(dtype if xs.is_floating_point() else torch.int64, xs),
            [_as(dtype, s) for s in state],
            [_as(dtype, w) for w in weights],
            None if lengths is None else lengths.to(xs.device),
            UNDRAWN if draws else None,
        )

    def backward_through_time(self, xs: Tensor, loss: Loss, h0: Any = None) -> tuple[Tensor, Any]:
        """See `elman.gradients.backward_through_time`."""
        if self.bidirectional:
            raise UserError(
                "backward_through_time takes the loss piece by piece, but every output of a "
                "bidirectional module depends on both ends of the sequence",
                hint="call the module itself; its memory= applies there too",
            )
        x = self._inputs(*self._time_first(xs, (h0,) if isinstance(h0, Tensor) else h0)).drawn()
        value, last, pulls = piecewise.backward_through_time(
            self._recipe(), x, lambda ys, start: loss(self._as_given(xs, ys), start)
        )
        wanted = [t.requires_grad for t in x.flat()]
        if any(wanted):
            torch.autograd.backward([*compress(x.flat(), wanted)], [*compress(pulls, wanted)])
        last = self._states_as_given(xs, last)
        return value, _as_hx(last)

    def _is_batched(self, input: Tensor) -> bool:
        return input.dim() == (3 if input.is_floating_point() else 2)

    def _time_first(
        self, input: Tensor, state: Sequence[Tensor] | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The caller's input and state, checked, with time before batch."""
        batched = self._is_batched(input)
        self._check_input(input, batched, time=1 if batched and self.batch_first else 0)
        if not batched:
            state = None if state is None else [s.unsqueeze(1) for s in state]
            return input.unsqueeze(1), self._checked_state(1, input.device, state, False)
        xs = input.transpose(0, 1) if self.batch_first else input
        return xs, self._checked_state(xs.shape[1], xs.device, state)

    def _as_given(self, input: Tensor, ys: Tensor) -> Tensor:
        """Outputs in the layout of the input."""
        if not self._is_batched(input):
            return ys.squeeze(1)
        return ys.transpose(0, 1) if self.batch_first else ys

    def _states_as_given(self, input: Tensor, last: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(last) if self._is_batched(input) else tuple(s.squeeze(1) for s in last)

    def _plain(self) -> tuple[str, bool, bool, int, float]:
        """All about the stack that is a plain value."""
        directions = 2 if self.bidirectional else 1
        return self.running_cell, self.bias, self.proj_size > 0, directions, self.dropout

    def _recipe(self, steps: int = SHORT) -> Recipe:
        chunks = self._chunks if steps >= SHORT else None
        return Recipe(*self._plain(), self.carry, self.memory, chunks)

    def _cuts(self, input: Tensor | PackedSequence) -> bool:
        """Whether the time of this input may be cut into chunks."""
        if isinstance(input, PackedSequence):
            return self._chunks is not None
        time = 1 if self.batch_first and self._is_batched(input) else 0
        return self._chunks is not None and input.shape[time] >= SHORT

    def to_torch(self) -> Any:
        """The `torch.nn` module of the same name, with these very parameters: shared, not copied.

        For tools that look for torch's own classes (`quantize_dynamic`, profilers). Training one
        trains the other; `copy.deepcopy` parts them. What it computes is the same; its gradient is
        the exact one, whatever the carry here, and it takes no ids.

        >>> GRU(28, 256, num_layers=2).to_torch()
        GRU(28, 256, num_layers=2)
        """
        cell = named(self.cell)
        if self.is_noisy:
            raise UserError(f"torch.nn has no {self.running_cell}")
        if not is_torchs(cell):
            has = ", ".join(c.name for c in CELLS.values() if is_torchs(c))
            raise UserError(
                f"torch.nn has no module for the cell {cell.name}",
                hint=f"it has {has}; torch.export and torch.onnx take this module as it is",
            )
        kind: Any = {"GRU": torch.nn.GRU, "LSTM": torch.nn.LSTM}.get(self.mode, torch.nn.RNN)
        options: dict[str, Any] = {"nonlinearity": cell.name} if kind is torch.nn.RNN else {}
        if self.proj_size:
            options["proj_size"] = self.proj_size
        twin = kind(
            self.input_size,
            self.hidden_size,
            self.num_layers,
            bias=self.bias,
            batch_first=self.batch_first,
            dropout=self.dropout,
            bidirectional=self.bidirectional,
            device="meta",
            **options,
        )
        for name in self._flat_weights_names:
            setattr(twin, name, getattr(self, name))
        return twin.train(self.training)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("zoneout", "update_dropout"):  # refused before anything has changed
            noise = {"zoneout": self.zoneout, "update_dropout": self.update_dropout}
            self._begin_noise(**noise | {name: value})
            return
        if name in custom.CHECKED:
            custom.CHECKED[name](value)
        if name == "carry":
            self._check_noise_goes_with(value, self.is_noisy)
        super().__setattr__(name, value)
        if name == "time":
            self._begin_chunks(value)
        if name == "repeatable":
            super().__setattr__("_settled", {})
        if name == "training" and self.is_noisy:
            self._run_by(self.zoneout, self.update_dropout)
        if name in ("carry", "memory", "time") and hasattr(self, "carry") and hasattr(self, "time"):
            registered = compiled.register(self.carry, self.memory, self._chunks)
            super().__setattr__(
                "_registered", registered
            )  # as long as the module, so is its number
            super().__setattr__("_how", registered.number)  # a plain value to torch.compile
            super().__setattr__("_settled", {})

    def _begin_chunks(self, time: Time) -> None:
        """Know nothing yet of how long this network remembers.

        What is learned is a buffer, so that a training saves it, but not part of the state dict,
        which is torch's.
        """
        self._buffers.pop("chunk_overlaps", None)
        chunks = None
        if isinstance(time, Chunked):
            chunks = Chunks(time, getattr(self, self._flat_weights_names[0]).device)
            self.register_buffer("chunk_overlaps", chunks.state, persistent=False)
        super().__setattr__("_chunks", chunks)

    def _apply(self, *args: Any, **options: Any) -> Any:
        """Moved, or of another type: nothing is settled any more."""
        self._settled.clear()
        moved = super()._apply(*args, **options)
        if self._chunks is not None:
            self._chunks.state = self.get_buffer("chunk_overlaps")
        return moved

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has a carry of its own, with generators of its own."""
        super().__setstate__(state)
        self.__dict__.setdefault("time", STEPPED)  # a module pickled before there were chunks
        self.memory = self.memory
        self._run_by(self.zoneout, self.update_dropout)

    def job(
        self, x: Tensor | PackedSequence, state: Tensor | Sequence[Tensor] | None = None
    ) -> Job:
        """What the kernels are asked to run for this input (see `elman.kernels.explain`)."""
        state = (state,) if isinstance(state, Tensor) else state
        if isinstance(x, PackedSequence):
            self._check_input(x.data[None], batched=True, time=1)
            first = self._checked_state(int(x.batch_sizes[0]), x.data.device, state)
            return self._packed_job(self._inputs(x.data, first), x.batch_sizes)
        on_gpu = x.is_cuda and torch.is_autocast_enabled("cuda")
        if self._stays_in_float32(x, state) if on_gpu else self._casts_inside(x):
            return self._float32_job(x, state)
        return self._job(self._inputs(*self._time_first(x, state)))

    def _job(self, x: Inputs) -> Job:
        stack = self._whole(x)
        job = replace(self._recipe().job(x), whole=stack)
        if x.xs.is_cuda:
            job = replace(job, again=lambda kernel: self._again_words(x, stack, kernel))
        return job if self._chunks is None else replace(job, time=self._time_words(job))

    def _again_words(self, x: Inputs, stack: Whole, kernel: str) -> str:
        """What becomes of repeated calls, for `explain`."""
        if self._chunks is not None:
            return ""
        recipe = self._recipe(len(x.xs))
        beside = prepared.beside(recipe, x, stack) if kernel == "cuda" else ""
        words = (beside, self._captured(recipe, x, stack, kernel))
        return "; ".join(w for w in words if w)

    def _captured(self, recipe: Recipe, x: Inputs, stack: Whole, kernel: str) -> str:
        reason = captured.refuses(recipe, x, stack, kernel)
        if reason is not None:
            return f"not captured: {reason}"
        known = [again for _, again in self._settled.values() if again is not None]
        words = [again.words() for again in known if again.whole == stack]
        return next((w for w in words if w != captured.WILL_BE), captured.WILL_BE)

    def _time_words(self, job: Job) -> Callable[[Kernel], str]:
        """How a kernel would run the job's time now, for `explain`."""

        def words(kernel: Kernel) -> str:
            assert self._chunks is not None
            cut = InChunks(kernel, self._chunks.foreseen()).cut(next(job.pieces()), "forward")
            return f"step after step, {cut}" if isinstance(cut, str) else cut.words

        return words

    def _check_input(self, input: Tensor, batched: bool, time: int) -> None:
        name, weight, shape = type(self).__name__, self._parameter_dtype(), tuple(input.shape)
        kind, home = input.dtype, getattr(self, self._flat_weights_names[0]).device
        if input.device != home:
            raise UserError(
                f"input is on {input.device}, the weights of {name} are on {home}",
                hint="move both to one device, with .to(device)",
            )
        integer = not (kind.is_floating_point or kind.is_complex or kind == torch.bool)
        autocast = kind.is_floating_point and is_cast(input.device)
        if not (integer or kind == weight or autocast):
            raise UserError(
                f"input has dtype {kind}, the weights of {name} have {weight}",
                hint=f"input.to({weight}), or integer ids, which are read as one-hot rows",
            )
        if input.dim() not in ((1, 2) if integer else (2, 3)):
            layout = "batch, time" if self.batch_first else "time, batch"
            rule = "ids of shape (time,) or ({})" if integer else "(time, {1}) or ({0}, {1})"
            raise UserError(
                f"input has shape {shape}; {name} reads {rule.format(layout, self.input_size)}"
            )
        if not integer and shape[-1] != self.input_size:
            raise UserError(f"input has shape {shape}; its last size must be {self.input_size}")
        if shape[time] == 0:
            raise UserError(f"input has shape {shape}: no time steps")

    def _parameter_dtype(self) -> torch.dtype:
        return getattr(self, self._flat_weights_names[0]).dtype

    def _checked_state(
        self,
        rows: Any,
        device: torch.device,
        state: Sequence[Tensor] | None,
        batched: bool = True,
    ) -> Sequence[Tensor]:
        """The caller's (h,) or (h, c), or zeros."""
        places = self.num_layers * (2 if self.bidirectional else 1)
        names = [f"{state}0" for state in named(self.cell).states]
        sizes = named(self.cell).state_sizes(self.hidden_size, self.proj_size)
        dtype = self._parameter_dtype()
        if state is None:
            return self._zeros(rows, dtype, device)
        if len(state) != len(sizes) or not all(isinstance(s, Tensor) for s in state):
            rule = f"a pair of tensors ({', '.join(names)})" if len(names) > 1 else "one tensor h0"
            raise UserError(f"the initial state of {type(self).__name__} must be {rule}")
        for name, s, n in zip(names, state, sizes, strict=True):
            rule = (places, rows, n) if batched else (places, n)
            shape = s.shape if batched else (s.shape[0], *s.shape[2:])
            if tuple(shape) != rule:
                what = (
                    "layers · directions, batch, size" if batched else "layers · directions, size"
                )
                raise UserError(f"{name} has shape {tuple(shape)}; it must be {rule}: ({what})")
            if s.device != device:
                raise UserError(f"{name} is on {s.device}, the input on {device}")
            if s.dtype != dtype and not is_cast(device):
                raise UserError(f"{name} has dtype {s.dtype}; it must be {dtype}, as the weights")
        return state

    def extra_repr(self) -> str:
        arguments = super().extra_repr()
        arguments += "" if self.carry == Full() else f", carry={self.carry}"
        arguments += "" if self.memory == Stored() else f", memory={self.memory}"
        arguments += "" if self.time == STEPPED else f", time={self.time}"
        arguments += f", zoneout={self.zoneout:g}" if self.zoneout else ""
        return arguments + (
            f", update_dropout={self.update_dropout:g}" if self.update_dropout else ""
        )


def _check_pack(rows: int, sizes: list[int]) -> None:
    """Refuse what torch would unpack beyond its memory."""
    if sizes != sorted(sizes, reverse=True) or sizes[-1] < 1 or sum(sizes) != rows:
        raise UserError(
            f"a PackedSequence of {rows} rows has batch_sizes {sizes}: they must not grow, be at "
            f"least 1 and add up to {rows}",
            hint="torch.nn.utils.rnn.pack_padded_sequence makes them from lengths",
        )


def _widened(x: Tensor, state: Sequence[Tensor] | None) -> tuple[Tensor, Sequence[Tensor] | None]:
    """Input and state in float32, where they are numbers."""
    x = x.float() if x.is_floating_point() else x
    return x, [s.float() for s in state or ()] if _are_tensors(state) else state


def _are_tensors(state: Any) -> bool:
    return isinstance(state, tuple | list) and all(isinstance(s, Tensor) for s in state)


def _as(dtype: torch.dtype, t: Tensor) -> Tensor:
    return t if t.dtype == dtype else t.to(dtype)


@final
class RNN(_Module):
    """`torch.nn.RNN` with a carry, a memory and a time; `nonlinearity` may also be "linear".

    >>> rnn = RNN(28, 256)
    >>> y, h = rnn(torch.zeros(35, 32, 28))
    >>> y.shape, h.shape
    (torch.Size([35, 32, 256]), torch.Size([1, 32, 256]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        carry: Carry = FULL,
        memory: Memory = STORED,
        time: Time = STEPPED,
        zoneout: float = 0.0,
        update_dropout: float = 0.0,
    ) -> None:
        known = [name for name, cell in CELLS.items() if _module_of(cell) is RNN]
        if nonlinearity not in known:
            raise UserError(
                f"nonlinearity={nonlinearity!r} is unknown", hint=f"choose {_one_of(known)}"
            )
        super().__init__(
            nonlinearity,
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device=device,
            dtype=dtype,
            carry=carry,
            memory=memory,
            time=time,
            zoneout=zoneout,
            update_dropout=update_dropout,
        )
        self.nonlinearity = nonlinearity

    def forward(self, input: Tensor | PackedSequence, hx: Tensor | None = None) -> Any:
        """Every h_t of the last layer, and h_T of every layer."""
        ys, (h,) = self._run(input, None if hx is None else (hx,))
        return ys, h


@final
class GRU(_Module):
    """`torch.nn.GRU` with a carry, a memory and a time."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        carry: Carry = FULL,
        memory: Memory = STORED,
        time: Time = STEPPED,
        zoneout: float = 0.0,
        update_dropout: float = 0.0,
    ) -> None:
        super().__init__(
            "gru",
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device=device,
            dtype=dtype,
            carry=carry,
            memory=memory,
            time=time,
            zoneout=zoneout,
            update_dropout=update_dropout,
        )

    def forward(self, input: Tensor | PackedSequence, hx: Tensor | None = None) -> Any:
        """Every h_t of the last layer, and h_T of every layer."""
        ys, (h,) = self._run(input, None if hx is None else (hx,))
        return ys, h


@final
class LSTM(_Module):
    """`torch.nn.LSTM` with a carry, a memory and a time; both h and c are carried."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        carry: Carry = FULL,
        memory: Memory = STORED,
        time: Time = STEPPED,
        zoneout: float = 0.0,
        update_dropout: float = 0.0,
    ) -> None:
        super().__init__(
            "lstm",
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            proj_size,
            device=device,
            dtype=dtype,
            carry=carry,
            memory=memory,
            time=time,
            zoneout=zoneout,
            update_dropout=update_dropout,
        )

    def forward(
        self, input: Tensor | PackedSequence, hx: tuple[Tensor, Tensor] | None = None
    ) -> Any:
        """Every h_t of the last layer, and (h_T, c_T) of every layer."""
        return self._run(input, hx)


@final
class Layers(_Module):
    """Layers of any cell: a name in `elman.cells.CELLS`, or what `elman.cell` has declared.

    >>> layers = Layers("gru", 28, 256)
    >>> y, h = layers(torch.zeros(35, 32, 28))
    >>> y.shape, h.shape
    (torch.Size([35, 32, 256]), torch.Size([1, 32, 256]))
    """

    def __init__(
        self,
        cell: str | Cell,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        carry: Carry = FULL,
        memory: Memory = STORED,
        time: Time = STEPPED,
        zoneout: float = 0.0,
        update_dropout: float = 0.0,
    ) -> None:
        super().__init__(
            cell if isinstance(cell, str) else cell.name,
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device=device,
            dtype=dtype,
            carry=carry,
            memory=memory,
            time=time,
            zoneout=zoneout,
            update_dropout=update_dropout,
        )

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        """Every h_t of the last layer, and the last state of every layer: h_T, or (h_T, c_T)."""
        ys, last = self._run(input, (hx,) if isinstance(hx, Tensor) else hx)
        return ys, _as_hx(last)

    def extra_repr(self) -> str:
        """The cell, then torch's own words."""
        return f"{self.cell}, {super().extra_repr()}"


@final
class Recurrent(custom.Recurrent):
    """A cell of your own over time: one that is declared, with its sizes, or any module.

    `Recurrent(cell, input_size, hidden_size, …)`, where `elman.cell` has declared the cell or
    `elman.cells.CELLS` has its name, makes `Layers` with all its options: it runs in a kernel.

    >>> Recurrent("mgu", 28, 256)
    Layers(mgu, 28, 256)

    `Recurrent(module, carry=…, memory=…)` runs `module(x, state) -> state` or `-> (output, state)`
    a step at a time: see `elman.recurrence.custom`.

    >>> ys, h = Recurrent(torch.nn.GRUCell(3, 4))(torch.zeros(5, 2, 3))
    >>> ys.shape, h.shape
    (torch.Size([5, 2, 4]), torch.Size([2, 4]))
    """

    @overload
    def __new__(cls, cell: str | Cell, /, *sizes: int, **options: Any) -> Layers: ...
    @overload
    def __new__(cls, cell: torch.nn.Module, /, **options: Any) -> Self: ...
    def __new__(cls, cell: Any = None, /, *sizes: Any, **options: Any) -> Any:
        if isinstance(cell, str | Cell):
            _check_sizes(cell, sizes, options)
            return Layers(cell, *sizes, **options)
        if sizes:
            raise UserError(
                f"Recurrent(module, {', '.join(map(str, sizes))}): a module has its own sizes",
                hint="Recurrent(module), or Recurrent(cell, input_size, hidden_size) with the name "
                "of a cell",
            )
        return super().__new__(cls)  # a copy is made without a cell


def _check_sizes(cell: str | Cell, sizes: Sequence[Any], options: dict[str, Any]) -> None:
    missing = [n for n in ("input_size", "hidden_size")[len(sizes) :] if n not in options]
    if missing:
        name = cell if isinstance(cell, str) else cell.name
        raise UserError(
            f"Recurrent({name!r}) needs {' and '.join(missing)}",
            hint=f"Recurrent({name!r}, 28, 256)",
        )


def of(cell: str, input_size: int, hidden_size: int, num_layers: int = 1, **options: Any) -> Any:
    """Layers of this cell: `RNN`, `GRU` or `LSTM` where it has that name in torch, else `Layers`.

    >>> of("relu", 28, 256)
    RNN(28, 256)
    """
    module: Any = _module_of(named(cell))
    if module is Layers:
        return Layers(cell, input_size, hidden_size, num_layers, **options)
    chosen = {"nonlinearity": cell} if module is RNN else {}
    return module(input_size, hidden_size, num_layers, **chosen, **options)


def _module_of(cell: Cell) -> type[_Module]:
    """The class that has this cell's parameters."""
    mode = cell.torch_mode
    if mode is None:
        return Layers
    return {"GRU": GRU, "LSTM": LSTM}.get(mode, RNN)


def _as_hx(last: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """The last state as a module returns it: h, or (h, c)."""
    h, *rest = last
    return last if rest else h


def _one_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
