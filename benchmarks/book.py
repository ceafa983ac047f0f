"""Held-out nats per character on whole books: elman, gru and lstm, three seeds each.

    python benchmarks/book.py                          every model and seed that is not done yet
    python benchmarks/book.py --only lstm --seed 0     one unit
    python benchmarks/book.py --text tiny-shakespeare
    python benchmarks/book.py --part choose --only lstm --set dropout_outputs=0.3

The Time Machine in the notes' letters, Tiny Shakespeare as it is; the first 90 % trains, the last
10 % is read once, at the end, with the last (averaged) weights: nothing is chosen on it. Settings
are chosen with `--part choose`, which trains on the first 90 % of the training part and scores its
last 10 %. With `--adapt` the same weights are scored again while they learn from what they have
read, and mixed, by weights that learn on the way, with Kneser–Ney that goes on counting and, bit by
bit, with the compressor's counting; how fast they learn is `--part choose`'s own choice, and given
to the others as --adapt RATE DECAY. Each unit can be killed and goes on where it was; a finished
one is added to the results and not run again. Needs torch, numpy and safetensors only.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elman import compression, evaluation, metrics
from elman.files import write_text
from elman.language_model import LanguageModel
from elman.runs import checkpoints, presets
from elman.scoring import dynamic
from elman.scoring.mixture import Network
from elman.text import prepared
from elman.training import Training

HERE = Path(__file__).parent
PARTS = {"validation": 0.1, "test": 0.0}  # nothing is chosen on the tenth that is held out
TEXTS = {
    "time-machine": {"source": "time-machine", "clean": "letters"},
    "tiny-shakespeare": {"source": "tiny-shakespeare", "clean": "none"},
}
COMMON = {
    "batch_size": 32,
    "window": 50,
    "optimizer": "adamw",
    "learning_rate": 4e-3,
    "weight_decay": 0.01,
    "schedule": "cosine",
    "warm_up": 100,
    "clip": 1.0,
    "embedding_size": 0,
    "dropout_tokens": 0.05,
    "dropout_outputs": 0.4,
    "dropout_recurrent": 0.25,
    "average": "ema",
    "average_decay": 0.998,
}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "time-machine": {
        "elman": COMMON
        | {
            "hidden_size": 384,
            "epochs": 40,
            "learning_rate": 6e-3,
            "dropout_outputs": 0.3,
            "dropout_recurrent": 0.05,
        },
        "gru": COMMON | {"hidden_size": 384, "epochs": 40},
        "lstm": COMMON
        | {
            "hidden_size": 512,
            "layers": 2,
            "embedding_size": 64,
            "epochs": 60,
            "weight_decay": 0.1,
            "dropout_inputs": 0.2,
            "dropout_layers": 0.4,
            "dropout_outputs": 0.6,
            "dropout_recurrent": 0.4,
            "precision": "bfloat16",
        },
    },
    "tiny-shakespeare": {
        "lstm": COMMON
        | {
            "hidden_size": 640,
            "layers": 2,
            "embedding_size": 128,
            "epochs": 35,
            "window": 100,
            "learning_rate": 3e-3,
            "weight_decay": 0.05,
            "dropout_inputs": 0.1,
            "dropout_layers": 0.3,
            "dropout_outputs": 0.5,
            "dropout_recurrent": 0.3,
            "precision": "bfloat16",
        },
    },
}
RIVALS = {
    "time-machine": "Kneser–Ney order 7 1.430; plain PyTorch elman 1.663, gru 1.490, lstm 1.449",
    "tiny-shakespeare": "Kneser–Ney order 7 2.188 bits (1.517 nats); nanoGPT small 1.4697 nats",
}
QUICK = {"hidden_size": 64, "epochs": 1}


def main() -> None:
    arguments = parsed()
    results = arguments.out or HERE / "results" / f"{arguments.text}.json"
    results.parent.mkdir(parents=True, exist_ok=True)
    settings = SETTINGS[arguments.text]
    cells = [arguments.only] if arguments.only else list(settings)
    seeds = [0, 1, 2] if arguments.seed is None else [arguments.seed]
    for cell in cells:
        changes = dict(QUICK if arguments.quick else {}) | changed(arguments.set)
        options = {**settings[cell], **TEXTS[arguments.text], **changes, "model": cell}
        for seed in seeds:
            unit = {
                "text": arguments.text,
                "part": arguments.part,
                "options": options,
                "seed": seed,
            }
            if not any(same(unit, done) for done in stored(results)):
                found = run(unit, arguments.device, results.with_suffix(""), arguments.adapt)
                store(results, unit | found)
    show(arguments.text, stored(results))
    if arguments.json:
        print(json.dumps(stored(results)))


def run(unit: dict[str, Any], device: str, work: Path, adapt: list[float] | None) -> dict[str, Any]:
    """Train one model with one seed, and score it once."""
    options = presets.expand("quick", {**PARTS, **unit["options"], "seed": unit["seed"]})
    data = presets.data(options)
    parts = prepared.prepare(data, prepared.read(data))
    train, held_out = parts.train, parts.reported
    if unit["part"] == "choose":
        cut = round(0.9 * len(train))
        train, held_out = train[:cut], train[cut:]
    torch.manual_seed(unit["seed"])
    shape = presets.model(options, len(parts.vocab))
    model = LanguageModel.from_config(shape).to(device)
    training = Training(model, train, None, presets.settings(options, train))
    seconds = train_on(training, work, unit)
    with training.average.applied():
        score = metrics.evaluate(model, held_out)
        mixture = mixed(model, train, held_out, len(parts.vocab))
        learning = {}
        if adapt is not None:
            learning = learned(model, parts.vocab, train, held_out, adapt)
    return learning | {
        "nats": score.nats_per_token,
        "mixed_nats": mixture.score.nats_per_token,
        "mixed_weights": mixture.weights,
        "bits": score.bits_per_token,
        "tokens": score.tokens,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name()
        if device == "cuda"
        else f"{torch.get_num_threads()} CPU threads",
    }


def learned(
    model: LanguageModel, vocab: Any, train: Any, held_out: Any, adapt: list[float]
) -> dict[str, Any]:
    """The model while it learns from what it has read, alone and mixed with counting.

    Without a rate and a decay they are chosen on this very text, which is for `--part choose` only.
    """
    settings = dynamic.Adaptation(rate=adapt[0], decay=adapt[1]) if adapt else None
    if settings is None:
        settings = dynamic.choose(model, dynamic.gradient_sizes(model, train), held_out)
    found = evaluation.evaluate(
        model,
        vocab,
        held_out,
        train=train,
        mix=["kneser-ney:7"],
        counts=compression.expectations,
        adapt=settings,
    )
    assert found.adapted is not None
    assert found.online is not None
    assert found.bitwise is not None
    return {
        "adapted_nats": found.adapted.nats_per_token,
        "adaptation": [settings.rate, settings.decay],
        "adapted_mixed_nats": found.online.score.nats_per_token,
        "adapted_mixed_weights": dict(found.online.weights),
        "adapted_counts_nats": found.bitwise.score.nats_per_token,
        "adapted_counts_weights": dict(found.bitwise.weights),
    }


def mixed(model: LanguageModel, train: Any, held_out: Any, vocab_size: int) -> evaluation.Mixed:
    """The model and Kneser–Ney of order 7 together; each half is weighted by fitting the other."""
    counting = evaluation.kneser_ney(train, vocab_size, 7)
    log_p = [m.score(held_out)[1:] for m in (Network(model), counting)]
    return evaluation.mixed(np.stack(log_p), ("model", "kneser-ney:7"))


def train_on(training: Training, work: Path, unit: dict[str, Any]) -> float:
    """Train to the end from wherever this unit was left; returns the seconds it took in all."""
    cell = unit["options"]["model"]
    path = work.with_name(f".{work.name}-{unit['part']}-{cell}-{unit['seed']}.safetensors")
    before, began, saved = 0.0, time.monotonic(), time.monotonic()
    if path.exists():
        tensors, numbers = checkpoints.read(path, "unit")
        if numbers["unit"] == unit:
            training.load_state_dict(tensors, numbers)
            before = numbers["seconds"]
    for record in training.records():
        if time.monotonic() - saved > 30:
            saved = time.monotonic()
            tensors, numbers = training.state_dict()
            numbers |= {"unit": unit, "seconds": before + saved - began}
            checkpoints.write(path, "unit", tensors, numbers)
            print(
                f"{cell} {unit['seed']}: {training.progress:4.0%}, {record.nats:.3f} nats",
                flush=True,
            )
    path.unlink(missing_ok=True)
    return before + time.monotonic() - began


def stored(results: Path) -> list[dict[str, Any]]:
    return json.loads(results.read_text()) if results.exists() else []


def store(results: Path, unit: dict[str, Any]) -> None:
    write_text(results, json.dumps([*stored(results), unit], indent=1) + "\n")


def same(unit: dict[str, Any], done: dict[str, Any]) -> bool:
    return all(done[name] == value for name, value in unit.items())


def show(text: str, units: list[dict[str, Any]]) -> None:
    """One line per setting: mean and spread over its seeds."""
    by_settings: dict[str, list[dict[str, Any]]] = {}
    for unit in units:
        key = json.dumps([unit["part"], unit["options"]], sort_keys=True)
        by_settings.setdefault(key, []).append(unit)
    print(f"{'model':6} {'part':8} units seeds    nats  spread    bits seconds")
    for found in by_settings.values():
        nats = [unit["nats"] for unit in found]
        spread = statistics.stdev(nats) if len(nats) > 1 else float("nan")
        first = found[0]
        print(
            f"{first['options']['model']:6} {first['part']:8} {first['options']['hidden_size']:5} "
            f"{len(nats):5} {statistics.mean(nats):7.4f} {spread:7.4f} "
            f"{statistics.mean(u['bits'] for u in found):7.4f} "
            f"{statistics.mean(u['seconds'] for u in found):.0f}"
        )
    print("rivals:", RIVALS[text])


def changed(pairs: list[str]) -> dict[str, Any]:
    """`name=value` as typed, with the value as JSON reads it."""
    return {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in pairs)}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", choices=TEXTS, default="time-machine")
    parser.add_argument("--only", choices=("elman", "gru", "lstm"))
    parser.add_argument("--seed", type=int)
    parser.add_argument("--part", choices=("held-out", "choose"), default="held-out")
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION=VALUE")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--adapt", nargs="*", type=float, metavar="RATE DECAY")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="a small model, one epoch")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
