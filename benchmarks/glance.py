"""What `--diagnose` costs: one look at the gradient against the updates between two looks.

    python benchmarks/glance.py [--json]

The quick preset's model (LSTM, 256 units) on python-reference, the default of 500 updates a look.
"""

import argparse
import json
import statistics
import time

from elman import diagnostics
from elman.language_model import LanguageModel
from elman.runs import presets
from elman.text import prepared
from elman.training import Training, Update

EVERY = 500


def main() -> None:
    parser = argparse.ArgumentParser(description="What --diagnose costs")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    options = presets.expand("quick", {})
    parts = prepared.prepare(presets.data(options), prepared.read(presets.data(options)))
    model = LanguageModel.from_config(presets.model(options, len(parts.vocab)))
    training = Training(model, parts.train, None, presets.settings(options))
    updates, looks = [], []
    began = time.perf_counter()
    for record in training.records():
        if isinstance(record, Update):
            updates.append(time.perf_counter() - began)
        if training.step % 10 == 0:
            began = time.perf_counter()
            diagnostics.glance(model, parts.validation, options["window"])
            looks.append(time.perf_counter() - began)
        if training.step == 50:
            break
        began = time.perf_counter()
    update, look = statistics.median(updates), statistics.median(looks)
    found = {"update_ms": 1e3 * update, "look_ms": 1e3 * look, "slowed": look / (EVERY * update)}
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"update {found['update_ms']:.1f} ms, look {found['look_ms']:.0f} ms")
    print(f"every {EVERY} updates, training is slowed by {found['slowed']:.2%}")


if __name__ == "__main__":
    main()
