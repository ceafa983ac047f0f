"""A cell of your own in a few lines of torch, and a derivative that nobody has to write.

    @elman.cell(gates=2)
    def minimal_gated(a_x, a_h, h):
        f = torch.sigmoid(a_x[0] + a_h[0])
        n = torch.tanh(a_x[1] + f * a_h[1])
        return (1 - f) * h + f * n

`a_x` and `a_h` are the gates' shares of the input and of the state before, x_t W_ihᵀ + b_ih and
h_{t-1} W_hhᵀ + b_hh in blocks; then come the states, h first, then the cell's own parameters, one
number to a unit. The equations are pointwise. They are read once, when the cell is declared
(`tracing`), and become expressions (`expressions`), from which every kernel is made, and the
derivative by the chain rule.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn.functional import linear

from elman.cells.base import Cell, Gradients, Slopes, State, Weights, add_batch, pull_back, read
from elman.cells.expressions import Expression, cpp, evaluate, given, ordered, pulls
from elman.cells.tracing import trace
from elman.errors import UserError


class Equations(NamedTuple):
    """What a cell computes, and the pull on everything it computes it from."""

    after: list[Expression]
    da_x: list[Expression]
    da_h: list[Expression]
    dbefore: list[Expression]
    down: list[Expression]

    @property
    def back(self) -> list[Expression]:
        """Every pull, in this order."""
        return [*self.da_x, *self.da_h, *self.dbefore, *self.down]


@final
class Described(Cell):
    """A cell read off a function (see `cell`), when its equations are first asked for."""

    is_users = False
    """Whether it was declared by a user, who may declare it again."""
    spares_weights = True

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        gates: int = 1,
        states: int = 1,
        parameters: Mapping[str, float | None] | Sequence[str] = (),
        heads: int = 1,
        derivative: Callable[..., Any] | None = None,
    ) -> None:
        self.derivative = derivative
        self._after: list[Expression] | None = None
        self._noise: Tensor | None = None
        self.function, self.gates, self.count, self.heads = function, gates, states, heads
        self.name, self.__doc__ = name or function.__name__, function.__doc__
        named = parameters if isinstance(parameters, Mapping) else dict.fromkeys(parameters)
        self.parameters = dict(named)
        self.states = ("h",) if states == 1 else ("h", "c")
        self.a_x = [given(f"x{g}") for g in range(gates)]
        self.a_h = [given(f"h{g}") for g in range(gates)]
        self.before = [given(f"s{i}") for i in range(states)]
        self.own = [given(f"p{i}") for i in range(len(self.parameters))]

    @property
    def starts(self) -> list[Expression]:
        """All that the equations are computed from."""
        return [*self.a_x, *self.a_h, *self.before, *self.own]

    @functools.cached_property
    def equations(self) -> Equations:
        """Its equations as expressions, read off the function when first asked for."""
        names = [e.name for e in self.starts]
        own = [e.name for e in self.own]
        after = self._after
        if after is None:
            after = trace(self.function, self.name, self._arguments, names, own, self.count)
        back = self._by_hand() if self.derivative is not None and self._after is None else None
        back = back or self.chain_rule(after)
        parts = (self.gates, self.gates, self.count, len(self.own))
        ends = [0, *accumulate(parts)]
        return Equations(after, *(back[i:j] for i, j in itertools.pairwise(ends)))

    def chain_rule(self, after: list[Expression]) -> list[Expression]:
        """The pull on everything that `after` is computed from."""
        return pulls(after, [given(f"d{i}") for i in range(self.count)], self.starts)

    def _by_hand(self) -> list[Expression]:
        """The derivative that was given, read off its function as the equations are."""
        assert self.derivative is not None
        own, drawn = [e.name for e in self.own], [f"d{i}" for i in range(self.count)]
        names = [*(e.name for e in self.starts), *drawn]

        def arguments(t: dict[str, Tensor]) -> Sequence[Any]:
            return [*self._arguments(t), *(t[d] for d in drawn)]

        name, wanted = f"{self.name}'s derivative", len(self.starts)
        return trace(self.derivative, name, arguments, names, own, wanted, "pulls")

    def derived(
        self, name: str, after: list[Expression], noise: tuple[float, ...] = ()
    ) -> Described:
        """A cell of the same sizes with other equations, of the same inputs and of noise."""
        cell = Described(self.function, name, self.gates, self.count, self.parameters, self.heads)
        cell._after, cell.noise = after, noise
        return cell

    def given(self, noise: Tensor) -> Described:
        cell = copy.copy(self)
        cell._noise = noise
        return cell

    def _arguments(self, t: Mapping[str, Tensor]) -> Sequence[Any]:
        a_x, a_h = ([t[f"{side}{g}"] for g in range(self.gates)] for side in "xh")
        states = (t[f"s{i}"] for i in range(self.count))
        return [a_x, a_h, *states, *(t[f"p{i}"] for i in range(len(self.parameters)))]

    def state_sizes(self, hidden: int, projection: int = 0) -> tuple[int, ...]:
        """h, and all other states side by side."""
        return (hidden,) if self.count == 1 else (hidden, (self.count - 1) * hidden)

    def inputs(self, w: Weights, x: Tensor, state: State) -> dict[str, Tensor]:
        """What the expressions are computed from, by name."""
        a_x = read(w.W_ih, x, w.b_ih).chunk(self.gates, -1)
        a_h = linear(state[0], w.W_hh, w.b_hh).chunk(self.gates, -1)
        named = {f"x{g}": a for g, a in enumerate(a_x)} | {f"h{g}": a for g, a in enumerate(a_h)}
        named |= {f"s{i}": s for i, s in enumerate(self.split(state))}
        named |= {f"p{i}": p for i, p in enumerate([] if w.own is None else w.own)}
        drawn = () if self._noise is None else self._noise.chunk(len(self.noise), -1)
        return named | {f"n{i}": n for i, n in enumerate(drawn)}

    def split(self, state: State) -> list[Tensor]:
        """Every state by itself."""
        h, *rest = state
        return [h, *(s for c in rest for s in c.chunk(self.count - 1, -1))]

    def join(self, states: Sequence[Tensor]) -> State:
        """The states as they are carried: h, and the others side by side."""
        h, *rest = states
        return (h, torch.cat(rest, -1)) if rest else (h,)

    def step(self, w: Weights, x: Tensor, state: State) -> tuple[State, None]:
        inputs = self.inputs(w, x, state)
        if self._after is not None:
            return self.join(evaluate(self._after, inputs)), None
        after = self.function(*self._arguments(inputs))
        return self.join(after if isinstance(after, tuple | list) else [after]), None

    def step_backward(
        self,
        w: Weights,
        x: Tensor,
        state: State,
        after: State,
        gates: Tensor | None,
        dafter: State,
        dw: Gradients | None,
        dx: Tensor | None,
    ) -> State:
        """The chain rule's expressions, computed by torch."""
        inputs = self.inputs(w, x, state)
        inputs |= {f"d{i}": d for i, d in enumerate(self.split(dafter))}
        blank = torch.zeros_like(state[0])
        pulls = [
            blank + d for d in evaluate(self.equations.back, inputs)
        ]  # a constant is one number
        da_x, da_h = (torch.cat(pulls[i : i + self.gates], -1) for i in (0, self.gates))
        dbefore, down = pulls[2 * self.gates :][: self.count], pulls[2 * self.gates + self.count :]
        pull_back(w, x, state[0], da_x, da_h, dw, dx)
        if dw is not None and dw.own is not None:
            for row, d in zip(dw.own, down, strict=True):
                add_batch(row, d)
        return self.join([torch.addmm(dbefore[0], da_h, w.W_hh), *dbefore[1:]])

    def slopes(
        self, w: Weights, x: Tensor, state: State, after: State, gates: Tensor | None
    ) -> Slopes:
        """The pulls of one state after the step at a time: they are linear in it."""
        inputs, blank = self.inputs(w, x, state), torch.zeros_like(state[0])
        wanted, rows = [*self.equations.da_h, *self.equations.dbefore], []
        for i in range(self.count):
            pull = {f"d{j}": torch.full_like(blank, float(i == j)) for j in range(self.count)}
            rows.append(torch.stack([blank + d for d in evaluate(wanted, inputs | pull)], 1))
        a_h, before = torch.stack(rows, 1).split([self.gates, self.count], 2)
        return Slopes(a_h, before)

    @functools.cached_property
    def summed(self) -> list[bool]:
        """Of each gate, whether its shares of input and state are used as one sum, a_x + a_h."""

        def is_sum(a: Expression, b: Expression) -> bool:
            uses = [e for e in ordered(self.equations.after) if a in e.of or b in e.of]
            return bool(uses) and all(e in (a + b, b + a) for e in uses)

        return [is_sum(a, b) for a, b in zip(self.a_x, self.a_h, strict=True)]

    @functools.cached_property
    def apart(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(g for g, summed in enumerate(self.summed) if not summed)

    def __repr__(self) -> str:
        def some(n: int, what: str) -> str:
            return f"{n} {what}" + "s" * (n != 1)

        own = f", {some(len(self.parameters), 'parameter')}" if self.parameters else ""
        return f"<cell {self.name}: {some(self.gates, 'gate')}, {some(self.count, 'state')}{own}>"

    def digest(self) -> str:
        """The same for the same equations, whatever the function looks like."""
        names = {e.name: e.name for e in self.starts}
        ends = [str(i) for i in range(self.count)]
        lines = cpp(self.equations.after, ends, names)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def check_derivative(self) -> None:
        """Compare the derivative with the chain rule and with a difference quotient."""
        generator = torch.Generator().manual_seed(0)

        def draw(names: Sequence[str]) -> dict[str, Tensor]:
            return {
                n: torch.randn(64, generator=generator, dtype=torch.float64, device="cpu")
                for n in names
            }

        names = [e.name for e in self.starts]
        at, way, pull = draw(names), draw(names), draw([f"d{i}" for i in range(self.count)])
        gradients = evaluate(self.equations.back, at | pull)
        self._check_chain_rule(gradients, at | pull)
        slope = torch.stack([g * way[n] for n, g in zip(names, gradients, strict=True)]).sum(0)
        self._check_slope(slope, at, way, pull)

    def _check_chain_rule(self, gradients: Sequence[Tensor], at: dict[str, Tensor]) -> None:
        chain = evaluate(self.chain_rule(self.equations.after), at)
        for start, gradient, known in zip(self.starts, gradients, chain, strict=True):
            off = float(((gradient - known).abs() / (1 + known.abs())).nan_to_num().max())
            if off > 1e-8:
                raise UserError(
                    f"the derivative given for the cell {self.name} is wrong: its pull on "
                    f"{_spelled(start.name)} is off by {off:.1e}",
                    hint="it returns the pulls on each a_x, each a_h, each state, each parameter; "
                    "without one the chain rule finds it",
                )

    def _check_slope(
        self,
        slope: Tensor,
        at: dict[str, Tensor],
        way: dict[str, Tensor],
        pull: dict[str, Tensor],
        step: float = 1e-6,
    ) -> None:
        """Σ pull · after rises along `way` by `slope`, wherever both are numbers."""
        ahead, behind = (
            evaluate(self.equations.after, {n: at[n] + sign * step * way[n] for n in at})
            for sign in (1, -1)
        )
        risen = [d * (a - b) for d, a, b in zip(pull.values(), ahead, behind, strict=True)]
        quotient = torch.stack(risen).sum(0) / (2 * step)
        off = (slope - quotient).abs() / (1 + quotient.abs())
        off = off[torch.isfinite(off)]
        if not len(off):
            raise UserError(
                f"the cell {self.name} gave no finite number on {len(quotient)} ordinary ones"
            )
        if float(off.median()) > 1e-5:
            raise UserError(
                f"the derivative of the cell {self.name} disagrees with a difference quotient by "
                f"{float(off.median()):.1e}",
                hint="a defect of elman's table of operations: please report the cell",
            )


def _spelled(name: str) -> str:
    """An input as the function that declares the cell names it."""
    kind, number = name[0], name[1:]
    sides = {"x": f"a_x[{number}]", "h": f"a_h[{number}]"}
    return sides.get(kind) or f"{'state' if kind == 's' else 'parameter'} {number}"
