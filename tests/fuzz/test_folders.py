"""Run folders with one thing wrong in them, against the rule in `harness.py`.

Where a command still succeeds on a folder whose weights, vocabulary or state were changed, it must
have said what it says of the whole one: no silently other numbers.
"""

import json
import shutil
from pathlib import Path

import pytest
from harness import cases, mutate_bytes, mutate_json, run_in_process

pytestmark = [pytest.mark.fuzz, pytest.mark.usefixtures("without_pictures")]

FILES = ("config.json", "vocab.json", "model.safetensors", "state.safetensors", "metrics.jsonl")
SEALED = ("vocab.json", "model.safetensors", "state.safetensors")
VERBS = {
    "evaluate": ["--json", "--no-baselines"],
    "generate": ["--json", "--length", "30"],
    "report": ["--json"],
    "resume": ["--json", "--epochs", "3"],
}


def command(verb: str, folder: Path) -> list[str]:
    if verb == "resume":
        return ["train", "--resume", str(folder), *VERBS[verb]]
    return [verb, str(folder), *VERBS[verb]]


def spoil(path: Path, chance) -> None:
    """One file deleted, replaced by a folder, or changed: its bytes, or its JSON."""
    kind = chance.random()
    if kind < 0.05:
        path.unlink()
    elif kind < 0.08:
        path.unlink()
        path.mkdir()
    elif kind < 0.5 and path.suffix == ".json":
        record = mutate_json(json.loads(path.read_bytes()), chance)
        path.write_bytes(json.dumps(record).encode("utf-8", "surrogatepass"))
    elif kind < 0.5 and path.suffix == ".jsonl":
        lines = path.read_text(encoding="utf-8").splitlines()
        at = chance.randrange(len(lines))
        lines[at] = json.dumps(mutate_json(json.loads(lines[at]), chance))
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    elif kind < 0.53:
        path.write_bytes(b"[" * 200_000)
    else:
        path.write_bytes(mutate_bytes(path.read_bytes(), chance))


def numbers(out: str) -> list:
    """What a command said, without what differs from folder to folder."""
    records = [json.loads(line) for line in out.splitlines()]
    moving = ("run", "report", "tokens_per_second")
    return [{k: v for k, v in r.items() if k not in moving} for r in records]


def test_run_folders(tmp_path, tiny_run):
    template = tmp_path / "template"
    shutil.copytree(tiny_run(), template)
    whole = {}
    for verb in VERBS:
        copy = shutil.copytree(template, tmp_path / "whole")
        seen = run_in_process(command(verb, copy))
        assert seen.status == 0, seen.err
        whole[verb] = numbers(seen.out)
        shutil.rmtree(copy)
    refused = accepted = 0
    for chance in cases(40):
        copy = shutil.copytree(template, tmp_path / "copy")
        name, verb = chance.choice(FILES), chance.choice(list(VERBS))
        before = (copy / name).read_bytes()
        spoil(copy / name, chance)
        gone = not (copy / name).exists()
        same = (copy / name).is_file() and (copy / name).read_bytes() == before
        seen = run_in_process(command(verb, copy))
        refused, accepted = refused + bool(seen.status), accepted + (not seen.status)
        if gone and verb == "resume":
            assert seen.status or name == "metrics.jsonl" or "no state.safetensors" in seen.err
        elif seen.status == 0 and not same and name in SEALED:
            assert numbers(seen.out) == whole[verb], f"{verb} with another {name}"
        shutil.rmtree(copy)
    assert refused > accepted / 10
    assert accepted
