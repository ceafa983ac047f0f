"""mixing.h: odds weighed in the logistic domain, and corrected by what such odds led to."""

from typing import Any

import numpy as np

from elman.compression.reference.counts import toward
from elman.compression.reference.numbers import HALF, ONE, F, Floats, dot, squash


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
