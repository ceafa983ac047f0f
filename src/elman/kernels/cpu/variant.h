/* One variant of the kernel: every function compiled for REAL with vectors of VECTOR_BYTES. */
#pragma once
#include "backward.h"
#include "clip.h"
#include "masks.h"
#include "travel.h"
#include "twice.h"

namespace {

#ifdef HALF
constexpr decltype(Variant::linear) few_linear = nullptr;
#else
void few_linear(const void *x, const void *W, const void *b, void *y, int64_t rows, int64_t K, int64_t N) {
    const real *from = static_cast<const real *>(x), *weights = static_cast<const real *>(W);
    const real *bias = static_cast<const real *>(b);
    real *to = static_cast<real *>(y);
    for (int64_t s = 0; s < rows; s += FEW)
        dots_of<false>(at_most(FEW, rows - s), from + s * K, K, weights, K, N, to + s * N, N);
    for (int64_t s = 0; bias && s < rows; s++)
        for (int64_t n = 0; n < N; n++) to[s * N + n] += bias[n];
}
#endif

template <bool TANH_ELSE_SIGMOID> void squash(const void *from, void *to, int64_t n) {
    const real *x = static_cast<const real *>(from);
    real *y = static_cast<real *>(to);
    for (int64_t i = 0; i < n; i += LANES) {
        vec v = load(x + i, n - i);
        store(y + i, TANH_ELSE_SIGMOID ? vtanh(v) : vsigmoid(v), n - i);
    }
}

} // namespace

extern const Variant VARIANT;
const Variant VARIANT = {NAME,       forward,        backward, head,         travel,        along, back_twice,
                         few_linear, sum_of_squares, scale,    squash<true>, squash<false>, keep,  drop};
