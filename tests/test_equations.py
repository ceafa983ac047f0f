"""The notes' equations against autograd, in float64, on problems whose gradients stay alive."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from elman.errors import UserError
from elman.gradients import equations as eq

INPUT, HIDDEN, OUTPUT, BATCH = 3, 4, 5, 2


class Problem(NamedTuple):
    """One sequence. W is orthogonal, so a gradient is still alive when it reaches h_0."""

    xs: Tensor
    ys: Tensor
    h0: Tensor
    linear: eq.LinearWeights
    book: eq.BookWeights


@st.composite
def problems(draw: st.DrawFn, min_steps: int = 1, max_steps: int = 9) -> Problem:
    steps = draw(st.integers(min_steps, max_steps))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    W_hh = torch.linalg.qr(normal(HIDDEN, HIDDEN)).Q
    U, V = normal(HIDDEN, INPUT) / 4, normal(OUTPUT, HIDDEN)
    return Problem(
        xs=normal(steps, INPUT),
        ys=torch.randint(OUTPUT, (steps,), generator=g),
        h0=normal(HIDDEN) / 4,
        linear=eq.LinearWeights(W_hx=U, W_hh=W_hh, W_qh=V),
        book=eq.BookWeights(U=U, W=W_hh, V=V, b=normal(HIDDEN) / 8, c=normal(OUTPUT)),
    )


def agree(got: Tensor, want: Tensor) -> None:
    """Relative error at most 1e-10, shapes equal, and something there to compare."""
    assert got.shape == want.shape
    assert want.norm() > 1e-6, "a vanished gradient proves nothing"
    assert (got - want).norm() <= 1e-10 * want.norm()


def jacobian(f: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    by_autograd = torch.autograd.functional.jacobian(f, at)
    assert isinstance(by_autograd, Tensor)
    return by_autograd


def leaves(w):
    return type(w)(*(v.clone().requires_grad_() for v in w))


def tanh_step(x: Tensor, h: Tensor, w: Tensor) -> Tensor:
    """The f of 8.7.1 with one weight matrix for the concatenation of x and h."""
    return torch.tanh(w @ torch.cat((x, h)))


def tanh_step_weights(p: Problem) -> Tensor:
    return torch.cat((p.linear.W_hx, p.linear.W_hh), 1)


def state_derivatives_by_autograd(p: Problem) -> Tensor:
    def run(w: Tensor) -> Tensor:
        return eq.states(tanh_step, p.xs, p.h0, w)[1:]

    return jacobian(run, tanh_step_weights(p))


# d2l 8.4


@given(problems())
def test_the_concatenated_product_is_the_sum_of_the_products(p: Problem):
    X, H = p.xs[:1].expand(BATCH, -1), p.h0.expand(BATCH, -1)
    W_xh, W_hh = p.linear.W_hx.T, p.linear.W_hh.T
    agree(eq.concatenated(X, H, W_xh, W_hh), X @ W_xh + H @ W_hh)


@given(problems())
def test_a_layer_that_reads_a_zero_state_is_the_layer_without_one(p: Problem):
    w = p.book
    X, H = p.xs, torch.zeros(len(p.xs), HIDDEN, dtype=torch.float64)
    plain = eq.without_hidden_state(X, w.U.T, w.b, w.V.T, w.c)
    reading = eq.with_hidden_state(X, H, w.U.T, w.W.T, w.b, w.V.T, w.c)
    by_torch = torch.nn.functional.linear(X, w.U, w.b).tanh()
    for layer in plain, reading:
        agree(layer.hidden, by_torch)
        agree(layer.output, torch.nn.functional.linear(by_torch, w.V, w.c))


@given(problems(min_steps=2))
def test_a_step_with_hidden_state_repeated_is_the_books_forward_pass(p: Problem):
    w, H = p.book, p.h0[None]
    hs, os = eq.tanh_states(w, p.xs, p.h0)
    for t, x in enumerate(p.xs):
        H, output = eq.with_hidden_state(x[None], H, w.U.T, w.W.T, w.b, w.V.T, w.c)
        agree(H[0], hs[t + 1])
        agree(output[0], os[t])


# d2l 8.7.1


@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=9))
def test_equation_4_is_the_recurrence(pairs: list[tuple[float, float]]):
    b, c = torch.tensor(pairs, dtype=torch.float64).T
    torch.testing.assert_close(eq.closed_form(b, c), eq.recurrence(b, c), rtol=1e-12, atol=1e-12)


@given(problems())
def test_equations_3_and_5_are_the_derivative_of_the_state(p: Problem):
    want = state_derivatives_by_autograd(p)
    w = tanh_step_weights(p)
    agree(eq.state_derivatives(tanh_step, p.xs, p.h0, w), want)
    agree(eq.state_derivatives_unrolled(tanh_step, p.xs, p.h0, w), want)


def test_numbers_vectors_and_matrices_all_serve_as_state_and_weight():
    def f(x: Tensor, h: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(w * h + x)

    xs = torch.linspace(-0.5, 0.5, 4, dtype=torch.float64)
    w, h0 = torch.tensor(0.9, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    want = jacobian(lambda w: eq.states(f, xs, h0, w)[1:], w)
    agree(eq.state_derivatives(f, xs, h0, w), want)
    vector = h0.expand(2, 3)
    got = eq.state_derivatives_unrolled(f, xs, vector, w)
    agree(got, want[:, None, None].expand_as(got))


@given(problems(min_steps=3), st.integers(1, 11))
def test_truncating_equation_5_is_a_detach_that_many_steps_before_each_state(
    p: Problem, terms: int
):
    w = tanh_step_weights(p)
    got = eq.state_derivatives_unrolled(tanh_step, p.xs, p.h0, w, terms)
    hs = eq.states(tanh_step, p.xs, p.h0, w)
    for t in range(1, len(p.xs) + 1):
        start = max(0, t - terms)

        def last_state(w: Tensor, start: int = start, t: int = t) -> Tensor:
            return eq.states(tanh_step, p.xs[start:t], hs[start], w)[-1]

        agree(got[t - 1], jacobian(last_state, w))


@given(problems())
def test_the_weight_gradients_of_8_7_1_average_the_loss(p: Problem):
    def g(h: Tensor, w: Tensor) -> Tensor:
        return torch.sin(w @ h)

    w_h, w_o = tanh_step_weights(p).requires_grad_(), p.linear.W_qh.clone().requires_grad_()
    os = torch.stack([g(h, w_o) for h in eq.states(tanh_step, p.xs, p.h0, w_h)[1:]])
    cross_entropy(os, p.ys, reduction="mean").backward()
    got = eq.weight_gradients(
        tanh_step, g, cross_entropy, p.xs, p.ys, p.h0, w_h.detach(), w_o.detach()
    )
    assert w_h.grad is not None
    assert w_o.grad is not None
    agree(got.w_h, w_h.grad)
    agree(got.w_o, w_o.grad)


@given(problems(min_steps=2, max_steps=5), st.floats(0.1, 1.0))
def test_the_mean_of_randomised_truncation_is_exactly_the_derivative(p: Problem, keep: float):
    """E[z_t] by listing every ξ with its probability: no sampling, no tolerance for noise."""
    b, c = eq.step_derivatives(tanh_step, p.xs, p.h0, tanh_step_weights(p))
    pi = torch.tensor([1.0, *[keep * 0.9**t for t in range(len(b) - 1)]], dtype=torch.float64)
    mean = eq.Randomised(torch.zeros_like(b), torch.zeros_like(b))
    for kept in itertools.product([False, True], repeat=len(b)):
        mask = torch.tensor(kept)
        probability = torch.where(mask, pi, 1 - pi).prod()
        z = eq.randomised_truncation(b, c, mask / pi)
        mean = eq.Randomised(*(m + probability * one for m, one in zip(mean, z, strict=True)))
    want = state_derivatives_by_autograd(p)
    agree(mean.once, want)
    agree(mean.throughout, want)


@given(problems(min_steps=3))
def test_a_zero_ends_the_recursion_there(p: Problem):
    b, c = eq.step_derivatives(tanh_step, p.xs, p.h0, tanh_step_weights(p))
    xi = torch.ones(len(b), dtype=torch.float64)
    xi[1] = 0
    z = eq.randomised_truncation(b, c, xi)
    agree(z.throughout[1], b[1])
    agree(z.throughout[2], eq.recurrence(b[1:], c[1:])[1])
    agree(z.once[2], eq.recurrence(b, c)[2])


# d2l 8.7.2


def linear_oracle(p: Problem) -> eq.LinearGradients:
    """Autograd through the bare linear loop, the loss averaged over time."""
    w = leaves(p.linear)
    h, hs, os = p.h0, [], []
    for x in p.xs:
        h = w.W_hx @ x + w.W_hh @ h
        hs.append(h)
        os.append(w.W_qh @ h)
    loss = torch.stack([cross_entropy(o, y) for o, y in zip(os, p.ys, strict=True)]).mean()
    grads = torch.autograd.grad(loss, [*w, *hs, *os])
    dhs, dos = grads[3 : 3 + len(hs)], grads[3 + len(hs) :]
    return eq.LinearGradients(torch.stack(dos), torch.stack(dhs), *grads[:3])


@given(problems())
def test_the_gradients_of_8_7_2_equal_autograd(p: Problem):
    got = eq.linear_gradients(p.linear, p.xs, p.ys, p.h0, cross_entropy)
    for one, want in zip(got, linear_oracle(p), strict=True):
        agree(one, want)


@given(problems())
def test_equation_9_is_equations_7_and_8_without_the_recursion(p: Problem):
    want = linear_oracle(p)
    agree(eq.state_gradients_by_powers(p.linear, want.o), want.h)
    agree(eq.last_state_gradient(p.linear, want.o), want.h[-1])
    for t in range(len(p.xs) - 1):
        agree(eq.earlier_state_gradient(p.linear, want.h[t + 1], want.o[t]), want.h[t])


# The Deep Learning book, chapter 10


def book_oracle(p: Problem, steps: list[int] | None = None) -> eq.BookGradients:
    """Autograd through the bare tanh loop, the loss summed over time (or over some steps)."""
    w = leaves(p.book)
    h, hs, os = p.h0, [], []
    for x in p.xs:
        h = torch.tanh(w.b + w.W @ h + w.U @ x)
        hs.append(h)
        os.append(w.c + w.V @ h)
    chosen = range(len(os)) if steps is None else [t - 1 for t in steps]
    loss = torch.stack([cross_entropy(os[t], p.ys[t]) for t in chosen]).sum()
    nodes = dict(zip("UWVbc", w, strict=True))
    grads = torch.autograd.grad(
        loss, [*nodes.values(), *hs, *os], allow_unused=True, materialize_grads=True
    )
    dhs, dos = grads[5 : 5 + len(hs)], grads[5 + len(hs) :]
    return eq.BookGradients(
        o=torch.stack(dos), h=torch.stack(dhs), **dict(zip(nodes, grads[:5], strict=True))
    )


@given(problems())
def test_the_books_gradients_equal_autograd(p: Problem):
    got = eq.tanh_gradients(p.book, p.xs, p.ys, p.h0)
    for one, want in zip(got, book_oracle(p), strict=True):
        agree(one, want)


@given(problems())
def test_the_books_loss_is_summed(p: Problem):
    _, os = eq.tanh_states(p.book, p.xs, p.h0)
    want = cross_entropy(os, p.ys, reduction="sum")
    agree(eq.tanh_loss(p.book, p.xs, p.ys, p.h0), want)


@given(problems())
def test_the_jacobian_of_tanh_is_diagonal(p: Problem):
    a = p.h0
    want = jacobian(torch.tanh, a)
    agree(eq.tanh_jacobian(torch.tanh(a)), want)


# The last note


@given(problems(min_steps=3))
def test_the_three_terms_of_the_last_note_add_up_to_the_third_loss(p: Problem):
    want = book_oracle(p, steps=[3])
    terms = eq.third_loss_terms(p.book, p.xs, p.ys, p.h0)
    agree(terms.W.sum(0), want.W)
    agree(terms.U.sum(0), want.U)


@given(problems(min_steps=3), st.data())
def test_each_term_is_what_the_copy_of_the_weights_at_that_step_receives(p: Problem, data):
    """∇ with respect to W^(k), the copy of W that only step k reads: the book's own device."""
    t = data.draw(st.integers(1, len(p.xs)))
    copies = [leaves(p.book) for _ in range(t)]
    h = p.h0
    for w, x in zip(copies, p.xs[:t], strict=True):
        h = torch.tanh(w.b + w.W @ h + w.U @ x)
    loss = cross_entropy(p.book.c + p.book.V @ h, p.ys[t - 1])
    dW = torch.stack(torch.autograd.grad(loss, [w.W for w in copies], retain_graph=True))
    dU = torch.stack(torch.autograd.grad(loss, [w.U for w in copies]))
    terms = eq.loss_terms(p.book, p.xs, p.ys, p.h0, t)
    agree(terms.W, dW)
    agree(terms.U, dU)
    if t == 3:
        agree(eq.third_loss_terms(p.book, p.xs, p.ys, p.h0).W.flip(0), dW)


@given(problems())
def test_the_double_sum_is_the_whole_gradient(p: Problem):
    want = book_oracle(p)
    got = eq.double_sum(p.book, p.xs, p.ys, p.h0)
    agree(got.W, want.W)
    agree(got.U, want.U)


@given(problems(min_steps=2, max_steps=2))
def test_what_is_not_there_is_refused(p: Problem):
    with pytest.raises(UserError, match="2 steps have no third loss"):
        eq.third_loss_terms(p.book, p.xs, p.ys, p.h0)
    with pytest.raises(UserError, match="t=0 is not a step of 2"):
        eq.loss_terms(p.book, p.xs, p.ys, p.h0, 0)
    with pytest.raises(UserError, match="terms=0"):
        eq.closed_form(p.xs[:, 0], p.xs[:, 1], terms=0)
