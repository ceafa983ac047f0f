"""Pointwise expressions: what a described cell computes, as numbers that point at one another.

An expression is an operation on other expressions, on inputs and on constants. `OPERATIONS` is the
one table of what there is: how torch computes it, how C++ writes it, and its derivative, itself an
expression. So a cell's derivative is found by the chain rule, never asked of anybody:

    d e_k = Σ over the uses j of e_k  of  d e_j · ∂e_j/∂e_k
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Expression:
    """`operation` of `of`; an input has a `name` instead, a constant a `value`.

    There is only one of each (`the`), so two that are alike are one, however deep they are.
    """

    operation: str
    of: tuple[Expression, ...] = ()
    name: str = ""
    value: float = 0.0

    def __repr__(self) -> str:
        return f"<{self.operation} {self.name or (self.value if not self.of else len(self.of))}>"

    def __add__(self, other: Expression) -> Expression:
        return make("add", self, other)

    def __sub__(self, other: Expression) -> Expression:
        return make("sub", self, other)

    def __mul__(self, other: Expression) -> Expression:
        return make("mul", self, other)

    def __truediv__(self, other: Expression) -> Expression:
        return make("div", self, other)

    def __neg__(self) -> Expression:
        return make("neg", self)


_KNOWN: WeakValueDictionary[Any, Expression] = WeakValueDictionary()


def the(
    operation: str, of: tuple[Expression, ...] = (), name: str = "", value: float = 0.0
) -> Expression:
    """The one expression of this kind."""
    key = (operation, tuple(map(id, of)), name, repr(value))  # operands live as long as it does
    known = _KNOWN.get(key)
    if known is None:
        known = _KNOWN[key] = Expression(operation, of, name, value)
    return known


def given(name: str) -> Expression:
    """An input."""
    return the("input", name=name)


def constant(value: float) -> Expression:
    """A number that is always the same."""
    return the("constant", value=float(value))


ZERO, ONE = constant(0), constant(1)


@dataclass(frozen=True)
class Operation:
    """How torch computes it, how C++ writes it, and the pulls on what it is computed from."""

    torch: Callable[..., Tensor]
    cpp: str
    pulls: Callable[..., Sequence[Expression | None]] | None = None
    """(its result, its operands…, the pull on it) → the pull on each operand; None: never any."""


def _choose(condition: Expression, a: Expression, b: Expression) -> Expression:
    return make("where", condition, a, b)


OPERATIONS: dict[str, Operation] = {
    "add": Operation(torch.add, "({} + {})", lambda y, a, b, d: (d, d)),
    "sub": Operation(torch.sub, "({} - {})", lambda y, a, b, d: (d, -d)),
    "mul": Operation(torch.mul, "({} * {})", lambda y, a, b, d: (d * b, d * a)),
    "div": Operation(torch.div, "({} / {})", lambda y, a, b, d: (d / b, -(d * y) / b)),
    "neg": Operation(torch.neg, "(-{})", lambda y, a, d: (-d,)),
    "exp": Operation(torch.exp, "vexp({})", lambda y, a, d: (d * y,)),
    "log": Operation(torch.log, "vlog({})", lambda y, a, d: (d / a,)),
    "log1p": Operation(torch.log1p, "vlog1p({})", lambda y, a, d: (d / (ONE + a),)),
    "expm1": Operation(torch.expm1, "vexpm1({})", lambda y, a, d: (d * (y + ONE),)),
    "sqrt": Operation(torch.sqrt, "vsqrt({})", lambda y, a, d: (d / (y + y),)),
    "tanh": Operation(torch.tanh, "vtanh({})", lambda y, a, d: (d * (ONE - y * y),)),
    "sigmoid": Operation(torch.sigmoid, "vsigmoid({})", lambda y, a, d: (d * (y * (ONE - y)),)),
    "sin": Operation(torch.sin, "vsin({})", lambda y, a, d: (d * make("cos", a),)),
    "cos": Operation(torch.cos, "vcos({})", lambda y, a, d: (-(d * make("sin", a)),)),
    "erf": Operation(
        torch.erf,
        "verf({})",
        lambda y, a, d: (d * constant(2 / math.sqrt(math.pi)) * make("exp", -(a * a)),),
    ),
    "abs": Operation(
        torch.abs,
        "magnitude({})",
        lambda y, a, d: (_choose(make("gt", a, ZERO), d, _choose(make("lt", a, ZERO), -d, ZERO)),),
    ),
    # where two are alike each gets half, as in torch
    "maximum": Operation(
        torch.maximum,
        "vmax({}, {})",
        lambda y, a, b, d: (_greater(a, b, d), _greater(b, a, d)),
    ),
    "minimum": Operation(
        torch.minimum,
        "vmin({}, {})",
        lambda y, a, b, d: (_greater(b, a, d), _greater(a, b, d)),
    ),
    # on its bound a clamp lets the pull through, a hard tanh holds it back, as in torch
    "clamp_min": Operation(
        torch.maximum, "vmax({}, {})", lambda y, a, b, d: _one_of(make("ge", a, b), d)
    ),
    "clamp_max": Operation(
        torch.minimum, "vmin({}, {})", lambda y, a, b, d: _one_of(make("le", a, b), d)
    ),
    "hard_min": Operation(
        torch.maximum, "vmax({}, {})", lambda y, a, b, d: _one_of(make("gt", a, b), d)
    ),
    "hard_max": Operation(
        torch.minimum, "vmin({}, {})", lambda y, a, b, d: _one_of(make("lt", a, b), d)
    ),
    "pow": Operation(  # of numbers from 0 on
        torch.pow,
        "vexp({1} * vlog({0}))",
        lambda y, a, b, d: (d * b * make("pow", a, b - ONE), d * y * make("log", a)),
    ),
    "relu": Operation(
        torch.relu, "vmax({}, vec{{}})", lambda y, a, d: (_choose(make("gt", y, ZERO), d, ZERO),)
    ),
    "where": Operation(
        torch.where,
        "({} ? {} : {})",
        lambda y, c, a, b, d: (None, *_one_of(c, d)),
    ),
    "gt": Operation(torch.gt, "({} > {})"),
    "ge": Operation(torch.ge, "({} >= {})"),
    "lt": Operation(torch.lt, "({} < {})"),
    "le": Operation(torch.le, "({} <= {})"),
    "eq": Operation(torch.eq, "({} == {})"),
    "ne": Operation(torch.ne, "({} != {})"),
    "detach": Operation(torch.Tensor.detach, "{}", lambda y, a, d: (None,)),
}


def _one_of(first: Expression, d: Expression) -> tuple[Expression, Expression]:
    """The pull d for the first of two, or for the second."""
    return _choose(first, d, ZERO), _choose(first, ZERO, d)


def _greater(a: Expression, b: Expression, d: Expression) -> Expression:
    """What of the pull d belongs to a, the greater of a and b."""
    half = d * constant(0.5)
    return _choose(make("gt", a, b), d, _choose(make("eq", a, b), half, ZERO))


def make(operation: str, *of: Expression) -> Expression:
    """An operation, with what is known beforehand already done: 0 · a, 1 · a, a + 0, …"""
    if all(e.operation == "constant" for e in of) and operation not in ("detach", "where"):
        values = [torch.tensor(e.value, dtype=torch.float64, device="cpu") for e in of]
        return constant(float(OPERATIONS[operation].torch(*values)))
    simple = _SIMPLER.get(operation, _never)(*of)
    return the(operation, of) if simple is None else simple


def _never(*of: Expression) -> None:
    return None


def _sum(a: Expression, b: Expression) -> Expression | None:
    return b if a == ZERO else a if b == ZERO else None


def _difference(a: Expression, b: Expression) -> Expression | None:
    return a if b == ZERO else -b if a == ZERO else None


def _product(a: Expression, b: Expression) -> Expression | None:
    if ZERO in (a, b):
        return ZERO
    return b if a == ONE else a if b == ONE else None


def _quotient(a: Expression, b: Expression) -> Expression | None:
    return ZERO if a == ZERO else a if b == ONE else None


def _opposite(a: Expression) -> Expression | None:
    return a.of[0] if a.operation == "neg" else None


def _choice(condition: Expression, a: Expression, b: Expression) -> Expression | None:
    return a if a == b else None


_SIMPLER: dict[str, Callable[..., Expression | None]] = {
    "add": _sum,
    "sub": _difference,
    "mul": _product,
    "div": _quotient,
    "neg": _opposite,
    "where": _choice,
}


def ordered(ends: Sequence[Expression]) -> list[Expression]:
    """Everything the ends are computed from, each once, operands before what uses them."""
    order: dict[Expression, None] = {}
    for end in ends:
        waiting: list[tuple[Expression, Iterator[Expression]]] = [(end, iter(end.of))]
        while waiting:
            e, operands = waiting[-1]
            below = next((o for o in operands if o not in order), None)
            if below is not None:
                waiting.append((below, iter(below.of)))
            else:
                order.setdefault(e)
                waiting.pop()
    return list(order)


def replaced(ends: Sequence[Expression], by: dict[Expression, Expression]) -> list[Expression]:
    """The ends with some expressions in the place of others."""
    new: dict[Expression, Expression] = {}
    for e in ordered(ends):
        new[e] = by[e] if e in by else make(e.operation, *(new[o] for o in e.of)) if e.of else e
    return [new[end] for end in ends]


def hoisted(
    ends: Sequence[Expression], starts: Sequence[Expression], late: set[str]
) -> list[Expression]:
    """For each start the last expression that the ends use in its place, made of nothing `late`.

    Of y = tanh(a) that is 1 - y², if nothing else is made of a: what is best kept for the ends.
    """
    users: dict[Expression, list[Expression]] = {}
    waits: set[Expression] = set()
    for e in ordered(ends):
        for o in dict.fromkeys(e.of):
            users.setdefault(o, []).append(e)
        if e.name in late or any(o in waits for o in e.of):
            waits.add(e)
    final = set(ends)

    def last(e: Expression) -> Expression:
        above = users.get(e, [])
        while len(above) == 1 and e not in final and above[0] not in waits and _is_value(above[0]):
            e = above[0]
            above = users.get(e, [])
        return e

    return [last(start) for start in starts]


def _is_value(e: Expression) -> bool:
    """A number, not a comparison."""
    return not e.of or OPERATIONS[e.operation].pulls is not None


def pulls(
    ends: Sequence[Expression], on_ends: Sequence[Expression], starts: Sequence[Expression]
) -> list[Expression]:
    """Σ over ends of (∂end/∂start)ᵀ (pull on the end), for every start: the chain rule."""
    totals: dict[Expression, Expression] = {}
    for end, pull in zip(ends, on_ends, strict=True):
        totals[end] = totals.get(end, ZERO) + pull
    for e in reversed(ordered(ends)):
        back = OPERATIONS[e.operation].pulls if e.of else None
        pull = totals.get(e, ZERO)
        if back is None or pull == ZERO:
            continue
        for operand, share in zip(e.of, back(e, *e.of, pull), strict=True):
            if share is not None:
                totals[operand] = totals.get(operand, ZERO) + share
    return [totals.get(start, ZERO) for start in starts]


def evaluate(ends: Sequence[Expression], inputs: dict[str, Tensor]) -> list[Tensor]:
    """The ends, computed by torch from the inputs they name."""
    values: dict[Expression, Any] = {}
    like = next(iter(inputs.values()))
    for e in ordered(ends):
        if e.operation == "input":
            values[e] = inputs[e.name]
        elif e.operation == "constant":
            # no copy from Python: a CUDA graph may be watching
            values[e] = like.new_full((), e.value)
        else:
            values[e] = OPERATIONS[e.operation].torch(*(values[o] for o in e.of))
    return [values[end] for end in ends]


def cpp(
    ends: Sequence[Expression],
    targets: Sequence[str],
    named: Mapping[str, str],
    spelled: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Statements of C++ on vectors `vec` that put every end into its target.

    `spelled` has operations that are written in another way.
    """
    lines, words = [], {}
    for i, e in enumerate(ordered(ends)):
        if e.operation == "input":
            words[e] = named[e.name]
        elif e.operation == "constant":
            words[e] = f"splat(real({_literal(e.value)}))"
        else:
            words[e] = f"e{i}"
            written = spelled.get(e.operation, OPERATIONS[e.operation].cpp)
            text = written.format(*(words[o] for o in e.of))
            kind = "auto" if OPERATIONS[e.operation].pulls is None else "vec"
            lines.append(f"const {kind} e{i} = {text};")
    return [*lines, *(f"{t} = {words[e]};" for t, e in zip(targets, ends, strict=True))]


def _literal(value: float) -> str:
    if math.isnan(value):
        return '__builtin_nan("")'
    if math.isinf(value):
        return "__builtin_inf()" if value > 0 else "-__builtin_inf()"
    return value.hex()
