"""The equations of the study notes, each one a function you can run and differentiate against.

In reading order:

- d2l 8.4: the layer without and with a hidden state, and the concatenation identity;
- d2l 8.7.1: equations (3), (4) and (5), the truncated sum and the randomised one;
- d2l 8.7.2: the linear network, equations (6) to (9), the loss *averaged* over time;
- the Deep Learning book, chapter 10: the tanh network with a softmax, the loss *summed* over time;
- the last note: one loss's gradient written as a sum over the steps it passes through.

Everything is for one sequence, as in the notes: `xs` is (T, input), one vector per step, and
`hs` is h_0 … h_T, so `hs[t]` is the state that step t + 1 reads. These functions are for reading
and for checking; `elman.nn` is for training. Where the notes slip, the corrected form is here and
the docstring says what was corrected.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad, jacrev

from elman.errors import UserError
from elman.options import whole_number

Step = Callable[[Tensor, Tensor, Tensor], Tensor]
"""f(x_t, h_{t-1}, w_h) = h_t."""

Readout = Callable[[Tensor, Tensor], Tensor]
"""g(h_t, w_o) = o_t."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""l(o_t, y_t), a number."""


# ---------------------------------------------------------------------------- d2l 8.4


class Weights(NamedTuple):
    """A hidden layer and the output computed from it."""

    hidden: Tensor
    output: Tensor


def without_hidden_state(
    X: Tensor,
    W_xh: Tensor,
    b_h: Tensor,
    W_hq: Tensor,
    b_q: Tensor,
    phi: Callable[[Tensor], Tensor] = torch.tanh,
) -> Weights:
    """The multilayer perceptron of d2l 8.4.1: no step knows another.

    H = φ(X W_xh + b_h)
    O = H W_hq + b_q

    X is (batch, input): rows in, columns out.
    """
    H = phi(X @ W_xh + b_h)
    return Weights(H, H @ W_hq + b_q)


def with_hidden_state(
    X: Tensor,
    H_prev: Tensor,
    W_xh: Tensor,
    W_hh: Tensor,
    b_h: Tensor,
    W_hq: Tensor,
    b_q: Tensor,
    phi: Callable[[Tensor], Tensor] = torch.tanh,
) -> Weights:
    """One step of the recurrent layer, d2l 8.4.2, equation (1).

    H_t = φ(X_t W_xh + H_{t-1} W_hh + b_h)
    O_t = H_t W_hq + b_q
    """
    H = phi(X @ W_xh + H_prev @ W_hh + b_h)
    return Weights(H, H @ W_hq + b_q)


def concatenated(X: Tensor, H: Tensor, W_xh: Tensor, W_hh: Tensor) -> Tensor:
    """The recurrent layer as one dense layer, d2l 8.4.2.

    X W_xh + H W_hh = [X, H] [W_xh; W_hh]

    >>> X, W_xh = torch.ones(3, 1), torch.full((1, 4), 2.0)
    >>> H, W_hh = torch.ones(3, 4), torch.full((4, 4), 0.5)
    >>> torch.equal(X @ W_xh + H @ W_hh, concatenated(X, H, W_xh, W_hh))
    True
    """
    return torch.cat((X, H), 1) @ torch.cat((W_xh, W_hh), 0)


# ---------------------------------------------------------------------------- d2l 8.7.1


class StepDerivatives(NamedTuple):
    """What one step contributes, for t = 1 … T, everything else held still.

    The notes do not distinguish numbers, vectors and matrices, and neither do these: for a state
    of shape *h and weights of shape *w, `b` is (T, *h, *w) and `c` is (T, *h, *h).
    """

    b: Tensor  # ∂f(x_t, h_{t-1}, w_h) / ∂w_h
    c: Tensor  # ∂f(x_t, h_{t-1}, w_h) / ∂h_{t-1}


class WeightGradients(NamedTuple):
    """∂L/∂w_h and ∂L/∂w_o of d2l 8.7.1."""

    w_h: Tensor
    w_o: Tensor


class Randomised(NamedTuple):
    """The random z_t of d2l 8.7.1.2, for t = 1 … T; see `randomised_truncation`."""

    once: Tensor
    throughout: Tensor


def states(f: Step, xs: Tensor, h0: Tensor, w_h: Tensor) -> Tensor:
    """h_0 … h_T of d2l 8.7.1, equation (2): h_t = f(x_t, h_{t-1}, w_h)."""
    hs = [h0]
    for x in xs:
        hs.append(f(x, hs[-1], w_h))
    return torch.stack(hs)


def step_derivatives(f: Step, xs: Tensor, h0: Tensor, w_h: Tensor) -> StepDerivatives:
    """b_t and c_t, the substitution between equations (4) and (5) of d2l 8.7.1."""
    hs = states(f, xs, h0, w_h)
    pairs = list(zip(xs, hs[:-1], strict=True))
    b = torch.stack([jacrev(f, argnums=2)(x, h, w_h) for x, h in pairs])
    c = torch.stack([jacrev(f, argnums=1)(x, h, w_h) for x, h in pairs])
    return StepDerivatives(b, c)


def recurrence(b: Tensor, c: Tensor) -> Tensor:
    """a_1 … a_T of the recurrence in d2l 8.7.1.

    a_0 = 0,   a_t = b_t + c_t a_{t-1}

    >>> recurrence(torch.tensor([1.0, 1.0, 1.0]), torch.tensor([9.0, 2.0, 3.0]))
    tensor([ 1., 3., 10.])
    """
    a = [b[0]]
    for t in range(1, len(b)):
        a.append(b[t] + _times(c[t], a[-1]))
    return torch.stack(a)


def closed_form(b: Tensor, c: Tensor, terms: int | None = None) -> Tensor:
    """The same a_1 … a_T without the recursion, d2l 8.7.1, equation (4).

    a_t = b_t + Σ_{i=1}^{t-1} (∏_{j=i+1}^{t} c_j) b_i

    Where c_j is a Jacobian the product is ordered, the latest step leftmost. `terms=τ` keeps only
    the τ newest terms of each sum, which is the regular truncation of d2l 8.7.1.1.
    """
    if terms is not None:
        terms = whole_number("terms", terms, at_least=1, hint="None keeps every term")
    return torch.stack([_sum_of_products(b, c, t, terms or len(b)) for t in range(len(b))])


def _sum_of_products(b: Tensor, c: Tensor, t: int, terms: int) -> Tensor:
    a, product = b[t], c[t]
    for i in range(t - 1, max(-1, t - terms), -1):
        a = a + _times(product, b[i])
        product = _times(product, c[i])
    return a


def _times(c: Tensor, a: Tensor) -> Tensor:
    """c a: a product of numbers, or of a Jacobian with whatever it is applied to."""
    return torch.tensordot(c, a, dims=c.ndim // 2)


def state_derivatives(f: Step, xs: Tensor, h0: Tensor, w_h: Tensor) -> Tensor:
    """∂h_t/∂w_h for t = 1 … T, step by step: d2l 8.7.1, equation (3).

    ∂h_t/∂w_h = ∂f(x_t, h_{t-1}, w_h)/∂w_h + ∂f(x_t, h_{t-1}, w_h)/∂h_{t-1} ∂h_{t-1}/∂w_h

    Shape (T, *h, *w). Run forwards, this is `elman.gradients.forward_accumulation`.
    """
    return recurrence(*step_derivatives(f, xs, h0, w_h))


def state_derivatives_unrolled(
    f: Step, xs: Tensor, h0: Tensor, w_h: Tensor, terms: int | None = None
) -> Tensor:
    """∂h_t/∂w_h for t = 1 … T with the recursion removed: d2l 8.7.1, equation (5).

    ∂h_t/∂w_h = ∂f_t/∂w_h + Σ_{i=1}^{t-1} (∏_{j=i+1}^{t} ∂f_j/∂h_{j-1}) ∂f_i/∂w_h

    writing f_j for f(x_j, h_{j-1}, w_h). With `terms=τ`, the truncated sum of d2l 8.7.1.1.
    """
    return closed_form(*step_derivatives(f, xs, h0, w_h), terms)


def weight_gradients(
    f: Step, g: Readout, loss: Loss, xs: Tensor, ys: Tensor, h0: Tensor, w_h: Tensor, w_o: Tensor
) -> WeightGradients:
    """∂L/∂w_h and ∂L/∂w_o of d2l 8.7.1, the loss averaged over time.

    L        = 1/T Σ_t l(o_t, y_t)
    ∂L/∂w_h  = 1/T Σ_t ∂l(o_t, y_t)/∂o_t ∂g(h_t, w_o)/∂h_t ∂h_t/∂w_h
    ∂L/∂w_o  = 1/T Σ_t ∂l(o_t, y_t)/∂o_t ∂g(h_t, w_o)/∂w_o

    The last factor of ∂L/∂w_h is equation (3). (The notes write l(y_t, o_t) here and l(o_t, y_t)
    in 8.7.2; the second order is used throughout.)
    """
    hs = states(f, xs, h0, w_h)[1:]
    dw_h, dw_o = torch.zeros_like(w_h), torch.zeros_like(w_o)
    for h, y, dh_dw in zip(hs, ys, state_derivatives(f, xs, h0, w_h), strict=True):
        dl_do = grad(loss)(g(h, w_o), y)
        dl_dh = torch.tensordot(dl_do, jacrev(g, argnums=0)(h, w_o), dims=dl_do.ndim)
        dw_h += torch.tensordot(dl_dh, dh_dw, dims=h.ndim)
        dw_o += torch.tensordot(dl_do, jacrev(g, argnums=1)(h, w_o), dims=dl_do.ndim)
    return WeightGradients(dw_h / len(xs), dw_o / len(xs))


def randomised_truncation(b: Tensor, c: Tensor, xi: Tensor) -> Randomised:
    """z_1 … z_T of d2l 8.7.1.2, random estimates of ∂h_t/∂w_h that are right on average.

    z_t = ∂f(x_t, h_{t-1}, w_h)/∂w_h + ξ_t ∂f(x_t, h_{t-1}, w_h)/∂h_{t-1} ∂h_{t-1}/∂w_h

    with P(ξ_t = 0) = 1 - π_t and P(ξ_t = 1/π_t) = π_t, so E[ξ_t] = 1 and E[z_t] = ∂h_t/∂w_h.
    (One note writes f(x_t, h_{t-2}, w_h) in the second derivative; the state is h_{t-1}.)

    `once` is that formula to the letter: only the newest link is random. `throughout` puts z_{t-1}
    in the place of ∂h_{t-1}/∂w_h, so that the recursion really ends where ξ_t = 0: a sum over
    pasts of different lengths, the long ones rare and weighted up. ξ_t is independent of z_{t-1},
    so the mean is the same. The carry `Randomized` computes this (Tallec and Ollivier, 2017).
    """
    links = xi.reshape(-1, *[1] * (c.ndim - 1)) * c
    a = recurrence(b, c)
    once = torch.stack([b[0], *(b[t] + _times(links[t], a[t - 1]) for t in range(1, len(b)))])
    return Randomised(once=once, throughout=recurrence(b, links))


# ---------------------------------------------------------------------------- d2l 8.7.2


class States(NamedTuple):
    """The forward pass: h_0 … h_T and o_1 … o_T."""

    hs: Tensor  # (T + 1, hidden)
    os: Tensor  # (T, output)


class LinearWeights(NamedTuple):
    """The weights of d2l 8.7.2: no biases, identity activation."""

    W_hx: Tensor  # (hidden, input)
    W_hh: Tensor  # (hidden, hidden)
    W_qh: Tensor  # (output, hidden)


class LinearGradients(NamedTuple):
    """∂L/∂· for everything in d2l 8.7.2, L averaged over time; `o` and `h` run over t = 1 … T."""

    o: Tensor  # (T, output)
    h: Tensor  # (T, hidden)
    W_hx: Tensor
    W_hh: Tensor
    W_qh: Tensor


def linear_states(w: LinearWeights, xs: Tensor, h0: Tensor) -> States:
    """The forward pass of d2l 8.7.2.

    h_t = W_hx x_t + W_hh h_{t-1}
    o_t = W_qh h_t
    """
    hs = [h0]
    for x in xs:
        hs.append(w.W_hx @ x + w.W_hh @ hs[-1])
    return States(torch.stack(hs), torch.stack([w.W_qh @ h for h in hs[1:]]))


def output_gradients(loss: Loss, os: Tensor, ys: Tensor) -> Tensor:
    """d2l 8.7.2, equation (6): ∂L/∂o_t = ∂l(o_t, y_t) / (T · ∂o_t). Loss averaged over time."""
    return torch.stack([grad(loss)(o, y) for o, y in zip(os, ys, strict=True)]) / len(os)


def last_state_gradient(w: LinearWeights, do: Tensor) -> Tensor:
    """d2l 8.7.2, equation (7): ∂L/∂h_T = W_qhᵀ ∂L/∂o_T, h_T touching the loss only through o_T."""
    return w.W_qh.T @ do[-1]


def earlier_state_gradient(w: LinearWeights, dh_next: Tensor, do: Tensor) -> Tensor:
    """d2l 8.7.2, equation (8), for t < T: ∂L/∂h_t = W_hhᵀ ∂L/∂h_{t+1} + W_qhᵀ ∂L/∂o_t."""
    return w.W_hh.T @ dh_next + w.W_qh.T @ do


def state_gradients(w: LinearWeights, do: Tensor) -> Tensor:
    """∂L/∂h_1 … ∂L/∂h_T from ∂L/∂o_1 … ∂L/∂o_T: equation (7), then (8) back to t = 1."""
    dh = [last_state_gradient(w, do)]
    for do_t in do[:-1].flip(0):
        dh.append(earlier_state_gradient(w, dh[-1], do_t))
    return torch.stack(dh[::-1])


def state_gradients_by_powers(w: LinearWeights, do: Tensor) -> Tensor:
    """The same with the recursion removed: d2l 8.7.2, equation (9).

    ∂L/∂h_t = Σ_{i=t}^{T} (W_hhᵀ)^{T-i} W_qhᵀ ∂L/∂o_{T+t-i}

    The powers are why gradients vanish or explode: an eigenvalue λ of W_hh enters as λ^{T-i}.
    """
    T = len(do)
    power = [torch.linalg.matrix_power(w.W_hh.T, n) for n in range(T)]
    direct = do @ w.W_qh  # row t - 1 is (W_qhᵀ ∂L/∂o_t)ᵀ
    return torch.stack(
        [
            torch.stack([power[T - i] @ direct[T + t - i - 1] for i in range(t, T + 1)]).sum(0)
            for t in range(1, T + 1)
        ]
    )


def linear_gradients(
    w: LinearWeights, xs: Tensor, ys: Tensor, h0: Tensor, loss: Loss
) -> LinearGradients:
    """Every gradient of d2l 8.7.2, the loss averaged over time: L = 1/T Σ_t l(o_t, y_t).

    ∂L/∂W_qh = Σ_t ∂L/∂o_t h_tᵀ          (output × hidden)
    ∂L/∂W_hx = Σ_t ∂L/∂h_t x_tᵀ          (hidden × input)
    ∂L/∂W_hh = Σ_t ∂L/∂h_t h_{t-1}ᵀ      (hidden × hidden; one note writes hidden × input)
    """
    hs, os = linear_states(w, xs, h0)
    do = output_gradients(loss, os, ys)
    dh = state_gradients(w, do)
    # Rows are time steps, so do.T @ hs[1:] is Σ_t ∂L/∂o_t h_tᵀ, and so on.
    return LinearGradients(o=do, h=dh, W_hx=dh.T @ xs, W_hh=dh.T @ hs[:-1], W_qh=do.T @ hs[1:])


# ---------------------------------------------------------------------------- the book, chapter 10


class BookWeights(NamedTuple):
    """The parameters of the Deep Learning book's chapter 10."""

    U: Tensor  # (hidden, input)
    W: Tensor  # (hidden, hidden)
    V: Tensor  # (output, hidden)
    b: Tensor  # (hidden,)
    c: Tensor  # (output,)


class BookGradients(NamedTuple):
    """∇L for every node of the book's graph, L summed over time; `o` and `h` run over t = 1 … τ."""

    o: Tensor  # (τ, output)
    h: Tensor  # (τ, hidden)
    c: Tensor
    b: Tensor
    V: Tensor
    W: Tensor
    U: Tensor


class RecurrentGradients(NamedTuple):
    """∂/∂W and ∂/∂U. `third_loss_terms` and `loss_terms` stack one term per step in front."""

    W: Tensor
    U: Tensor


def tanh_states(w: BookWeights, xs: Tensor, h0: Tensor) -> States:
    """The forward pass of the Deep Learning book, equations (10.8) to (10.10).

    a^(t) = b + W h^(t-1) + U x^(t)
    h^(t) = tanh(a^(t))
    o^(t) = c + V h^(t)
    """
    hs = [h0]
    for x in xs:
        hs.append(torch.tanh(w.b + w.W @ hs[-1] + w.U @ x))
    return States(torch.stack(hs), torch.stack([w.c + w.V @ h for h in hs[1:]]))


def tanh_loss(w: BookWeights, xs: Tensor, ys: Tensor, h0: Tensor) -> Tensor:
    """The book's loss, *summed* over time: L = Σ_t L^(t) = -Σ_t log softmax(o^(t))_{y^(t)}."""
    logp = torch.log_softmax(tanh_states(w, xs, h0).os, dim=-1)
    return -logp[torch.arange(len(ys)), ys].sum()


def tanh_jacobian(h: Tensor) -> Tensor:
    """∂h/∂a for h = tanh(a): diag(1 - h²), since tanh' = 1 - tanh² and h_i depends on a_i alone."""
    return torch.diag(1 - h**2)


def nabla_o(os: Tensor, ys: Tensor) -> Tensor:
    """∇_o^(t) L of the book for t = 1 … τ, from ∂L/∂L^(t) = 1 (the loss is a sum).

    (∇_o^(t) L)_i = ŷ_i^(t) - 1[i = y^(t)],   ŷ = softmax(o)
    """
    return torch.softmax(os, dim=-1) - torch.nn.functional.one_hot(ys, os.shape[-1])


def nabla_h(w: BookWeights, hs: Tensor, do: Tensor) -> Tensor:
    """∇_h^(t) L of the book for t = 1 … τ, from the last step backwards.

    ∇_h^(τ) L = Vᵀ ∇_o^(τ) L
    ∇_h^(t) L = Wᵀ diag(1 - (h^(t+1))²) ∇_h^(t+1) L + Vᵀ ∇_o^(t) L

    Two notes write the diagonal matrix to the right of the vector ∇_h^(t+1) L, where the product
    has no meaning: (∂h^(t+1)/∂h^(t))ᵀ = (diag(1 - h²) W)ᵀ = Wᵀ diag(1 - h²).
    """
    dh = [w.V.T @ do[-1]]
    for t in range(len(do) - 2, -1, -1):  # do[t] is ∇_o at step t + 1, whose successor is hs[t + 2]
        dh.append(w.W.T @ tanh_jacobian(hs[t + 2]) @ dh[-1] + w.V.T @ do[t])
    return torch.stack(dh[::-1])


def tanh_gradients(w: BookWeights, xs: Tensor, ys: Tensor, h0: Tensor) -> BookGradients:
    """Every gradient of the book's chapter 10, the loss *summed* over time (see `tanh_loss`).

    ∇_c L = Σ_t ∇_o^(t) L
    ∇_b L = Σ_t diag(1 - (h^(t))²) ∇_h^(t) L
    ∇_V L = Σ_t (∇_o^(t) L) h^(t)ᵀ
    ∇_W L = Σ_t diag(1 - (h^(t))²) (∇_h^(t) L) h^(t-1)ᵀ
    ∇_U L = Σ_t diag(1 - (h^(t))²) (∇_h^(t) L) x^(t)ᵀ
    """
    hs, os = tanh_states(w, xs, h0)
    do = nabla_o(os, ys)
    dh = nabla_h(w, hs, do)
    da = torch.stack([tanh_jacobian(h) @ d for h, d in zip(hs[1:], dh, strict=True)])
    return BookGradients(
        o=do, h=dh, c=do.sum(0), b=da.sum(0),
        V=do.T @ hs[1:], W=da.T @ hs[:-1], U=da.T @ xs
    )  # fmt: skip


# ---------------------------------------------------------------------------- the last note


def third_loss_terms(w: BookWeights, xs: Tensor, ys: Tensor, h0: Tensor) -> RecurrentGradients:
    """∂L^(3)/∂W and ∂L^(3)/∂U of the last note, its three terms, the shortest path first.

    ∂L^(3)/∂W = ∂L^(3)/∂o^(3) ∂o^(3)/∂h^(3)                                     ∂h^(3)/∂W
              + ∂L^(3)/∂o^(3) ∂o^(3)/∂h^(3) ∂h^(3)/∂h^(2)                       ∂h^(2)/∂W
              + ∂L^(3)/∂o^(3) ∂o^(3)/∂h^(3) ∂h^(3)/∂h^(2) ∂h^(2)/∂h^(1)         ∂h^(1)/∂W

    and the same with U. The last factor of each line is the direct derivative, h^(k-1) held still:
    with the total derivative the first line alone would already be the whole sum.
    """
    if len(xs) < 3:
        raise UserError(f"{len(xs)} steps have no third loss", hint="loss_terms takes any step t")
    hs, os = tanh_states(w, xs, h0)
    dh3 = nabla_o(os, ys)[2] @ w.V
    dh2 = dh3 @ tanh_jacobian(hs[3]) @ w.W
    dh1 = dh2 @ tanh_jacobian(hs[2]) @ w.W
    da = [dh3 @ tanh_jacobian(hs[3]), dh2 @ tanh_jacobian(hs[2]), dh1 @ tanh_jacobian(hs[1])]
    return RecurrentGradients(
        W=torch.stack([torch.outer(d, h) for d, h in zip(da, hs[:3].flip(0), strict=True)]),
        U=torch.stack([torch.outer(d, x) for d, x in zip(da, xs[:3].flip(0), strict=True)]),
    )


def loss_terms(w: BookWeights, xs: Tensor, ys: Tensor, h0: Tensor, t: int) -> RecurrentGradients:
    """∂L^(t)/∂W and ∂L^(t)/∂U of the last note for any step t, term k = 1 … t at index k - 1.

    ∂L^(t)/∂W = Σ_{k=1}^{t} ∂L^(t)/∂o^(t) ∂o^(t)/∂h^(t) (∏_{j=k+1}^{t} ∂h^(j)/∂h^(j-1)) ∂h^(k)/∂W

    The factors of the product fall in time, j = t leftmost; ∂h^(k)/∂W is the direct derivative.
    The note starts the sum at k = 0, a term that is zero: h^(0) was given, not computed from W.
    """
    if not 1 <= t <= len(xs):
        raise UserError(f"t={t} is not a step of {len(xs)}", hint="steps are counted from 1")
    hs, os = tanh_states(w, xs, h0)
    dh = nabla_o(os, ys)[t - 1] @ w.V
    terms = []
    for k in range(t, 0, -1):
        da = dh @ tanh_jacobian(hs[k])
        terms.append((torch.outer(da, hs[k - 1]), torch.outer(da, xs[k - 1])))
        dh = da @ w.W
    dW, dU = zip(*reversed(terms), strict=True)
    return RecurrentGradients(torch.stack(dW), torch.stack(dU))


def double_sum(w: BookWeights, xs: Tensor, ys: Tensor, h0: Tensor) -> RecurrentGradients:
    """∂L/∂W and ∂L/∂U of the last note: every loss, every step it passes through, all added up.

    ∂L/∂W = Σ_{t=1}^{τ} Σ_{k=1}^{t} (the term of `loss_terms`)

    The loss is summed over time. The two sums take O(τ²) steps where `tanh_gradients` takes O(τ).
    """
    each = [loss_terms(w, xs, ys, h0, t) for t in range(1, len(xs) + 1)]
    return RecurrentGradients(
        W=torch.cat([terms.W for terms in each]).sum(0),
        U=torch.cat([terms.U for terms in each]).sum(0),
    )
