"""counts.h: what followed each context so far, bit by bit."""

U32 = 0xFFFFFFFF


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
