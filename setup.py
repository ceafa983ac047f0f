"""Build the optional native code; everything else about the package is in pyproject.toml."""

from glob import glob

from setuptools import Extension, setup

HOME = "src/elman/kernels/cpu"
COMPRESSION = "src/elman/compression"

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

# Its bits must be the same everywhere: every operation rounded by itself, in the order written.
compressor = Extension(
    "elman.compression._compressor",
    sources=sorted(glob(f"{COMPRESSION}/*.cpp")),
    depends=sorted(glob(f"{COMPRESSION}/*.h")),
    extra_compile_args=[
        *("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"),
        *("-fno-fast-math", "-fno-exceptions", "-fno-rtti", "-g0"),
        *("-Wno-array-bounds", "-Wno-psabi"),
    ],
    language="c++",
    optional=True,
)

setup(ext_modules=[kernel, compressor])
