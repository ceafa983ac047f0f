"""Time in chunks against step after step: trained networks, a long sequence, forward and back.

    python benchmarks/chunked.py [--device cuda] [--quick] [--busy] [--json FILE] [--only WORD]

Networks are trained for a while on Tiny Shakespeare where ELMAN_DATA has it, else on the reference
manual inside Python. Then one lane of that text (repeated where it is too short) runs forward and
backward through the recurrence: by elman step after step, by `torch.nn` (cuDNN on a GPU) and in
chunks, in one process. The error is that of dW_hh, relative, in float32 (its products in float32,
too: TF32 is off). At the end one lane is scored, and a network at the edge of chaos is tried, which
must run step after step. Times are the best of several runs; `--busy` is for a machine with other
work: one thread, and processor time instead of the clock on the wall.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elman import LanguageModel, Vocab, corpus, nn
from elman.diagnostics import Passage, forgetting
from elman.errors import UserError
from elman.gradients import Chunked, Stepped
from elman.scoring import metrics
from elman.training import Optimisation, Reading, Settings, Training

CLOCK = [time.perf_counter]
TORCHS = {"elman": torch.nn.RNN, "gru": torch.nn.GRU, "lstm": torch.nn.LSTM}


def text() -> str:
    try:
        return corpus.load("tiny-shakespeare")
    except UserError:
        return corpus.load("python-reference")


def trained(cell: str, hidden: int, ids: Tensor, vocab: int, updates: int, device: str) -> Any:
    """A language model that has learned something: an untrained one forgets sooner."""
    torch.manual_seed(0)
    model = LanguageModel(vocab, cell=cell, hidden_size=hidden).to(device)
    settings = Settings(
        epochs=1000,
        reading=Reading(batch_size=32, window=64),
        optimisation=Optimisation(optimizer="adamw", learning_rate=2e-3, clip=1.0),
    )
    training = Training(model, ids, settings=settings)
    for record in training.records():
        if record.step >= updates:
            return model
    raise AssertionError("a thousand passes were not enough")


class Work:
    """One lane through a recurrence, forward and backward, whoever runs it."""

    def __init__(self, model: Any, ids: Tensor, steps: int, dtype: torch.dtype) -> None:
        self.rnn, self.device = model.recurrence, model.bias_q.device
        lane = ids.repeat(-(-steps // len(ids)))[:steps]
        self.ids, self.dtype = lane[:, None].long().to(self.device), dtype
        random = torch.Generator(self.device).manual_seed(0)
        # the pull of a loss: ŷ - 1 through the output layer, here of random targets
        targets = torch.randint(model.vocab_size, (4096,), generator=random, device=self.device)
        with torch.no_grad():
            error = torch.full((4096, model.vocab_size), 1 / model.vocab_size, device=self.device)
            error[torch.arange(4096), targets] -= 1
            pulls = (error @ model.output_weight).to(dtype)
        self.pulls = pulls.repeat(-(-steps // 4096), 1)[:steps, None]

    def ours(self, time_: Any) -> Any:
        rnn = nn.of(
            self.rnn.cell,
            self.rnn.input_size,
            self.rnn.hidden_size,
            device=self.device,
            dtype=self.dtype,
            time=time_,
        )
        rnn.load_state_dict(self.rnn.state_dict())
        return rnn

    def torchs(self, cell: str) -> Any:
        rnn = TORCHS[cell](self.rnn.input_size, self.rnn.hidden_size)
        rnn.load_state_dict(self.rnn.state_dict())
        return rnn.to(self.device, self.dtype)

    def run(self, rnn: Any, xs: Tensor) -> Tensor:
        """dW_hh."""
        ys, _ = rnn(xs)
        rnn.zero_grad(set_to_none=True)
        ys.backward(self.pulls)
        return rnn.weight_hh_l0.grad

    def one_hot(self) -> Tensor:
        return torch.nn.functional.one_hot(self.ids, self.rnn.input_size).to(self.dtype)


def seconds(call: Callable[[], object], repeats: int) -> float:
    """The best of several; once before that, where compilation is met."""
    times = []
    for _ in range(repeats + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = CLOCK[0]()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(CLOCK[0]() - began)
    return min(times[1:])


def forgetting_steps(model: Any, ids: Tensor, part: float = 1e-5) -> int | None:
    """After how many steps less than `part` of where it began is left (float64, a CPU)."""
    lags = 1500 if model.hidden_size <= 256 else 800
    passage = Passage.read(model, ids[: 2 * lags].cpu())
    return forgetting(passage, lags=lags, probes=1).steps(part)


def measured(
    cell: str, model: Any, ids: Tensor, steps: int, chunks: int, dtype: torch.dtype, peers: bool
) -> dict[str, Any]:
    work = Work(model, ids, steps, dtype)
    repeats = 1 if steps > 200_000 else 2
    stepped, chunked = work.ours(Stepped()), work.ours(Chunked(chunks))
    exact = work.run(stepped, work.ids)
    for _ in range(5):  # let the overlap settle
        work.run(chunked, work.ids)
    ours = work.run(chunked, work.ids)
    seams = chunked.seams
    row: dict[str, Any] = {
        "cell": cell,
        "hidden": model.hidden_size,
        "steps": steps,
        "dtype": str(dtype).removeprefix("torch."),
        "chunks": [side.chunks for side in seams],
        "overlap": [side.overlap for side in seams],
        "sweeps": [side.sweeps for side in seams],
        "difference": [side.difference for side in seams],
        "bound": [side.bound for side in seams],
        "tolerance": seams.forward.tolerance,
        "stepped": [side.stepped for side in seams],
        "error": float((ours.double() - exact.double()).norm() / exact.double().norm()),
        "stepped_s": seconds(lambda: work.run(stepped, work.ids), repeats),
        "chunked_s": seconds(lambda: work.run(chunked, work.ids), max(3, repeats)),
    }
    if peers:
        theirs, xs = work.torchs(cell), work.one_hot()
        try:
            row["torch_s"] = seconds(lambda: work.run(theirs, xs), 1)
        except RuntimeError as refusal:
            row["torch_refuses"] = str(refusal)
    return row


def told(row: dict[str, Any]) -> str:
    theirs = f", torch.nn {row['torch_s'] * 1e3:,.1f} ms" if "torch_s" in row else ""
    theirs += ", torch.nn refuses" if "torch_refuses" in row else ""
    gain = row["stepped_s"] / row["chunked_s"]
    return (
        f"{row['cell']:5} H={row['hidden']:<4} T={row['steps']:<9,} {row['dtype']:8} "
        f"stepped {row['stepped_s'] * 1e3:,.1f} ms{theirs}, chunked "
        f"{row['chunked_s'] * 1e3:,.1f} ms: {gain:.1f}×; chunks {row['chunks']} overlap "
        f"{row['overlap']} sweeps {row['sweeps']} seams {_short(row['difference'])} bound "
        f"{_short(row['bound'])} dW_hh {row['error']:.1e} "
        + " | ".join(filter(None, row["stepped"]))
    )


def _short(values: list[float]) -> str:
    return " ".join(f"{v:.1e}" for v in values)


def scored(cell: str, model: Any, ids: Tensor, chunks: int, products: str) -> dict[str, Any]:
    """One lane of held-out text, in order and in chunks; products in ieee, tf32 or bfloat16."""
    model = copy.deepcopy(model)
    if products == "bfloat16":
        model.bfloat16()
    else:
        torch.backends.cudnn.rnn.fp32_precision = products  # pyright: ignore[reportAttributeAccessIssue]
    exact = metrics.evaluate(model, ids)
    stepped_s = seconds(lambda: metrics.evaluate(model, ids), 2)
    long_s = seconds(lambda: metrics.evaluate(model, ids, piece=metrics.CHUNKED_PIECE), 2)
    model.read_in_chunks(chunks)
    for _ in range(4):  # let the overlap settle
        metrics.evaluate(model, ids)
    ours = metrics.evaluate(model, ids)
    row = {
        "cell": cell,
        "hidden": model.hidden_size,
        "scored": len(ids),
        "products": products,
        "nats": exact.nats_per_token,
        "apart": abs(ours.nats_per_token - exact.nats_per_token),
        "stepped_s": stepped_s,
        "stepped_in_one_piece_s": long_s,
        "chunked_s": seconds(lambda: metrics.evaluate(model, ids), 3),
        "seams": str(model.recurrence.seams.forward),
    }
    torch.backends.cudnn.rnn.fp32_precision = "ieee"  # pyright: ignore[reportAttributeAccessIssue]
    return row


def chaotic(steps: int, hidden: int, device: str) -> dict[str, Any]:
    """tanh(W h) with W of N(0, 1.5²/hidden) entries and next to no input: at the edge of chaos."""
    torch.manual_seed(0)
    xs = 0.01 * torch.randn(steps, 1, 8, device=device)
    found = []
    for time_ in (Stepped(), Chunked(64)):
        torch.manual_seed(1)
        rnn: Any = nn.RNN(8, hidden, device=device, time=time_)
        with torch.no_grad():
            rnn.weight_hh_l0.normal_(0, 1.5 / hidden**0.5)
            ys, _ = rnn(xs)
            why = str(rnn.seams.forward)
            found.append((ys, seconds(lambda rnn=rnn: rnn(xs), 3), why))
    (exact, stepped_s, _), (ours, chunked_s, why) = found
    return {
        "chaotic": hidden,
        "steps": steps,
        "same": bool(torch.equal(exact, ours)),
        "stepped_s": stepped_s,
        "chunked_s": chunked_s,
        "why": why,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cpu")
    options.add_argument("--quick", action="store_true", help="one small network, short sequences")
    options.add_argument("--json", type=Path)
    options.add_argument("--only", default="", help="a cell")
    options.add_argument("--minutes", type=float, default=1e9, help="begin nothing after so many")
    options.add_argument("--steps", type=int, help="of every sequence")
    options.add_argument("--updates", type=int, help="how long each network trains")
    options.add_argument("--busy", action="store_true", help="one thread, processor time")
    asked = options.parse_args()
    if asked.busy:
        torch.set_num_threads(1)
        CLOCK[0] = time.process_time
    gpu = asked.device.startswith("cuda")
    torch.backends.cudnn.rnn.fp32_precision = "ieee"  # pyright: ignore[reportAttributeAccessIssue]
    began, rows = time.perf_counter(), []

    def tell(row: dict[str, Any], line: str | None = None) -> None:
        rows.append(row)
        print(f"[{time.perf_counter() - began:4.0f} s] {line or row}", flush=True)
        if asked.json is not None:
            where = (
                torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
            )
            record = {"device": where, "torch": torch.__version__, "rows": rows}
            asked.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    whole = text()
    vocab = Vocab.from_text(whole, "char")
    ids = torch.as_tensor(vocab.encode(whole).astype("int64"))
    train, held_out = ids[: int(0.9 * len(ids))], ids[int(0.9 * len(ids)) :]
    sizes = [256] if asked.quick or not gpu else [512, 256]
    updates = asked.updates or (100 if asked.quick else 1500 if gpu else 300)
    for hidden in sizes:
        for cell in ("lstm", "gru", "elman"):
            if asked.only not in cell or time.perf_counter() - began > 60 * asked.minutes:
                continue
            model = trained(cell, hidden, train, len(vocab), updates, asked.device)
            for steps, chunks, dtype, peers in jobs(gpu, asked.quick, cell, hidden):
                steps = asked.steps or steps
                row = measured(cell, model, held_out, steps, chunks, dtype, peers)
                tell(row, told(row))
            for products in ("ieee", "tf32", "bfloat16") if gpu else ("ieee",):
                tell(scored(cell, model, held_out if gpu else held_out[:20_001], 64, products))
            if not asked.quick and not gpu:
                forgets = {"cell": cell, "hidden": hidden}
                tell(forgets | {"forgets_to_1e-5_in": forgetting_steps(model, held_out)})
    tell(chaotic(65_536 if gpu else 10_000, 256, asked.device))


def jobs(gpu: bool, quick: bool, cell: str, hidden: int) -> list[tuple]:
    """(steps, chunks, dtype, peers) to be timed."""
    if not gpu:
        return [(4_000 if quick else 100_000, 64, torch.float32, not quick)]
    half, whole = torch.bfloat16, torch.float32
    found = [
        (16_384, 64, half, True),
        (65_536, 64, half, True),
        (65_536, 64, whole, False),
        (262_144, 128, half, False),
    ]
    if (cell, hidden) == ("lstm", 512):
        found += [(16_384, 64, whole, False), (1_000_000, 256, half, False)]
    return found[:1] if quick else found


if __name__ == "__main__":
    main()
