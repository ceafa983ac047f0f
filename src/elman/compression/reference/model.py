"""model.h: the odds of the next bit, from counting, the longest match and the network."""

from typing import Any

import numpy as np

from elman.compression.options import Options
from elman.compression.reference.counts import Counts, Learned, hashed
from elman.compression.reference.mixing import Corrected, Mixer
from elman.compression.reference.network import Network
from elman.compression.reference.numbers import (
    HALF,
    LANES,
    ONE,
    SYMBOLS,
    F,
    Floats,
    squash,
    stretch,
)

FAR = 255
"""Columns are not told apart beyond it."""


class Model:
    """The odds of the next bit: `odds()`, then `see(bit)`."""

    SETS = (256, 256, 2048, 64, 160, 256, 2048, 2048)

    def __init__(self, options: Options, trained: Floats | None = None) -> None:
        self.o, k = options, options.contexts
        self.mask = _ring(options.length) - 1
        self.stretches = stretch((np.arange(4096).astype(F) + HALF) * (ONE / F(4096)))
        self.inputs = -(-(k * 4 + 7) // LANES) * LANES
        self.past, self.node, self.bit_at, self.recent = bytearray(), 1, 0, 0
        self.word = self.word_before = self.word_two = 0
        self.line = self.field = self.line_start = self.line_before = 0
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

    def _look_above(self) -> None:
        """What stands in the line above, in this column and in the next; 0: nothing."""
        places = (self.line_before + self.line + i for i in range(2))
        oldest = len(self.past) - self.mask
        self.above = [
            self.past[at] if self.line < FAR and oldest <= at < self.line_start else 0
            for at in places
        ]

    def _choose_contexts(self) -> None:
        self._look_above()
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
            hashed(self.above[0], c1),
            hashed(self.above[0], self.line),
            c2,
            newest(2, 4),
            hashed(len(self.past) & 3, c1),
            hashed(self.field, c1),
            newest(2, 5),
            hashed(self.above[0] << 8 | self.above[1], c1),
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
        chosen += (self.above[0] << 3 | at, hashed(c1, c2) & 2047)
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
        if byte == 10:
            self.line_before, self.line_start = self.line_start, len(self.past)
            self.line = self.field = 0
        else:
            self.line = min(self.line + 1, FAR)
            self.field += byte in b",;\t"
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
