"""Level `char`: a token is a Unicode code point."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from elman.text.levels.base import Ids, Level, as_text, code_point_chunks, tally


@final
class Characters(Level):
    """Unicode code points, lone surrogates included."""

    name = "char"
    units, unit = "characters", "char"
    tokens_are = "single characters"
    counting_orders = (5, 7)
    cut_anywhere = True

    def tokens(self, text: str | bytes) -> list[Any]:
        return list(as_text(text, self.units))

    def fits(self, token: Any) -> bool:
        return isinstance(token, str) and len(token) == 1

    def cut(self, text: str | bytes) -> str:
        return as_text(text, self.units)

    def count(self, cut: str) -> dict[Any, int]:
        return {chr(code): n for code, n in tally(code_point_chunks(cut)).items()}

    def encode(self, cut: str, ids: Mapping[Any, int], dtype: np.dtype[Any]) -> Ids:
        known = {ord(token): i for token, i in ids.items() if len(token) == 1}
        table = np.zeros(max(known, default=0) + 2, dtype)
        table[list(known)] = list(known.values())
        result = np.empty(len(cut), dtype)
        done = 0
        for codes in code_point_chunks(cut):
            # clip: every code point above the table's end falls on its last entry, <unk>
            np.take(table, codes, mode="clip", out=result[done : done + len(codes)])
            done += len(codes)
        return result

    def decode(self, ids: NDArray[Any], tokens: Sequence[Any]) -> str:
        codes = np.array([ord(t) if len(t) == 1 else 0x110000 for t in tokens], "<u4")[ids]
        if (codes == 0x110000).any():  # <unk> and its kind are longer than one character
            return "".join(map(tokens.__getitem__, ids.tolist()))
        return codes.tobytes().decode("utf-32-le", "surrogatepass")

    def code(self, token: Any) -> bytes:
        return token.encode("utf-8", "surrogatepass")

    def characters(self, cut: str, before: Any = None) -> int:
        return len(cut)

    def lengths(self, tokens: Sequence[Any]) -> NDArray[np.int64]:
        return np.ones(len(tokens), np.int64)  # <unk> stands for one, whichever it is
