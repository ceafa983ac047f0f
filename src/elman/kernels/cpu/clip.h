/* The norm of gradients, and clipping to it. */
#pragma once
#include "vector.h"

namespace {

constexpr int HALF_LANES = VECTOR_BYTES / 8; /* doubles in a vector */
typedef double wide __attribute__((vector_size(VECTOR_BYTES)));
typedef real narrow __attribute__((vector_size(HALF_LANES * sizeof(real)), aligned(sizeof(real)), may_alias));

/* Σ x², in float64. */
double sum_of_squares(const void *from, int64_t n) {
    constexpr int MANY = 4;
    const real *x = static_cast<const real *>(from);
    wide sums[MANY] = {};
    int64_t i = 0;
    for (; i + MANY * HALF_LANES <= n; i += MANY * HALF_LANES) FLATTEN for (int j = 0; j < MANY; j++) {
        wide v = __builtin_convertvector(*reinterpret_cast<const narrow *>(x + i + j * HALF_LANES), wide);
        sums[j] += v * v;
    }
    double total = 0;
    for (; i < n; i++) total += double(x[i]) * double(x[i]);
    for (int j = 0; j < MANY; j++)
        for (int k = 0; k < HALF_LANES; k++) total += sums[j][k];
    return total;
}

void scale(void *to, int64_t n, double factor) {
    real *x = static_cast<real *>(to);
    for (int64_t i = 0; i < n; i += LANES) store(x + i, load(x + i, n - i) * real(factor), n - i);
}

} // namespace
