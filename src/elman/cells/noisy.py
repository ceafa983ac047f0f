"""Zoneout and recurrent dropout: two kinds of noise in training that any described cell can have.

Zoneout (Krueger et al., 2017): each unit of each state stays what it was with probability p,

    s_t = s_{t-1} where m_t = 0, else s̃_t,        m_t ~ Bernoulli(1 - p) for each step, row and unit
    s_t = p s_{t-1} + (1 - p) s̃_t                  in evaluation: the expectation

where s̃_t is what the cell computes; h has masks of its own, all other states of a unit share one
(of an sLSTM they mean something only together).

Recurrent dropout (Semeniuta et al., 2016) drops what a step adds to its memory, never the memory
itself. Where a state is s̃_t = f ⊙ s_{t-1} + u_t,

    s_t = f ⊙ s_{t-1} + d_t ⊙ u_t,                 d_t = 0 with probability q, else 1/(1 - q)

u_t is i_t ⊙ g_t of an lstm, (1 - z_t) ⊙ n_t of a gru; all states of a unit share d_t. Of a cell
whose states keep nothing of themselves (tanh) h_t as a whole is dropped. Its expectation is the
cell without it.

A noisy cell is a description made of another: the same gates, states and parameters, with numbers
drawn for every step as further inputs. So it runs wherever described cells do.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from elman.cells.base import Cell
from elman.cells.described import Described
from elman.cells.expressions import ONE, ZERO, Expression, constant, given, make, replaced
from elman.cells.twins import TWINS
from elman.errors import UserError


@functools.lru_cache(maxsize=256)
def noisy(cell: Cell, zoneout: float = 0.0, updates: float = 0.0, drawn: bool = True) -> Described:
    """The cell with zoneout and recurrent dropout; not `drawn`: their expectation.

    >>> from elman.cells import CELLS
    >>> noisy(CELLS["lstm"], zoneout=0.1).noise
    (0.1, 0.1)
    """
    plain = TWINS.get(cell.name, cell)
    if not isinstance(plain, Described):
        raise UserError(
            f"zoneout and recurrent dropout need the equations of a cell, and {cell.name} has code",
            hint="declare it with @elman.cell",
        )
    after, noise = plain.equations.after, ()
    if updates and drawn:
        after, noise = _dropped(plain, given("n0")), (updates,)
    if zoneout:
        after = [
            _held(now, before, zoneout, given(f"n{len(noise) + min(i, 1)}") if drawn else None)
            for i, (now, before) in enumerate(zip(after, plain.before, strict=True))
        ]
        noise += (zoneout,) * min(plain.count, 2) if drawn else ()
    return plain.derived(named(cell.name, zoneout, updates, drawn), after, noise)


def named(cell: str, zoneout: float, updates: float, drawn: bool) -> str:
    """What a noisy cell is called."""
    parts = [("zoneout", zoneout), ("recurrent dropout", updates)]
    words = [f"{word} {p}" for word, p in parts if p]
    return f"{cell} with {' and '.join(words)}" + ("" if drawn else ", in expectation")


def _held(now: Expression, before: Expression, p: float, drawn: Expression | None) -> Expression:
    if drawn is None:
        return now + constant(p) * (before - now)
    return make("where", make("gt", drawn, ZERO), now, before)


def _dropped(cell: Described, drawn: Expression) -> list[Expression]:
    after = cell.equations.after
    parts = [_parts(now, before) for now, before in zip(after, cell.before, strict=True)]
    if all(kept == ZERO for kept, _ in parts):
        return [drawn * after[0], *after[1:]]
    less = {
        now: now + (drawn - ONE) * added
        for now, (kept, added) in zip(after, parts, strict=True)
        if kept != ZERO
    }
    return replaced(after, less)


def _parts(e: Expression, s: Expression) -> tuple[Expression, Expression]:
    """f and u of e = f s + u, where s is not looked for inside of functions."""
    known: dict[Expression, tuple[Expression, Expression]] = {}

    def of(e: Expression) -> tuple[Expression, Expression]:
        if e not in known:
            known[e] = (ONE, ZERO) if e is s else found(e.operation, e.of) or (ZERO, e)
        return known[e]

    def found(name: str, on: Sequence[Expression]) -> tuple[Expression, Expression] | None:
        if name in ("add", "sub"):
            (f, u), (g, v) = map(of, on)
            return (f + g, u + v) if name == "add" else (f - g, u - v)
        if name == "neg":
            f, u = of(on[0])
            return -f, -u
        if name == "mul" and of(on[0])[0] == ZERO:
            f, u = of(on[1])
            return on[0] * f, on[0] * u
        if name in ("mul", "div"):
            f, u = of(on[0])
            return make(name, f, on[1]), make(name, u, on[1])
        return None

    return of(e)
