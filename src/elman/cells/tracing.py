"""From a function of torch tensors to expressions: it runs once, and every operation is noted.

The function is run on small tensors under a dispatch mode that sees each of torch's own operators
as it happens: whatever Python was written around them, what is noted is what was computed. What
cannot be an expression (a sum over units, a random number, a look at a value) is refused there, and
the message names the line.
"""

from __future__ import annotations

import linecache
import math
import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from elman.cells.expressions import ONE, OPERATIONS, ZERO, Expression, constant, given, make
from elman.errors import UserError

aten = torch.ops.aten
ROWS, UNITS = 3, 5
"""The shape of the tensors a cell is tried on."""
TWENTY, HUNDREDTH = constant(20), constant(0.01)  # torch's defaults


def _power(a: Expression, exponent: Expression) -> Expression:
    if exponent.operation != "constant":
        return make("exp", exponent * make("log", a))  # a > 0
    value = exponent.value
    if value.is_integer():
        whole = _whole_power(a, abs(int(value)))
        return ONE / whole if value < 0 else whole
    return make("sqrt", a) if value == 0.5 else make("pow", a, exponent)


def _whole_power(a: Expression, n: int) -> Expression:
    """a · a · … · a, n times, by squares."""
    result = ONE
    while n:
        if n % 2:
            result = result * a
        a, n = a * a, n // 2
    return result


NOTED: dict[Any, Callable[..., Expression]] = {
    aten.add: lambda a, b, alpha=ONE: a + b * alpha,
    aten.sub: lambda a, b, alpha=ONE: a - b * alpha,
    aten.rsub: lambda a, b, alpha=ONE: b - a * alpha,
    aten.mul: lambda a, b: a * b,
    aten.div: lambda a, b: a / b,
    aten.neg: lambda a: -a,
    aten.reciprocal: lambda a: ONE / a,
    aten.square: lambda a: a * a,
    aten.pow: _power,
    aten.rsqrt: lambda a: ONE / make("sqrt", a),
    aten.clamp_min: lambda a, low: make("clamp_min", a, low),
    aten.clamp_max: lambda a, high: make("clamp_max", a, high),
    aten.lerp: lambda a, b, w: a + w * (b - a),
    aten.addcmul: lambda a, b, c, value=ONE: a + value * b * c,
    aten.clone: lambda a: a,
    aten._to_copy: lambda a: a,
    aten.alias: lambda a: a,
    aten.positive: lambda a: a,
    aten.ones_like: lambda a: ONE,
    aten.zeros_like: lambda a: ZERO,
    aten.full_like: lambda a, value: value,
    aten.logical_not: lambda c: make("eq", c, ZERO),
    aten.masked_fill: lambda a, c, value: make("where", c, value, a),
}
"""Torch's operators as expressions; more come below, and by torch's own decompositions."""
for name in (
    *(
        "exp",
        "log",
        "log1p",
        "expm1",
        "sqrt",
        "tanh",
        "sigmoid",
        "sin",
        "cos",
        "erf",
        "abs",
        "relu",
    ),
    *("maximum", "minimum", "where", "gt", "ge", "lt", "le", "eq", "ne", "detach"),
):
    NOTED[getattr(aten, name)] = lambda *of, name=name: make(name, *of)


def _clamped(
    a: Expression, low: Expression | None = None, high: Expression | None = None
) -> Expression:
    a = a if low is None else make("clamp_min", a, low)
    return a if high is None else make("clamp_max", a, high)


def _hard_tanh(a: Expression, low: Expression = -ONE, high: Expression = ONE) -> Expression:
    return make("hard_max", make("hard_min", a, low), high)


def _if_positive(a: Expression, b: Expression, c: Expression) -> Expression:
    return make("where", make("gt", a, ZERO), b, c)


def _softplus(a: Expression, beta: Expression = ONE, threshold: Expression = TWENTY) -> Expression:
    scaled = a * beta
    soft = make("log1p", make("exp", make("clamp_max", scaled, threshold))) / beta
    return make("where", make("gt", scaled, threshold), a, soft)


def _logaddexp(a: Expression, b: Expression) -> Expression:
    return make("maximum", a, b) + make("log1p", make("exp", -make("abs", a - b)))


def _elu(
    a: Expression, alpha: Expression = ONE, scale: Expression = ONE, input_scale: Expression = ONE
) -> Expression:
    below = alpha * make("expm1", make("clamp_max", a, ZERO) * input_scale)
    return scale * _if_positive(a, a, below)


def _gelu(a: Expression, approximate: str = "none") -> Expression:
    if approximate == "tanh":
        inner = constant(math.sqrt(2 / math.pi)) * (a + constant(0.044715) * a * a * a)
        return constant(0.5) * a * (ONE + make("tanh", inner))
    return constant(0.5) * a * (ONE + make("erf", a * constant(math.sqrt(0.5))))


def _hard_sigmoid(a: Expression) -> Expression:
    return _hard_tanh(a / constant(6) + constant(0.5), ZERO, ONE)


NOTED |= {
    aten.clamp: _clamped,
    aten.hardtanh: _hard_tanh,
    aten.leaky_relu: lambda a, slope=HUNDREDTH: _if_positive(a, a, a * slope),
    aten.sign: lambda a: _if_positive(a, ONE, make("where", make("lt", a, ZERO), -ONE, ZERO)),
    aten.softplus: _softplus,
    aten.logaddexp: _logaddexp,
    aten.silu: lambda a: a * make("sigmoid", a),
    aten.mish: lambda a: a * make("tanh", _softplus(a)),
    aten.elu: _elu,
    aten.gelu: _gelu,
    aten.hardsigmoid: _hard_sigmoid,
    aten.hardswish: lambda a: a * _hard_sigmoid(a),
}


CONDITION_AT = {aten.where: 0, aten.masked_fill: 1}
"""Which operand chooses; everywhere else a comparison is a number, 1 or 0, as for torch."""


def _number(e: Any) -> Any:
    is_comparison = isinstance(e, Expression) and e.of and OPERATIONS[e.operation].pulls is None
    return make("where", e, ONE, ZERO) if is_comparison else e


class Notes(TorchDispatchMode):
    """Every operator that runs while this is entered, noted as an expression of its result."""

    def __init__(self, name: str, code: CodeType, inputs: dict[str, Tensor]) -> None:
        super().__init__()
        self.name, self.code = name, code
        self.kept = list(inputs.values())  # alive, so that an id stays the tensor's own
        self.noted = {id(t): given(name) for name, t in inputs.items()}
        self.log: list[tuple[Expression, str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet is aten.log_sigmoid_forward:  # returns something to keep beside its result
            with self:
                return -torch.nn.functional.softplus(-args[0]), args[0]
        if packet in NOTED:
            result = func(*args, **kwargs)
            if not isinstance(result, Tensor) or result.dim() > 2:
                raise self.refusal(f"{packet} returns no tensor of its operands' shape")
            self.check_kind(result, packet)
            operands, options = pytree.tree_map(self.expression, (tuple(args), kwargs))
            chooses = CONDITION_AT.get(packet)
            operands = [e if i == chooses else _number(e) for i, e in enumerate(operands)]
            return self.note(result, NOTED[packet](*operands, **_meant(options)))
        if packet is aten.scalar_tensor:  # a number, such as where() takes
            return func(*args, **kwargs)
        if packet is aten.lift_fresh:
            raise self.refusal("it makes a tensor of values, picks some, or assigns to some")
        with self:
            result = func.decompose(*args, **kwargs)  # in torch's smaller operators
        if result is not NotImplemented:
            return result
        raise self.refusal(f"{packet} is not a pointwise operation on the cell's own tensors")

    def check_kind(self, result: Tensor, packet: Any) -> None:
        """Numbers stay numbers; a kernel would not round them as another type does."""
        if result.dtype in (torch.float64, torch.float32):
            return
        if result.dtype != torch.bool or packet is aten._to_copy:
            raise self.refusal(f"{packet} makes {result.dtype} of its operands")

    def note(self, result: Tensor, e: Expression) -> Tensor:
        self.kept.append(result)
        self.log.append((e, self.where()))
        self.noted[id(result)] = e
        return result

    def expression(self, value: Any) -> Any:
        """What an operand is: a number is a constant, a tensor what was noted of it."""
        if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
            return value
        if not isinstance(value, Tensor):
            return constant(value)
        if id(value) in self.noted:
            return self.noted[id(value)]
        if value.requires_grad:
            raise self.refusal(
                f"a tensor of shape {tuple(value.shape)} that wants a gradient comes from outside, "
                "and would get none"
            )
        if value.numel() == 1:
            return constant(float(value))
        raise self.refusal(
            f"a tensor of shape {tuple(value.shape)} comes from outside; only numbers may"
        )

    def refusal(self, what: str) -> UserError:
        return UserError(
            f"the cell {self.name}{self.where()}: {what.replace('aten.', 'torch.')}",
            hint="a cell is pointwise: the same equation for every row and unit, of its gates, "
            "states and parameters, in torch's arithmetic",
        )

    def where(self) -> str:
        """The line of the cell that is running."""
        frame = sys._getframe()
        while frame is not None and frame.f_code is not self.code:
            frame = frame.f_back
        if frame is None:
            return ""
        line = linecache.getline(self.code.co_filename, frame.f_lineno).strip()
        return f", line {frame.f_lineno}" + (f" ({line[:70]})" if line else "")


def _meant(options: dict[str, Any]) -> dict[str, Any]:
    """Options without those about a tensor's device, type or layout."""
    kept = ("alpha", "value", "min", "max", "approximate")
    spelled = {"min": "low", "max": "high"}
    return {spelled.get(k, k): v for k, v in options.items() if k in kept and v is not None}


def trace(
    function: Callable[..., Any],
    name: str,
    arguments: Callable[[dict[str, Tensor]], Sequence[Any]],
    inputs: Sequence[str],
    rows: Sequence[str],
    states: int,
    what: str = "states",
) -> list[Expression]:
    """What the function returns, as expressions of the inputs, those in `rows` one to each unit.

    It is run twice on other numbers: what reads the clock, or takes another way for other values,
    is told by giving two answers.
    """
    once, again = (
        _run(function, name, arguments, inputs, rows, states, what, seed) for seed in (0, 1)
    )
    if once.after != again.after:
        logs = zip(once.log, again.log, strict=False)
        where = next((line for (a, line), (b, _) in logs if a is not b), "")
        raise UserError(
            f"the cell {name}{where} did not compute the same thing twice",
            hint="its equation may depend on its arguments alone: no clock, no counter, no if "
            "on values; torch.where chooses between them",
        )
    return once.after


class Run(NamedTuple):
    """What a function returned, and everything that was noted, with its line."""

    after: list[Expression]
    log: list[tuple[Expression, str]]


def _run(
    function: Callable[..., Any],
    name: str,
    arguments: Callable[[dict[str, Tensor]], Sequence[Any]],
    inputs: Sequence[str],
    rows: Sequence[str],
    states: int,
    what: str,
    seed: int,
) -> Run:
    generator = torch.Generator().manual_seed(seed)
    shapes = {i: (UNITS,) if i in rows else (ROWS, UNITS) for i in inputs}
    tensors = {
        i: torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu") + 0.5
        for i, shape in shapes.items()
    }
    notes = Notes(name, function.__code__, tensors)
    passed = arguments(tensors)
    with torch.no_grad(), notes:
        try:
            result = function(*passed)
        except IndexError as problem:
            raise UserError(
                f"the cell {name}: {problem}; a_x and a_h have an entry for each gate",
                hint="declare how many with @elman.cell(gates=…)",
            ) from problem
    after = _tensors(result, name, states, what)
    return Run([notes.expression(t) for t in after], notes.log)


def _tensors(result: Any, name: str, states: int, what: str) -> list[Tensor]:
    """What a cell returned, a tensor of rows and units for each of its states; else a refusal."""
    whole = isinstance(result, Tensor) or what == "states"
    after = list(result) if isinstance(result, tuple | list) else [result]
    after = after if whole else pytree.tree_leaves(result)
    if len(after) != states:
        expected = f"it was declared with states={states}" if what == "states" else f"not {states}"
        raise UserError(f"the cell {name} returned {len(after)} {what}; {expected}")
    for number, t in enumerate(after):
        shape = tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__
        if shape != (ROWS, UNITS):
            raise UserError(
                f"number {number} of the {what} that the cell {name} returned is {shape} where "
                f"{(ROWS, UNITS)} (batch, units) went in",
                hint="return them in the order in which they come in, each of its own shape",
            )
        if t.dtype == torch.bool:
            raise UserError(
                f"number {number} of the {what} that the cell {name} returned is true "
                "or false, not a number",
                hint="torch.where(condition, 1.0, 0.0)",
            )
    return after
