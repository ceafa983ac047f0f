// What a described cell may call, by the names under which its equations are written (cells/expressions.py).
#pragma once
#include "ptx.cuh"

// NVRTC lacks these two, by which constants are written.
#define __builtin_inf() __uint_as_float(0x7f800000u)
#define __builtin_nan(kind) __uint_as_float(0x7fffffffu)

typedef float real;
typedef float vec;

DEVICE vec splat(real x) { return x; }
DEVICE vec vexp(vec x) { return exponential(x); }
DEVICE vec vtanh(vec x) { return hyperbolic_tangent(x); }
DEVICE vec vsigmoid(vec x) { return sigmoid(x); }
DEVICE vec quotient(vec a, vec b) { return DTYPE == FP32 ? a / b : __fdividef(a, b); }
DEVICE vec vlog(vec x) { return DTYPE == FP32 ? logf(x) : __logf(x); }

// log(1 + x), by its series where 1 + x keeps too little of x.
DEVICE vec vlog1p(vec x) {
    if constexpr (DTYPE == FP32) return log1pf(x);
    return fabsf(x) < 0.01f ? x * (1.0f - x * (0.5f - x * 0.33333333f)) : __logf(1.0f + x);
}
DEVICE vec vexpm1(vec x) { return expm1f(x); }
DEVICE vec vsqrt(vec x) { return sqrtf(x); }
DEVICE vec vsin(vec x) { return sinf(x); }
DEVICE vec vcos(vec x) { return cosf(x); }
DEVICE vec verf(vec x) { return erff(x); }
DEVICE vec magnitude(vec x) { return fabsf(x); }

// As torch: a NaN on either side is the result.
DEVICE vec vmax(vec a, vec b) {
    vec y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
DEVICE vec vmin(vec a, vec b) {
    vec y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
