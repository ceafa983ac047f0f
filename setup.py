"""Build the optional native code; everything else about the package is in pyproject.toml."""

import runpy
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HOME = "src/elman/kernels/cpu"
COMPRESSION = "src/elman/compression"
digest = runpy.run_path("src/elman/built.py")["digest"]


class Build(build_ext):
    """Builds what can be built; where that fails, no older library goes into the package.

    An installation goes on without, and elman says so when it is used; `python setup.py build_ext`,
    which was asked for nothing else, fails.
    """

    def build_extension(self, ext: Extension) -> None:
        ext.optional = "build_ext" not in self.distribution.commands
        try:
            super().build_extension(ext)
        except Exception:  # of whatever kind: it is raised again
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
            raise


# No libraries and no per-file flags: each variant asks for its instruction set in its own source.
kernel = Extension(
    "elman.kernels.cpu._recurrence",
    sources=sorted(glob(f"{HOME}/*.cpp")),
    depends=sorted(glob(f"{HOME}/*.h")),
    define_macros=[("ELMAN_SOURCES", f'"{digest(HOME)}"')],
    extra_compile_args=[
        *("-std=c++17", "-O3", "-ffp-contract=fast", "-fvisibility=hidden"),
        *("-fno-exceptions", "-fno-rtti", "-g0", "-Wno-maybe-uninitialized"),
    ],
    language="c++",
)

# Its bits must be the same everywhere: every operation rounded by itself, in the order written.
compressor = Extension(
    "elman.compression._compressor",
    sources=sorted(glob(f"{COMPRESSION}/*.cpp")),
    depends=sorted(glob(f"{COMPRESSION}/*.h")),
    define_macros=[("ELMAN_SOURCES", f'"{digest(COMPRESSION)}"')],
    extra_compile_args=[
        *("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"),
        *("-fno-fast-math", "-fno-exceptions", "-fno-rtti", "-g0"),
        *("-Wno-array-bounds", "-Wno-psabi"),
    ],
    language="c++",
)

setup(ext_modules=[kernel, compressor], cmdclass={"build_ext": Build})
