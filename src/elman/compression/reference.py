"""The compressor in NumPy: the same model as model.h, line for line, and the same bits.

This is the specification that the native code is tested against, and what runs where there is no
native code: a hundred bytes a second. All numbers are float32, added in the order written here; an
array of 16 lanes is added up halves onto halves.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman.compression.options import Options

F = np.float32
Floats = NDArray[np.float32]
LANES, SYMBOLS = 16, 256
ONE, HALF = F(1), F(0.5)
U32 = 0xFFFFFFFF
MOST = 64
"""Bytes that one byte can take from the compressed text, at most."""


# ---------------------------------------------------------------------- numbers


def exp(x: Any) -> Any:
    """e^x = 2^n e^r by Taylor's polynomial, x held within ±80."""
    x = np.minimum(np.maximum(x, F(-80)), F(80))
    near = x * F(1.44269504) + np.where(x < 0, F(-0.5), F(0.5))
    n = near.astype(np.int32)
    whole = n.astype(F)
    r = x - whole * F(0.693359375)
    r = r - whole * F(-2.12194440e-4)
    p = r * (ONE / F(720)) + (ONE / F(120))
    for term in (ONE / F(24), ONE / F(6), HALF, ONE, ONE):
        p = p * r + term
    return p * ((n + 127) << 23).astype(np.int32).view(F)


def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x)"""
    return ONE / (ONE + exp(-x))


def tanh(x: Any) -> Any:
    return ONE - F(2) / (ONE + exp(x + x))


def squash(x: Any) -> Any:
    return sigmoid(np.asarray(x, F).reshape(1))[0]


def log(x: Any) -> Any:
    """ln x of a positive, normal x = 2^e m: 2 artanh((m - 1) / (m + 1)) by its series."""
    bits = np.asarray(x, F).reshape(-1).view(np.int32)
    e = (bits >> 23) - 127
    m = ((bits & 0x7FFFFF) | 0x3F800000).astype(np.int32).view(F)
    large = m > F(1.41421356)
    m, e = np.where(large, m * HALF, m), np.where(large, e + 1, e)
    f = (m - ONE) / (m + ONE)
    s = f * f
    p = s * (ONE / F(9)) + (ONE / F(7))
    for term in (ONE / F(5), ONE / F(3), ONE):
        p = p * s + term
    return (f + f) * p + e.astype(F) * F(0.693147182)


def stretch(p: Any) -> Any:
    """ln(p / (1 - p))"""
    return log(p / (ONE - p))


def total(lanes: Floats) -> Any:
    """The sum of the last axis, 16 lanes: halves onto halves."""
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def dot(x: Floats, y: Floats) -> Any:
    """Σ x_i y_i over the last axis, a multiple of 16, block after block."""
    products = x * y
    blocks = products.reshape(*products.shape[:-1], -1, LANES)
    lanes = blocks[..., 0, :]
    for i in range(1, blocks.shape[-2]):
        lanes = lanes + blocks[..., i, :]
    return total(lanes)


def product(x: Floats, W: Floats, y: Floats) -> Floats:
    """y + x W: for every output the inputs one after the other."""
    for x_k, row in zip(x, W, strict=True):
        y = y + row * x_k
    return y


# ---------------------------------------------------------------------- the network


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


# ---------------------------------------------------------------------- counting


def toward(p: int, bit: int, rate: int) -> int:
    """p + rate (bit - p), in 16 bits."""
    return p + (((65535 if bit else 0) - p) * rate >> 16)


def slower(n: int) -> int:
    return 131072 // (2 * n + 3)


def after(history: int, bit: int) -> int:
    """History: n_0 (3 bits), n_1 (3 bits), the last two bits."""
    n = [history >> 5, history >> 2 & 7]
    n[bit] = min(n[bit] + 1, 7)
    if n[1 - bit] > 2:
        n[1 - bit] = n[1 - bit] // 2 + 1
    return n[0] << 5 | n[1] << 2 | (history << 1 | bit) & 3


def hashed(a: int, b: int) -> int:
    h = a * 0x9E3779B1 & U32 ^ (b + 0x7F4A7C15 & U32) * 0x85EBCA6B & U32
    h ^= h >> 15
    h = h * 0x2C1B3C6D & U32
    return h ^ h >> 13


class Learned:
    """An odds learnt at rate 1/n."""

    def __init__(self, p: int = 32768) -> None:
        self.p, self.n = p, 0

    def see(self, bit: int) -> None:
        self.p = toward(self.p, bit, slower(self.n))
        self.n = min(self.n + 1, 255)


class Counts:
    """One context's table; a slot is [mark, p, q, history, n]."""

    def __init__(self, slots: int) -> None:
        self.slots: dict[int, list[int]] = {}
        self.mask = slots // 16 - 1
        counted = ((h >> 5, h >> 2 & 7) for h in range(256))
        self.histories = [
            Learned((10 * n1 + 4) * 65535 // (10 * (n0 + n1) + 8)) for n0, n1 in counted
        ]

    def choose(self, context: int) -> None:
        self.base = (context & self.mask) << 4
        self.check = context >> 16

    def find(self, node: int) -> None:
        mark = (self.check + node * 0x3D4D | 1) & 0xFFFF
        places = self.base + node, (self.base ^ 16) + node
        a, b = (self.slots.get(place, [0, 0, 0, 0, 0]) for place in places)
        if a[0] == mark:
            self.slot = a
        elif b[0] == mark:
            self.slot = b
        else:
            self.slot = [mark, 32768, 32768, 0, 0]
            self.slots[places[0] if a[4] <= b[4] else places[1]] = self.slot

    def see(self, bit: int) -> None:
        _, p, q, history, n = self.slot
        self.histories[history].see(bit)
        self.slot[1:] = [
            toward(p, bit, slower(n)),
            toward(q, bit, 6000),
            after(history, bit),
            min(n + 1, 250),
        ]


# ---------------------------------------------------------------------- mixing


class Mixer:
    """Weights for every value of a context."""

    def __init__(self, weights: Floats) -> None:
        self.weights = weights

    def mix(self, x: Floats, chosen: int) -> None:
        self.chosen = chosen
        self.z = min(max(dot(self.weights[chosen], x), F(-12)), F(12))
        self.p = squash(self.z)

    def learn(self, x: Floats, bit: int, rate: Any) -> None:
        self.weights[self.chosen] += x * ((F(bit) - self.p) * rate)


class Corrected:
    """What predictions like this one led to."""

    def __init__(self) -> None:
        line = [int(squash(F(i - 16) * HALF) * F(65535)) for i in range(33)]
        self.points = np.tile(np.array(line, np.int64), (65536, 1))

    def correct(self, z: Any, context: int) -> Any:
        place = min(max((z + F(8)) * F(2), F(0)), F(31.999))
        below = int(place)
        self.share = place - F(below)
        self.at = context, below
        low, high = (F(p) for p in self.points[context, below : below + 2])
        return (low * (ONE - self.share) + high * self.share) * (ONE / F(65536))

    def learn(self, bit: int) -> None:
        context, below = self.at
        below += int(self.share > HALF)
        self.points[context, below] = toward(int(self.points[context, below]), bit, 2000)


class Model:
    """The odds of the next bit: `odds()`, then `see(bit)`."""

    SETS = (256, 256, 2048, 64, 160, 256)

    def __init__(self, options: Options, trained: Floats | None = None) -> None:
        self.o, k = options, options.contexts
        self.mask = _ring(options.length) - 1
        self.stretches = stretch((np.arange(4096).astype(F) + HALF) * (ONE / F(4096)))
        self.inputs = -(-(k * 4 + 7) // LANES) * LANES
        self.past, self.node, self.bit_at, self.recent = bytearray(), 1, 0, 0
        self.word = self.word_before = self.word_two = self.line = 0
        self.counts = [Counts(1 << options.table_bits) for _ in range(k)]
        self.last_seen: dict[int, int] = {}
        self.match = self.length = 0
        self.by_length = [Learned(49152 if i & 1 else 16384) for i in range(50)]
        self.order0 = [Learned() for _ in range(256)]
        self.order1: dict[int, Learned] = {}
        self.mixers = [Mixer(np.full((n, self.inputs), F(0.07))) for n in self.SETS]
        last = np.zeros((SYMBOLS, LANES), F)
        last[:, : len(self.SETS)] = ONE / F(len(self.SETS))
        self.last, self.other = Mixer(last), Mixer(last.copy())
        self.corrected = Corrected(), Corrected()
        self.net = Network(options, trained)
        self.tree = np.zeros(2 * SYMBOLS, F)
        self.y = np.zeros(LANES, F)
        self._look(0)
        self._predict()

    def odds(self) -> int:
        """Of a 1, in 24 bits."""
        return min(max(int(self.probability * F(16777216)), 1), 16777215)

    def see(self, bit: int) -> None:
        for counts in self.counts:
            counts.see(bit)
        if self.matched is not None:
            self.matched.see(bit)
        self.order0[self.node].see(bit)
        self._order1().see(bit)
        early = F(min(len(self.past), 1 << 24)) * (ONE / F(4096))
        rate = F(self.o.mixing) * (ONE + F(8) / (ONE + early))
        for mixer in self.mixers:
            mixer.learn(self.x, bit, rate)
        self.last.learn(self.y, bit, F(0.002))
        self.other.learn(self.y, bit, F(0.002))
        for corrected in self.corrected:
            corrected.learn(bit)
        self.node, self.bit_at = self.node << 1 | bit, self.bit_at + 1
        if self.bit_at == 8:
            self._end_byte(self.node & 255)
        elif self.bit_at == 4:
            for counts, context in zip(self.counts, self.contexts, strict=True):
                counts.choose(hashed(context, self.node))
        self._predict()

    def _look(self, byte: int) -> None:
        self.tree[SYMBOLS:] = self.net.read(byte, self.past, self.mask) + F(1e-6)
        for level in (128, 64, 32, 16, 8, 4, 2, 1):
            pairs = self.tree[2 * level : 4 * level]
            self.tree[level : 2 * level] = pairs[::2] + pairs[1::2]
        self._choose_contexts()

    def _newest(self, start: int, end: int) -> int:
        h = end
        for i in range(start, end):
            h = hashed(h, self.recent >> 8 * i & 255)
        return h

    def _choose_contexts(self) -> None:
        c1, c2, newest = self.recent & 255, self.recent >> 8 & 255, self._newest
        all_of_them = (
            newest(0, 2),
            newest(0, 3),
            newest(0, 4),
            newest(0, 5),
            newest(0, 6),
            self.word,
            hashed(self.word, self.word_before),
            newest(0, 7),
            hashed(self.word, c1 << 8 | c2),
            newest(1, 3),
            newest(1, 4),
            hashed(self.word_before, c1),
            newest(0, 8),
            hashed(self.word, self.word_two),
            hashed(self.line, c1),
            c1,
        )
        self.contexts = [hashed(c, i) for i, c in enumerate(all_of_them[: self.o.contexts])]
        for counts, context in zip(self.counts, self.contexts, strict=True):
            counts.choose(context)

    def _stretched(self, p: int) -> Any:
        return self.stretches[p >> 4]

    def _predict(self) -> None:
        high = 1 << self.bit_at - 4 if self.bit_at >= 4 else 0
        of_nibble = high | self.node & high - 1 if high else self.node
        x, known = [], 0
        for i, counts in enumerate(self.counts):
            counts.find(of_nibble)
            _, p, q, history, n = counts.slot
            if n == 0:
                x += [F(0)] * 4
                continue
            led_to = counts.histories[history].p
            x += [self._stretched(p), self._stretched(q), self._stretched(led_to)]
            x.append((F(led_to) - F(32768)) * (ONE / F(16384)))
            known += i < 5 or i == 7
        bucket, of_match = self._follow_match()
        x += of_match
        c1, c2 = self.recent & 255, self.recent >> 8 & 255
        x += [self._stretched(self.order0[self.node].p), self._stretched(self._order1().p)]
        p = self.tree[2 * self.node + 1] / self.tree[self.node]
        p = min(max(p, F(1e-4)), F(0.9999))
        of_network = stretch(p)[0]
        x += [of_network, (p - HALF) * F(4), F(0.3)]
        self.x = np.array(x + [F(0)] * (self.inputs - len(x)), F)
        at = self.bit_at
        chosen = (self.node, c1, c2 << 3 | at, known << 3 | at)
        chosen += (int(of_network + F(9.5)) << 3 | at, bucket << 3 | at)
        for i, (mixer, which) in enumerate(zip(self.mixers, chosen, strict=True)):
            mixer.mix(self.x, which)
            self.y[i] = mixer.z
        self.last.mix(self.y, self.node)
        self.other.mix(self.y, c1)
        z = (self.last.z + self.other.z) * HALF
        first = self.corrected[0].correct(z, c1 << 8 | self.node)
        second = self.corrected[1].correct(z, hashed(c1 << 8 | c2, self.node) & 0xFFFF)
        self.probability = (squash(z) + first + second * F(2)) * F(0.25)

    def _order1(self) -> Learned:
        return self.order1.setdefault((self.recent & 255) << 8 | self.node, Learned())

    def _follow_match(self) -> tuple[int, list[Any]]:
        self.matched, nothing = None, (0, [F(0), F(0)])
        if self.length == 0:
            return nothing
        byte = self.past[self.match] | 256
        if byte >> 8 - self.bit_at != self.node:
            self.length = 0
            return nothing
        n = self.length
        bucket = n if n < 16 else 12 + n // 4 if n < 32 else 16 + n // 8 if n < 64 else 24
        self.matched = self.by_length[bucket * 2 + (byte >> 7 - self.bit_at & 1)]
        p = self.matched.p
        return bucket, [self._stretched(p), (F(p) - F(32768)) * (ONE / F(16384))]

    def _end_byte(self, byte: int) -> None:
        self.node, self.bit_at = 1, 0
        self.past.append(byte)
        self.recent = (self.recent << 8 | byte) & 0xFFFFFFFFFFFFFFFF
        letter = byte | 32
        if 97 <= letter <= 122 or byte >= 128:
            self.word = hashed(self.word, letter)
        elif self.word:
            self.word_two, self.word_before, self.word = self.word_before, self.word, 0
        self.line = 0 if byte == 10 else min(self.line + 1, 255)
        self._find_match()
        self._look(byte)

    def _find_match(self) -> None:
        n = len(self.past)
        if self.length > 0:
            self.match, self.length = self.match + 1, min(self.length + 1, 65535)
        if n < 6:
            return
        place = self._newest(0, 6) & self.mask
        seen = self.last_seen.get(place, 0)
        if self.length == 0 and seen > 0:
            self.match = seen
            while (
                self.length < 64
                and seen - 1 - self.length >= 0
                and n - (seen - 1 - self.length) <= self.mask
                and self.past[seen - 1 - self.length] == self.past[n - 1 - self.length]
            ):
                self.length += 1
            self.length = self.length if self.length >= 6 else 0
        self.last_seen[place] = n


def _ring(length: int) -> int:
    size = 1 << 16
    while size < length and size < 1 << 24:
        size *= 2
    return size


# ---------------------------------------------------------------------- coding


class Coder:
    """Arithmetic coding: [low, high] cut in proportion to the odds of every bit."""

    FULL = (1 << 64) - 1

    def __init__(self, options: Options, trained: Floats | None = None) -> None:
        self.model = Model(options, trained)
        self.low, self.high, self.code, self.began = 0, self.FULL, 0, False

    def encode(self, data: bytes, last: bool) -> bytes:
        """The bytes that are certain after these; with `last`, all that remain."""
        out = bytearray()
        for byte in data:
            for b in range(7, -1, -1):
                self._narrow(byte >> b & 1, out)
        return bytes(out) + (self._end() if last else b"")

    def decode(self, data: bytes, room: int, last: bool) -> tuple[bytes, int]:
        """At most `room` bytes of the text, as long as the next is certain to be whole in `data`.

        Returns them and how many bytes of `data` were used; after the `last` come zeros.
        """
        coming, out = iter(data), bytearray()
        used = 0
        while len(out) < room and (last or len(data) - used >= MOST):
            if not self.began:
                self.began, used = True, used + 8
                self.code = int.from_bytes(bytes(next(coming, 0) for _ in range(8)), "big")
            byte = 1
            while byte < 256:
                bit, gone = int(self.code <= self._cut()), bytearray()
                self._narrow(bit, gone)
                used += len(gone)
                for _ in gone:
                    self.code = (self.code << 8 | next(coming, 0)) & self.FULL
                byte = byte << 1 | bit
            out.append(byte & 255)
        return bytes(out), min(used, len(data))

    def _cut(self) -> int:
        return self.low + (self.high - self.low >> 24) * self.model.odds()

    def _narrow(self, bit: int, out: bytearray) -> None:
        middle = self._cut()
        self.low, self.high = (self.low, middle) if bit else (middle + 1, self.high)
        while (self.low ^ self.high) >> 56 == 0:
            out.append(self.high >> 56)
            self.low = self.low << 8 & self.FULL
            self.high = (self.high << 8 | 255) & self.FULL
        self.model.see(bit)

    def _end(self) -> bytes:
        """The shortest number inside the interval, with zeros after it."""
        if self.low == 0:
            return b""
        for size in range(1, 9):
            unit = 1 << 64 - 8 * size
            number = -(-self.low // unit) * unit
            if number <= self.high:
                return (number >> 64 - 8 * size).to_bytes(size, "big")
        raise AssertionError("an interval holds its own lower end")
