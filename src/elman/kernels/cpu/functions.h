/* What a described cell may call, on vectors. The rarer ones lane by lane, as the C library has them. */
#pragma once
#include "vector.h"
#include <cmath>

namespace {

#define LANEWISE(NAME, FUNCTION)                                                                                 \
    INLINE vec NAME(vec x) {                                                                                      \
        vec y;                                                                                                    \
        for (int i = 0; i < LANES; i++) y[i] = FUNCTION(x[i]);                                                    \
        return y;                                                                                                 \
    }
LANEWISE(vlog, std::log)
LANEWISE(vlog1p, std::log1p)
LANEWISE(vexpm1, std::expm1)
LANEWISE(vsqrt, std::sqrt)
LANEWISE(vsin, std::sin)
LANEWISE(vcos, std::cos)
LANEWISE(verf, std::erf)
#undef LANEWISE

/* e^x: (e^{x/2})² where 2ⁿ is beyond the numbers, 0 where it is below the normal ones. */
INLINE vec vexp(vec x) {
    const vec high = splat(DOUBLE ? real(708) : real(87)), low = -high;
    vec half = x > high ? real(0.5) * x : x;
    half = half > high ? high : half < low ? low : half;
    vec power, p = expm1_reduced(half, power), y = power * p + power;
    return x > high ? y * y : x < low ? vec{} : y;
}

/* As torch: a NaN on either side is the result. */
INLINE vec vmax(vec a, vec b) { return (a > b) | (a != a) ? a : b; }
INLINE vec vmin(vec a, vec b) { return (a < b) | (a != a) ? a : b; }

} // namespace
