"""Build the optional CPU kernel; everything else about the package is in pyproject.toml."""

from glob import glob

from setuptools import Extension, setup

HOME = "src/elman/kernels/cpu"

# No libraries and no per-file flags: each variant asks for its instruction set in its own source.
# `optional`: without a C++ compiler the package installs all the same and says so when asked.
kernel = Extension(
    "elman.kernels.cpu._recurrence",
    sources=sorted(glob(f"{HOME}/*.cpp")),
    depends=sorted(glob(f"{HOME}/*.h")),
    extra_compile_args=[
        *("-std=c++17", "-O3", "-ffp-contract=fast", "-fvisibility=hidden"),
        *("-fno-exceptions", "-fno-rtti", "-g0", "-Wno-maybe-uninitialized"),
    ],
    language="c++",
    optional=True,
)

setup(ext_modules=[kernel])
