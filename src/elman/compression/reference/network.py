"""network.h: an LSTM that learns while it reads."""

from typing import Any

import numpy as np

from elman.compression.options import Options
from elman.compression.reference.counts import U32
from elman.compression.reference.numbers import (
    LANES,
    ONE,
    SYMBOLS,
    F,
    Floats,
    dot,
    exp,
    product,
    sigmoid,
    tanh,
    total,
)


class Lane:
    """A reader's place, its state before the window, and the trace of its window."""

    def __init__(self, hidden: int) -> None:
        self.at, self.h, self.c = 0, np.zeros(hidden, F), np.zeros(hidden, F)
        self.steps: list[tuple[Any, ...]] = []
        self.out: list[int] = []


class Network:
    """The LSTM of network.h."""

    HALF_WAY, WARM_UP = F(2000), 100

    def __init__(self, options: Options, trained: Floats | None) -> None:
        self.o, H = options, options.hidden
        self.shapes = ((SYMBOLS, 4 * H), (H, 4 * H), (H, SYMBOLS), (SYMBOLS,))
        size = sum(int(np.prod(shape)) for shape in self.shapes)
        self.weights = _first_weights(size, H) if trained is None else trained.copy()
        self.gradient, self.first, self.second = (np.zeros(size, F) for _ in range(3))
        self.Wx, self.Wh, self.Wo, self.bo = self._views(self.weights)
        self.lanes = [Lane(H) for _ in range(options.lanes)]
        self.touched: set[int] = set()
        self.updates = 0

    def _views(self, flat: Floats) -> list[Any]:
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes])
        return [
            part.reshape(shape)
            for part, shape in zip(np.split(flat, ends[:-1]), self.shapes, strict=True)
        ]

    def forward(self, lane: Lane, byte: int) -> Floats:
        """One step; returns the odds of the next byte."""
        H = self.o.hidden
        h, c = (lane.steps[-1][1], lane.steps[-1][2]) if lane.steps else (lane.h, lane.c)
        a = product(h, self.Wh, self.Wx[byte].copy())
        i, f, u = sigmoid(a[:H]), sigmoid(a[H : 2 * H]), sigmoid(a[3 * H :])
        g = tanh(a[2 * H : 3 * H])
        c_t = f * c + i * g
        h_t = u * tanh(c_t)
        logits = product(h_t, self.Wo, self.bo.copy())
        e = exp(logits - logits.max())
        sums = e.reshape(-1, LANES)
        lanes = np.zeros(LANES, F)
        for block in sums:
            lanes = lanes + block
        p = e * (ONE / total(lanes))
        lane.steps.append((byte, h_t, c_t, (i, f, g, u), p, h, c))
        return p

    def backward(self, lane: Lane) -> None:
        """Add the gradient of the lane's window."""
        gx, gh, go, gb = self._views(self.gradient)
        dh = dc = np.zeros(self.o.hidden, F)
        for (byte, h_t, c_t, (i, f, g, u), p, h, c), out in zip(
            reversed(lane.steps), reversed(lane.out), strict=True
        ):
            p = p.copy()
            p[out] = p[out] - ONE
            gb += p
            dh = dh + dot(self.Wo, p)
            go += p * h_t[:, None]
            q = tanh(c_t)
            dc = dc + dh * u * (ONE - q * q)
            da = np.concatenate(
                [
                    dc * g * i * (ONE - i),
                    dc * c * f * (ONE - f),
                    dc * i * (ONE - g * g),
                    dh * q * u * (ONE - u),
                ]
            )
            dc = dc * f
            gx[byte] += da
            self.touched.add(byte)
            dh = dot(self.Wh, da)
            gh += da * h[:, None]

    def adam(self, part: slice, rate: Any, scale: Any) -> None:
        """A step for one stretch of weights; its gradient is zero afterwards."""
        b1, b2 = F(0.9), F(0.999)
        g = self.gradient[part] * scale
        m = self.first[part] * b1 + g * (ONE - b1)
        v = self.second[part] * b2 + (g * g) * (ONE - b2)
        self.first[part], self.second[part], self.gradient[part] = m, v, 0
        self.weights[part] = self.weights[part] - (m * rate) / (np.sqrt(v) + F(1e-6))

    def update(self) -> None:
        self.updates += 1
        k, o = F(min(self.updates, 1 << 20)), self.o
        rate = F(o.last_rate) + (F(o.rate) - F(o.last_rate)) / (ONE + k / self.HALF_WAY)
        if self.updates < self.WARM_UP:
            rate = rate * (k * (ONE / F(self.WARM_UP)))
        scale, G = ONE / F(o.window * o.lanes), 4 * o.hidden
        for byte in sorted(self.touched):
            self.adam(slice(byte * G, (byte + 1) * G), rate, scale)
        self.touched.clear()
        self.adam(slice(SYMBOLS * G, None), rate, scale)

    def read(self, byte: int, past: bytearray, mask: int) -> Floats:
        """Learn at the end of a window, then predict the byte after this one."""
        front = self.lanes[0]
        if front.steps:
            front.out.append(byte)
        if len(front.steps) == self.o.window:
            self.learn(past, mask)
        return self.forward(front, byte)

    def learn(self, past: bytearray, mask: int) -> None:
        n, T, lanes = len(past), self.o.window, self.o.lanes
        oldest = n - mask if n > mask else 0
        self.backward(self.lanes[0])
        for b, lane in enumerate(self.lanes[1:], 1):
            if lane.at + T + 1 > n or lane.at < oldest:
                lane.at = oldest + (n - oldest) * (b - 1) // lanes
                lane.h, lane.c = (np.zeros(self.o.hidden, F) for _ in range(2))
            if lane.at + T + 1 > n:
                continue
            for t in range(T):
                self.forward(lane, past[lane.at + t])
                lane.out.append(past[lane.at + t + 1])
            self.backward(lane)
            _carry_on(lane)
            lane.at += T
        _carry_on(self.lanes[0])
        self.update()


def _carry_on(lane: Lane) -> None:
    lane.h, lane.c = lane.steps[-1][1], lane.steps[-1][2]
    lane.steps, lane.out = [], []


def _first_weights(size: int, hidden: int) -> Floats:
    """Uniform in ±√(1/H), forget gates open, no bias of the output."""
    x, drawn = 1, []
    for _ in range(size):
        x = (x * 1664525 + 1013904223) & U32
        drawn.append(x >> 8)
    u = np.array(drawn, F) * (ONE / F(8388608)) - ONE
    weights = u * (ONE / np.sqrt(F(hidden)))
    gates = weights[: SYMBOLS * 4 * hidden].reshape(SYMBOLS, 4, hidden)
    gates[:, 1] += ONE
    weights[-SYMBOLS:] = 0
    return weights
