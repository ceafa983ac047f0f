"""The plainest version of everything in test_gradients: cells by the book, autograd through a loop.

The loop detaches where a carry cuts and scales the gradient where it scales. Nothing here is shared
with the library.
"""

import torch


def cell_step(cell, w, x, state):
    """One step by the textbook; w is PyTorch's [W_ih, W_hh, (b_ih, b_hh), (W_hr)]."""
    projected = cell == "lstm" and len(w) in (3, 5)
    W_ih, W_hh = w[0], w[1]
    b_ih, b_hh = (w[2], w[3]) if len(w) >= 4 else (0, 0)
    a_i, a_h = x @ W_ih.T + b_ih, state[0] @ W_hh.T + b_hh
    if cell == "tanh":
        return (torch.tanh(a_i + a_h),)
    if cell == "relu":
        return (torch.relu(a_i + a_h),)
    if cell == "linear":
        return (a_i + a_h,)
    if cell == "gru":
        (i_r, i_z, i_n), (h_r, h_z, h_n) = a_i.chunk(3, -1), a_h.chunk(3, -1)
        r, z = torch.sigmoid(i_r + h_r), torch.sigmoid(i_z + h_z)
        n = torch.tanh(i_n + r * h_n)
        return ((1 - z) * n + z * state[0],)
    i, f, g, o = (a_i + a_h).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (h @ w[-1].T if projected else h), c


def run(cell, layers, directions, xs, states, weight=None, masks=None, lengths=None):
    """Outputs and last states; `weight(t, i)` is the ξ of layer and direction i between steps t-1
    and t.

    `layers` and `states` are lists in PyTorch's order; the two ends of time are never cut.
    """
    steps, last = len(xs), []
    for level in range(len(layers) // directions):
        sides = []
        for d in range(directions):
            place = level * directions + d
            state, ys = states[place], [None] * steps
            for t in range(steps) if d == 0 else reversed(range(steps)):
                moment = t if d == 0 else t + 1
                before = state
                if weight is not None and 0 < moment < steps:
                    before = tuple(scaled(s, weight(moment, place)) for s in state)
                after = cell_step(cell, layers[place], xs[t], before)
                if lengths is not None:
                    runs = (t < lengths)[:, None]
                    if d == 1:  # a row's own end of time is not cut
                        first = (t + 1 == lengths)[:, None]
                        uncut = cell_step(cell, layers[place], xs[t], state)
                        after = tuple(
                            torch.where(first, u, a) for u, a in zip(uncut, after, strict=True)
                        )
                    after = tuple(
                        torch.where(runs, a, s) for a, s in zip(after, state, strict=True)
                    )
                state = after
                ys[t] = state[0]
            sides.append(torch.stack(ys))
            last.append(state)
        xs = torch.cat(sides, -1)
        if masks is not None and level < len(layers) // directions - 1:
            xs = xs * masks[level]
    return xs, last


def scaled(h, xi):
    """h forwards, ξ dh backwards; ξ may be one per row."""
    if isinstance(xi, torch.Tensor) and xi.dim() == 1:
        xi = xi[:, None]
    return xi * h + (1 - xi) * h.detach()
