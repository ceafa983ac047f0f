/* One variant of the kernel: every function compiled for REAL with vectors of VECTOR_BYTES. */
#pragma once
#include "backward.h"
#include "clip.h"
#include "draw.h"
#include "masks.h"
#include "travel.h"
#include "twice.h"

namespace {

#ifdef HALF
constexpr decltype(Variant::linear) few_linear = nullptr;
#else
/* y = x Wᵀ + b for a few rows: a block of W serves all of them from the first-level cache while the next is fetched. */
void few_linear(const void *x, const void *W, const void *b, void *y, int64_t rows, int64_t K, int64_t N, int64_t threads) {
    const real *from = static_cast<const real *>(x), *weights = static_cast<const real *>(W);
    const real *bias = static_cast<const real *>(b);
    real *to = static_cast<real *>(y);
    constexpr int64_t BLOCK = 16384 / sizeof(real), LINE = 64 / sizeof(real);
    int64_t block = ceil_div(BLOCK, K * LANES) * LANES, blocks = ceil_div(N, block);
    threads = worth_two(rows * K * N) ? threads : 1;
    each(threads, threads, [&](int64_t i) {
        int64_t end = at_most(N, blocks * (i + 1) / threads * block);
        for (int64_t n = blocks * i / threads * block; n < end; n += block) {
            int64_t units = at_most(block, end - n);
            for (int64_t k = (n + units) * K, stop = at_most(n + units + block, end) * K; k < stop; k += LINE) __builtin_prefetch(weights + k);
            for (int64_t s = 0; s < rows; s += FEW)
                dots_of<false>(at_most(FEW, rows - s), from + s * K, K, weights + n * K, K, units, to + s * N + n, N);
            for (int64_t s = 0; bias && s < rows; s++)
                for (int64_t u = n; u < n + units; u++) to[s * N + u] += bias[u];
        }
    });
}
#endif

constexpr decltype(Variant::draw) draws = DOUBLE ? draw : nullptr;
constexpr decltype(Variant::widen) widens = DOUBLE ? widen : nullptr;

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
                         few_linear, draws,          widens,   sum_of_squares, scale, squash<true>, squash<false>, keep, drop};
