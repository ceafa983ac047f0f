"""A native library runs beside the sources it was built from, or not at all."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import elman
from elman import built
from elman.compression import library as compressor
from elman.kernels.cpu import library as kernel

SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))
ROOT = Path(__file__).parent.parent
NATIVE = [(kernel, "kernel.cpp"), (compressor, "library.cpp")]


@pytest.mark.parametrize(("native", "source"), NATIVE, ids=["kernel", "compressor"])
def test_a_library_is_not_used_once_its_sources_have_changed(native, source, tmp_path):
    """Its entries and structures may be the same, and what it computes another."""
    folder = shutil.copytree(Path(native.__file__).parent, tmp_path / "native")
    if (copy := built.path(folder, native.NAME)) is None:
        pytest.skip("it was not built")
    native.load(copy)
    with open(folder / source, "a") as file:
        file.write("/* a change */\n")
    none, why = built.find(folder, native.NAME, native.load)
    assert none is None
    assert "the C++ beside it has changed since" in why
    assert "python setup.py build_ext --inplace --force" in why


def test_a_damaged_compressor_is_not_used_and_the_wait_is_announced(tmp_path):
    home = shutil.copytree(Path(elman.__file__).parent, tmp_path / "src" / "elman")
    if (library := built.path(home / "compression", compressor.NAME)) is None:
        pytest.skip("it was not built")
    library.write_bytes(b"of another machine")
    primer = home / "compression" / "primer.py"  # read first, at that speed
    primer.write_text('PRIMER = b"a short page"\n')
    (tmp_path / "text").write_bytes(b"a")
    words = [sys.executable, "-m", "elman", "compress", str(tmp_path / "text"), "--level", "fast"]
    env = os.environ | {"PYTHONPATH": str(tmp_path / "src")}
    seen = subprocess.run(words, capture_output=True, text=True, timeout=120, env=env)
    assert seen.returncode == 0, seen.stderr
    assert "note: the plain compressor runs, a hundred bytes a second" in seen.stderr
    assert "build it again" in seen.stderr


def built_with(compiler: str, checkout: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """What setup.py does in a checkout where this is the compiler."""
    env = os.environ | {"CC": compiler, "CXX": compiler}
    words = [sys.executable, "setup.py", *command]
    return subprocess.run(words, cwd=checkout, capture_output=True, text=True, timeout=120, env=env)


@pytest.mark.parametrize("compiler", ["false", "/nowhere/g++"])
def test_where_nothing_compiles_an_installation_goes_on_without_an_older_library(
    compiler, tmp_path
):
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("pyproject.toml asks for a newer setuptools")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    package = shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.so"))
    asked = built_with(compiler, tmp_path, "build_ext", "--inplace", "--build-lib", "made")
    assert asked.returncode != 0, "whoever asks for nothing else must hear that it failed"
    older = tmp_path / "made" / "elman" / "kernels" / "cpu" / f"{kernel.NAME}{SUFFIX}"
    older.parent.mkdir(parents=True, exist_ok=True)
    older.write_bytes(b"of an older build")
    os.utime(older, (0, 0))
    installed = built_with(compiler, tmp_path, "build", "--build-lib", "made")
    assert installed.returncode == 0, installed.stderr
    assert not older.exists()
    assert (tmp_path / "made" / "elman" / "built.py").exists()
    assert not list(package.rglob("*.so"))
