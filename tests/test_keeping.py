"""What a described cell keeps of a step: enough for its derivative, and little."""

import pytest
import torch

from elman.cells import CELLS
from elman.cells.described import Described
from elman.cells.expressions import ONE, ZERO, evaluate, given, make, ordered
from elman.cells.keeping import gathered, keeping, smallest_cut
from elman.cells.noisy import noisy
from elman.cells.twins import TWINS


def twice_apart(a_x, a_h, h, c, p):
    n = torch.clamp(a_x[1] * p + h, -0.5, 0.5) + torch.sin(a_h[1]) * a_x[0] + a_h[0]
    return torch.where(c > h, n, torch.relu(n) * c), torch.maximum(n, c) / (2 + p * p)


def swapped(a_x, a_h, h, c):
    return c, torch.tanh(a_x[0] + a_h[0]) + h


COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")
ODD = [
    Described(twice_apart, gates=2, states=2, parameters=("p",)),
    Described(swapped, gates=1, states=2),
    Described(lambda a_x, a_h, h: 0.5 * h, "deaf", gates=1),
    Described(lambda a_x, a_h, h: a_x[2] + h, "of one gate of three", gates=3),
]
NOISY = [
    noisy(CELLS["lstm"], zoneout=0.1, updates=0.2),
    noisy(CELLS["slstm"], zoneout=0.1),
    noisy(CELLS["gru"], updates=0.3),
]
SHIPPED = [c for c in CELLS.values() if isinstance(c, Described) and not c.is_users]


def drawn(cell):
    g = torch.Generator().manual_seed(0)

    def normal(names):
        return {n: torch.randn(400, generator=g, dtype=torch.float64) for n in names}

    at = normal([e.name for e in cell.starts])
    noise = {f"n{i}": (torch.rand(400, generator=g) < 0.5).double() for i in range(len(cell.noise))}
    return at | noise, normal([f"d{i}" for i in range(cell.count)])


@pytest.mark.parametrize("cell", [*SHIPPED, *TWINS.values(), *NOISY, *ODD], ids=lambda c: c.name)
def test_the_derivative_is_made_of_what_is_kept_and_of_the_states(cell):
    halves = keeping(cell)
    at, pull = drawn(cell)
    gates = {f"a{g}": at[f"x{g}"] + at[f"h{g}"] for g in range(cell.gates)}
    after, kept = (evaluate(ends, at | gates) for ends in (halves.after, halves.kept))
    known = {name: x for name, x in at.items() if name[0] in "spn"} | pull
    known |= {f"y{i}": x for i, x in enumerate(after)} | {f"k{i}": x for i, x in enumerate(kept)}
    found = evaluate(halves.back, known)  # no gate is known here
    for mine, exact in zip(found, evaluate(cell.equations.back, at | pull), strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cell", [*SHIPPED, *TWINS.values(), *NOISY, *ODD], ids=lambda c: c.name)
def test_only_signs_are_compared_with_rounded_numbers(cell):
    """On which side of a corner a step was is known forwards; rounded, it may be on the other."""
    compared = [e for e in ordered(keeping(cell).back) if e.operation in COMPARISONS]
    for a, b in (e.of for e in compared):
        assert ZERO in (a, b)
        assert (a if b == ZERO else b).name[:1] in ("s", "y", "p", "n")


@pytest.mark.parametrize(
    ("name", "kept"),
    [("tanh", 0), ("relu", 0), ("linear", 0), ("gru", 5), ("lstm", 4)],
)
def test_a_twin_keeps_as_much_as_the_built_in_cell(name, kept):
    assert len(keeping(TWINS[name]).kept) == kept


def test_products_with_one_pull_are_gathered():
    d, a, b, c = (given(name) for name in ("d", "a", "b", "c"))
    (found,) = gathered([(d * a) * b - (d / c) + d], {"d"})
    assert found.operation == "mul"
    assert found.of[0] is d
    assert "d" not in {e.name for e in ordered([found.of[1]])}


def test_a_sum_of_pulls_that_is_used_twice_is_made_once():
    d, e, a, b = (given(name) for name in ("d", "e", "a", "b"))
    both = d * a + e
    first, second = gathered([both * b, both * a], {"d", "e"})
    assert first.of[0] is second.of[0]


def test_the_smallest_cut_lies_as_late_as_can_be():
    a, b = given("a"), given("b")
    squashed, y = make("tanh", a), make("sigmoid", b)
    ends = [squashed * y, squashed + y, ONE - squashed]
    assert smallest_cut(ends, {"a", "b"}) == [squashed, y]
    assert smallest_cut(ends[2:], {"a", "b"}) == ends[2:]
    assert smallest_cut([y * given("s0")], {"a", "b"}) == [y * given("s0")]
    assert smallest_cut([given("s0")], {"a", "b"}) == []
