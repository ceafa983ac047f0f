"""The text of a training, and the passes that it makes over it."""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from elman.language_model import Reader
from elman.text import batches
from elman.training.segments import Pass, Segment

TOKENS_ON_GPU = 2**27  # 1 GiB of int64


def checked_ids(reader: Reader, ids: Any) -> Any:
    """One text in ids that the model knows."""
    ids = batches.flat_integers(ids)
    values = _as_array(ids)
    if len(values):
        reader.check_range(int(values.min()), int(values.max()))
    return ids


def beside_model(ids: Any, device: torch.device) -> Any:
    """On the GPU with the model, where the ids take little of it."""
    if device.type == "cuda" and len(ids) <= TOKENS_ON_GPU:
        return torch.tensor(_as_array(ids), dtype=torch.int64, device=device)
    return ids


def _as_array(ids: Any) -> Any:
    return ids.cpu().numpy() if isinstance(ids, Tensor) else ids  # torch has no minimum of uint16


@final
class Passes:
    """Every pass over the text by its number, made by `cut` when it is first asked for.

    At most two are kept: one that is being read, and the next, of which the first segment may have
    been cut out ahead.
    """

    def __init__(self, cut: Callable[[int], Pass]) -> None:
        self.cut = cut
        self.kept = {0: cut(0)}  # too little text is refused here
        self.ahead: tuple[tuple[Pass, int], Segment] | None = None

    def get(self, epoch: int, being_read: int) -> Pass:
        """The segments of one pass."""
        if epoch not in self.kept:
            self.kept = {e: p for e, p in self.kept.items() if e == being_read}
            self.kept[epoch] = self.cut(epoch)
        return self.kept[epoch]

    def segment(self, reads: Pass, index: int) -> Segment:
        """One segment of a pass."""
        ahead, self.ahead = self.ahead, None
        return ahead[1] if ahead is not None and ahead[0] == (reads, index) else reads[index]

    def look_ahead(self, epoch: int, index: int) -> None:
        """Cut out what the next update reads first, while the GPU is busy with this one."""
        reads = self.get(epoch, epoch)
        if index == len(reads):
            reads, index = self.get(epoch + 1, epoch), 0
        self.ahead = ((reads, index), reads[index])
