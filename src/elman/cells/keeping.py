"""What a step of a described cell leaves behind for its derivative.

The pull on a step's inputs is made of what is known forwards (early) and of the pulls on its states
(late), which come backwards. A kernel that does not want to compute the step again keeps early
expressions, as few as will do; the states before and after the step are there anyway.

First the derivative is gathered, so that each late expression meets one early one:

    (d · a) · b + d · c = d · (a · b + c)

Then what late expressions meet is kept as it is: the derivative's own factors, which rounding hurts
least. Where those are too many, a smallest cut between the gates and them is: the fewest early
expressions from which, with the states, all the others can be made again. Which side of a corner a
step was on (max, clamp) is found forwards alone: what is kept is rounded, and may lie on the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from elman.cells.described import Described
from elman.cells.expressions import (
    ONE,
    OPERATIONS,
    ZERO,
    Expression,
    given,
    make,
    ordered,
    replaced,
)


class Kept(NamedTuple):
    """A cell's step in two halves.

    Inputs are named as in `Described`, but that a gate whose shares are used as one sum is `a0`;
    `y0` is the state after the step, `k0` what was kept.
    """

    after: list[Expression]
    kept: list[Expression]
    """Made of gates, states, parameters and noise, beside `after`."""
    back: list[Expression]
    """`Equations.back`, made of `kept`, states before and after, parameters, noise and pulls."""


def keeping(cell: Described) -> Kept:
    """What the cell computes, what it keeps, and its derivative from that."""
    sums = {
        e: given(f"a{g}")
        for g in range(cell.gates)
        if g not in cell.apart
        for e in (cell.a_x[g] + cell.a_h[g], cell.a_h[g] + cell.a_x[g])
    }
    after, back = (replaced(part, sums) for part in (cell.equations.after, cell.equations.back))
    known = {e: given(f"y{i}") for i, e in enumerate(after) if e.of}
    late = {f"d{i}" for i in range(cell.count)}
    back = gathered(replaced(back, known), late)
    gates = {f"{side}{g}" for g in range(cell.gates) for side in "axh"}
    wanted = _met(back, late, gates)
    if len(wanted) > cell.gates + len(cell.apart) + 1:
        wanted = smallest_cut(wanted, gates)
    found = {e: given(f"k{i}") for i, e in enumerate(wanted)}
    forwards = {y: e for e, y in known.items()}
    return Kept(after, replaced(wanted, forwards), replaced(back, found))


def gathered(ends: Sequence[Expression], late: set[str]) -> list[Expression]:
    """The same ends, in which sums of products of late expressions are as short as can be."""
    order = ordered(ends)
    uses = Counter(o for e in order for o in e.of) + Counter(ends)
    forms: dict[Expression, Form] = {}
    for e in order:
        if e.name in late or any(o in forms for o in e.of):
            form = _form(e, forms)
            shared = uses[e] > 1 and len(form) > 1
            forms[e] = {_written(form): ONE} if shared else form
    return [_written(forms[e]) if e in forms else e for e in ends]


Form = dict[Expression, Expression]
"""A late expression as Σ (a late one) · (what early one it is multiplied by)."""


def _form(e: Expression, forms: dict[Expression, Form]) -> Form:
    """A late expression's form, from those of its operands."""
    parts = [forms.get(o) for o in e.of]
    match e.operation, parts:
        case "add" | "sub", [dict() as a, dict() as b]:
            more = b if e.operation == "add" else {d: -by for d, by in b.items()}
            return a | {d: a[d] + by if d in a else by for d, by in more.items()}
        case "neg", [dict() as a]:
            return {d: -by for d, by in a.items()}
        case "mul", [dict() as a, None]:
            return {d: by * e.of[1] for d, by in a.items()}
        case "mul", [None, dict() as b]:
            return {d: by * e.of[0] for d, by in b.items()}
        case "div", [dict() as a, None]:
            return {d: by / e.of[1] for d, by in a.items()}
        case "where", [None, a, b] if _is_linear(e, a, b) and not is_firm(e.of[0]):
            a, b = a or {}, b or {}
            return {
                d: make("where", e.of[0], a.get(d, ZERO), b.get(d, ZERO))
                for d in dict.fromkeys([*a, *b])
            }
        case _:
            of = [o if f is None else _written(f) for o, f in zip(e.of, parts, strict=True)]
            return {make(e.operation, *of) if of else e: ONE}


def _is_linear(choice: Expression, a: Form | None, b: Form | None) -> bool:
    """Whether both sides of a choice are sums of late expressions, or 0."""
    _, yes, no = choice.of
    return (a is not None or yes == ZERO) and (b is not None or no == ZERO)


def is_firm(e: Expression) -> bool:
    """Whether a comparison is the same after rounding: a state's (or parameter's) sign."""
    return bool(e.of) and any(
        zero == ZERO and other.name[:1] in ("s", "y", "p", "n")
        for zero, other in (e.of, e.of[::-1])
    )


def _written(form: Form) -> Expression:
    total = ZERO
    for d, by in form.items():
        total = total + d * by
    return total


def _met(ends: Sequence[Expression], late: set[str], gates: set[str]) -> list[Expression]:
    """The early numbers made of gates that late expressions (or the ends) are made of."""
    order, waits = ordered(ends), set[Expression]()
    for e in order:
        if e.name in late or any(o in waits for o in e.of):
            waits.add(e)
    needy = _made_of(order, gates)
    met = dict.fromkeys(e for e in ends if e not in waits)
    met |= dict.fromkeys(o for e in order if e in waits for o in e.of if o not in waits)
    return [e for e in _numbers(met) if e in needy]


def _numbers(of: Sequence[Expression] | dict[Expression, None]) -> list[Expression]:
    """These, a firm comparison being known by what it compares."""

    def below(e: Expression) -> Iterator[Expression]:
        if _is_comparison(e) and is_firm(e):
            for o in e.of:
                yield from below(o)
        else:
            yield e

    return list(dict.fromkeys(n for e in of for n in below(e)))


def _made_of(order: Sequence[Expression], names: set[str]) -> set[Expression]:
    """What is made of these inputs, or of a comparison that has to be made forwards."""
    made: set[Expression] = set()
    for e in order:
        if _begins(e, names) or any(o in made for o in e.of):
            made.add(e)
    return made


def _begins(e: Expression, names: set[str]) -> bool:
    return e.name in names or (_is_comparison(e) and not is_firm(e))


def _is_comparison(e: Expression) -> bool:
    return bool(e.of) and OPERATIONS[e.operation].pulls is None


def smallest_cut(ends: Sequence[Expression], starts: set[str]) -> list[Expression]:
    """The fewest numbers from which the ends can be made without the starts, as late as can be.

    By Menger's theorem as many as there are ways from start to end that share no number. Each way
    found is turned around; what can then still reach an end lies behind the cut.
    """
    order = ordered(ends)
    needy, final = _made_of(order, starts), set(ends)
    users: dict[Expression, list[Expression]] = {e: [] for e in needy}
    for e in order:
        for o in dict.fromkeys(e.of):
            if o in needy:
                users[o].append(e)
    flow = _Flow(users, {e for e in needy if _begins(e, starts)}, final)
    while flow.grow():
        pass
    behind = flow.reaching()
    return [e for e in order if e in needy and (e, OUT) in behind and (e, IN) not in behind]


IN, OUT = 0, 1
Gate = tuple[Expression, int]
"""One of the two sides of an expression: between them a number passes at most one way."""


class _Flow:
    """Ways from starts to ends, no two through the same number."""

    def __init__(
        self,
        users: dict[Expression, list[Expression]],
        starts: set[Expression],
        ends: set[Expression],
    ) -> None:
        self.room: dict[Gate, dict[Gate, int]] = {}
        plenty = len(users) + 1
        for e, above in users.items():
            self._join((e, IN), (e, OUT), plenty if _is_comparison(e) else 1)
            for user in above:
                self._join((e, OUT), (user, IN), plenty)
        self.starts = [(e, IN) for e in users if e in starts]
        self.ends = {(e, OUT) for e in users if e in ends}

    def _join(self, a: Gate, b: Gate, room: int) -> None:
        self.room.setdefault(a, {})[b] = room
        self.room.setdefault(b, {}).setdefault(a, 0)

    def grow(self) -> bool:
        """Find one more way and take it; False where there is none."""
        came: dict[Gate, Gate | None] = dict.fromkeys(self.starts)
        waiting = list(self.starts)
        while waiting:
            at = waiting.pop()
            if at in self.ends:
                self._take(at, came)
                return True
            for to, room in self.room[at].items():
                if room > 0 and to not in came:
                    came[to] = at
                    waiting.append(to)
        return False

    def _take(self, at: Gate, came: dict[Gate, Gate | None]) -> None:
        while (before := came[at]) is not None:
            self.room[before][at] -= 1
            self.room[at][before] += 1
            at = before

    def reaching(self) -> set[Gate]:
        """Everything from which an end can still be reached."""
        behind, waiting = set(self.ends), list(self.ends)
        while waiting:
            at = waiting.pop()
            for before in self.room[at]:
                if before not in behind and self.room[before][at] > 0:
                    behind.add(before)
                    waiting.append(before)
        return behind
