"""Names of devices: any that PyTorch knows and finds, others refused before work starts."""

import pytest
import torch

from elman.cli import device as cli
from elman.cli import run
from elman.errors import UserError
from elman.runs.device import is_here, pick, remark


def machine(monkeypatch, kind: str | None, count: int = 1) -> None:
    """Pretend to be on a machine with so many of a kind of accelerator."""
    there = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: there)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count if kind else 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")


def test_a_machine_without_an_accelerator(monkeypatch):
    machine(monkeypatch, None)
    assert pick("auto") == pick("cpu") == pick("cpu:0") == "cpu"
    for name in ("cuda", "cuda:1"):
        with pytest.raises(UserError, match=f"{name}: PyTorch finds no GPU here"):
            pick(name)
    for name in ("mps", "xpu", "meta"):
        with pytest.raises(UserError, match=f"PyTorch finds no {name} here"):
            pick(name)


def test_several_gpus(monkeypatch):
    machine(monkeypatch, "cuda", count=2)
    assert pick("auto") == "cuda"
    assert [pick(name) for name in ("cuda", "cuda:0", "cuda:1")] == ["cuda", "cuda:0", "cuda:1"]
    with pytest.raises(UserError, match="finds 2 here") as refusal:
        pick("cuda:2")
    assert refusal.value.hint == "--device cuda:1"
    assert is_here("cuda:1")
    assert not is_here("cuda:2")


def test_mps_runs_the_reference_and_says_so(monkeypatch, capsys):
    machine(monkeypatch, "mps")
    assert pick("auto") == "cpu"
    assert cli.pick("mps") == "mps"
    assert "no kernels of its own for mps: the reference" in capsys.readouterr().err
    with pytest.raises(UserError) as refusal:
        pick("cuda")
    assert refusal.value.hint == "--device cpu, or --device mps"
    assert remark("cpu") == remark("cuda:1") == ""


@pytest.mark.parametrize("name", ["tpu", "", "cuda:x", "cuda:-1", "1"])
def test_names_that_pytorch_does_not_know(name):
    with pytest.raises(UserError, match="unknown device") as refusal:
        pick(name)
    assert "auto, cpu, cuda" in refusal.value.hint


@pytest.mark.parametrize("verb", ["evaluate", "generate"])
def test_verbs_refuse_before_they_read_the_text(verb, tiny_run, monkeypatch, capsys):
    folder = tiny_run()  # which reads the text, if no test before this one has trained it
    monkeypatch.setattr("elman.runs.Run.splits", lambda self: pytest.fail("it read the text"))
    assert run([verb, str(folder), "--device", "xpu:3"]) == 2
    assert "--device xpu:3: PyTorch finds no xpu here" in capsys.readouterr().err


def test_a_missing_cpu_kernel_is_said_with_what_to_install(monkeypatch):
    from elman.kernels.cpu import KERNEL

    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    assert "ELMAN_KERNELS=reference" in remark("cpu")
    monkeypatch.delenv("ELMAN_KERNELS")
    monkeypatch.setattr(KERNEL, "library", None)
    assert "install a C++ compiler" in remark("cpu")
