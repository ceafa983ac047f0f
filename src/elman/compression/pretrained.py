"""A trained run as the network that a compressor starts from.

Its tokens must be bytes: a run at the byte level, or of characters, of which those in ASCII are.
Bytes that such a run does not know share what it holds likely of `<unk>`.
"""

import hashlib
import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from elman.defaults import usual
from elman.errors import UserError
from elman.language_model import LanguageModel
from elman.runs import Run
from elman.text.vocab import Vocab

Weights = NDArray[np.float32]
LANES = 16


def fingerprint(weights: Weights) -> bytes:
    """16 bytes that name these weights, and no others."""
    return hashlib.sha256(np.ascontiguousarray(weights, "<f4").tobytes()).digest()[:16]


def network_of(path: Path | str) -> tuple[Weights, int]:
    """The weights of a run as the compressor lays them out, and its units, padded to sixteens."""
    run = Run.open(path)
    model, bytes_of = run.load_model(), _bytes(run.vocab, run.path)
    shape = model.shape
    if shape.cell != "lstm" or shape.layers != 1:
        raise UserError(
            f"{path} has {shape.layers} × {shape.cell}: compression starts from one lstm layer",
            hint="elman train BOOK --model lstm --layers 1",
        )
    if shape.hidden_size > 1024:
        raise UserError(
            f"{path} has {shape.hidden_size} units, more than 1024",
            hint="train a run with --hidden-size 1024",
        )
    return _laid_out(model, bytes_of, run.vocab.unk)


def _bytes(vocab: Vocab, path: Path) -> dict[int, int]:
    """The id of every byte that the vocabulary knows."""
    found = {}
    for i, token in enumerate(vocab.idx_to_token):
        code = vocab.level_used.code(token)
        if code is None:
            raise UserError(
                f"{path} reads {vocab.level_used.units}, which are not bytes",
                hint="train a run with --level byte, which reads anything, or with --level char",
            )
        if len(code) == 1:
            found[code[0]] = i
    return found


@usual()
@torch.no_grad()
def _laid_out(
    model: LanguageModel, bytes_of: dict[int, int], unk: int | None
) -> tuple[Weights, int]:
    """W_x (256 × 4H, biases added), W_h (H × 4H), W_o (H × 256), b_o, one after the other."""
    w, H = model.recurrence.state_dict(), model.hidden_size
    read = w["weight_ih_l0"].T
    if model.embedding is not None:
        read = model.embedding.weight @ read
    read = (read + w["bias_ih_l0"] + w["bias_hh_l0"]).float()
    ids = [bytes_of.get(byte, unk if unk is not None else 0) for byte in range(256)]
    unknown = torch.tensor([byte not in bytes_of for byte in range(256)])
    share = math.log(max(int(unknown.sum()), 1))
    padded = -(-H // LANES) * LANES
    W_x = torch.zeros(256, 4, padded)
    W_h = torch.zeros(padded, 4, padded)
    W_o = torch.zeros(padded, 256)
    W_x[:, :, :H] = read[ids].view(256, 4, H)
    W_h[:H, :, :H] = w["weight_hh_l0"].T.float().reshape(H, 4, H)
    W_o[:H] = model.output_weight.float()[ids].T
    b_o = model.bias_q.float()[ids] - share * unknown
    parts = (W_x, W_h, W_o, b_o)
    return torch.cat([part.flatten() for part in parts]).numpy(), padded
