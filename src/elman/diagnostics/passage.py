"""A model that has read something: its states at every step, and the pull of every loss.

The carried state of all layers is one row, S_t = (h¹_t, [c¹_t], h²_t, …), so that one Jacobian
∂S_t/∂S_{t-1} tells all that flows through time, whatever the cell and however deep the stack.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F

from elman.cells import Cell, State, Weights
from elman.errors import UserError
from elman.kernels import Kernel, Piece, Trace, allows, cpu, reference
from elman.language_model import LanguageModel
from elman.language_model.looking import weights_of
from elman.language_model.masks import NO_MASKS
from elman.language_model.model import known_labels
from elman.text.batches import flat_integers

Moments = Tensor | slice
"""Steps of a passage: any, or some that follow one another, `slice(first, last + 1)`."""


def shifted(at: Moments, steps: int) -> Moments:
    """So many steps later.

    >>> shifted(slice(3, 5), -2)
    slice(1, 3, None)
    """
    return slice(at.start + steps, at.stop + steps) if isinstance(at, slice) else at + steps


def text_of_steps(model: LanguageModel, ids: Any, verb: str) -> Tensor:
    """The ids of a text that has a step to `verb`, for a model that carries something over it."""
    if not model.recurrent:
        raise UserError(
            f"a model with cell={model.cell!r} carries nothing through time",
            hint=f"{verb} a run of a recurrent model, such as --model gru",
        )
    ids = torch.as_tensor(flat_integers(ids), device="cpu").long()
    if len(ids) < 2:
        raise UserError(
            f"ids of shape {tuple(ids.shape)} hold no step to {verb}",
            hint="a flat text of at least two tokens",
        )
    known_labels(ids, model.vocab_size)
    return ids


@dataclass(frozen=True, eq=False)
class Passage:
    """T steps of a recurrent stack in float64, batch of one."""

    cell: Cell
    layers: list[Weights]
    xs: Tensor
    """(T, input), or (T,) ids"""
    states: Tensor
    """S_0 … S_T: (T+1, N)"""
    gates: list[Tensor | None]
    """of each layer, as the cell keeps them: (T, ·)"""
    pulls: Tensor
    """∂L_t/∂h_t of the top layer, each loss on its own: (T, hidden)"""
    nats: Tensor
    """L_t: (T,)"""

    @classmethod
    def read(cls, model: LanguageModel, ids: Any) -> "Passage":
        """Let a language model read ids; its losses are L_t = -log P(x_{t+1} | x_1 … x_t)."""
        ids = text_of_steps(model, ids, "diagnose")
        exact = model if _is_exact(model) else exact_copy(model)
        with torch.no_grad():
            xs = exact.inputs(ids[:-1, None], NO_MASKS)
        passage = cls.run(exact.recurrence, xs)
        logits = exact.project(passage.top_states(), NO_MASKS).detach()
        nats = F.cross_entropy(logits, ids[1:], reduction="none")
        error = torch.softmax(logits, -1)
        error -= F.one_hot(ids[1:], error.shape[1])  # ∇_o L = ŷ - 1
        return cls(**{**vars(passage), "pulls": error @ exact.output_weight.detach(), "nats": nats})

    @classmethod
    def run(cls, module: Any, xs: Tensor, pulls: Tensor | None = None) -> "Passage":
        """Run an `elman.nn` module over xs, (T, 1, input) or (T, 1) ids, from a zero state.

        `pulls` is ∂L_t/∂h_t of the top layer, (T, hidden); without it every loss is taken to pull
        with the same unit vector.
        """
        if getattr(module, "bidirectional", False):
            raise UserError(
                "a bidirectional module has no one direction through time",
                hint="diagnose its forward direction as a module of its own",
            )
        module = module if _is_exact(module) else copy.deepcopy(module).cpu().double().eval()
        xs = xs.detach().double() if xs.is_floating_point() else xs
        job = module.job(xs.transpose(0, 1) if module.batch_first else xs)
        layers = [w.map(Tensor.detach) for w in job.layers]
        states, gates, x = [], [], xs
        for w, state in zip(layers, job.states, strict=True):
            trace = _forward(Piece(job.cell, w, x, state))
            rows = [trace.hs[:, 0]] + ([] if trace.cs is None else [trace.cs[:, 0]])
            gates.append(None if trace.gates is None else trace.gates[:, 0])
            states += rows
            x = trace.hs[1:]
        if pulls is None:
            size = x.shape[-1]
            pulls = x.new_full((len(xs), size), size**-0.5)
        rows = torch.cat(states, -1)
        nats = rows.new_zeros(len(xs))
        return cls(job.cell, layers, xs[:, 0], rows, gates, pulls, nats)

    def __len__(self) -> int:
        return len(self.xs)

    @property
    def sizes(self) -> list[int]:
        """The widths of the parts of S_t."""
        per_layer = (self.cell.state_sizes(w.hidden_size, w.W_hh.shape[1]) for w in self.layers)
        return [size for sizes in per_layer for size in sizes]

    def parts(self, S: Tensor) -> list[State]:
        """S as one state per layer."""
        pieces, each = S.split(self.sizes, -1), len(self.cell.states)
        return [tuple(pieces[i : i + each]) for i in range(0, len(pieces), each)]

    def top_states(self) -> Tensor:
        """h_1 … h_T of the top layer."""
        return self.parts(self.states[1:])[-1][0]

    def on_state(self, pulls: Tensor) -> Tensor:
        """A pull on the top layer's h as a pull on S: zero elsewhere."""
        whole = pulls.new_zeros(*pulls.shape[:-1], sum(self.sizes))
        start = sum(self.sizes[: -len(self.cell.states)])
        whole[..., start : start + pulls.shape[-1]] = pulls
        return whole

    def step(self, at: Moments, S: Tensor) -> Tensor:
        """S_{t+1} from S_t = S for each t in `at`: rows are different moments, side by side."""
        x, after = self.xs[at], []
        for w, state in zip(self.layers, self.parts(S), strict=True):
            state, _ = self.cell.step(w, x, state)
            x = state[0]
            after += state
        return torch.cat(after, -1)

    def pull_back(self, at: Moments, G: Tensor) -> Tensor:
        """(∂S_{t+1}/∂S_t)ᵀ G for each t in `at`, one batched vector–Jacobian product.

        Moments that follow one another are quicker as a slice: their gates are not copied.
        """
        if self.cell.spares_weights:
            return self._by_hand(at, G)
        with torch.enable_grad():
            S = self.states[at].requires_grad_()
            (pulled,) = torch.autograd.grad(self.step(at, S), S, G)
        return pulled

    def norms_by_lag(self, lags: int) -> Tensor | None:
        """‖∂L_t/∂S_{t+1-k}‖, k = 0 … lags, of every loss from t = lags on, in one native call.

        None where there is none: of stacks, of cells whose derivative is autograd's.
        """
        if len(self.layers) > 1:
            return None
        (w,), (gates,) = self.layers, self.gates
        (before,), (after,) = self.parts(self.states[:-1]), self.parts(self.states[1:])
        slopes = self.cell.slopes(w, self.xs, before, after, gates)
        if slopes is None:
            return None
        return cpu.norms_by_lag(cpu.KERNEL, w.W_hh, slopes, self.pulls, lags, lags)

    @torch.no_grad()
    def _by_hand(self, at: Moments, G: Tensor) -> Tensor:
        """The same by the cell's own derivative, from the gates that are there: no step is redone.

        The top layer first: its pull on its input is one more pull on the layer below.
        """
        below = [self.xs, *(hs for hs, *_ in self.parts(self.states[1:]))]
        before, after = self.parts(self.states[at]), self.parts(self.states[shifted(at, 1)])
        pulled, pulls, more = [], self.parts(G), None
        for i in reversed(range(len(self.layers))):
            w, gates = self.layers[i], self.gates[i]
            x, (dh, *rest) = below[i][at], pulls[i]
            dafter = (dh if more is None else dh + more, *rest)
            kept = None if gates is None else gates[at]
            more = torch.empty_like(x) if i else None
            args = (w, x, before[i], after[i], kept, dafter, None, more)
            pulled.append(torch.cat(self.cell.step_backward(*args), -1))
        return torch.cat(pulled[::-1], -1)


def _forward(piece: Piece) -> Trace:
    """In native code where it takes the piece, unless ELMAN_KERNELS says otherwise."""
    native: Kernel = cpu.KERNEL
    runs = allows(native.name) and native.refuses(piece) is None
    return (native if runs else reference.KERNEL).forward(piece)


def _is_exact(module: Module) -> bool:
    """Whether it can be read as it is, in float64 on the CPU and in eval mode."""
    exact = all(p.dtype == torch.float64 and p.is_cpu for p in module.parameters())
    return exact and not module.training


def exact_copy(model: LanguageModel) -> LanguageModel:
    """The model in float64 on the CPU, in eval mode, no generator of the original touched."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        copied = LanguageModel.from_config(model.config).double()
    weights = weights_of(model, copied.state_dict())
    copied.load_state_dict({name: p.cpu().double() for name, p in weights.items()})
    return copied.eval()
