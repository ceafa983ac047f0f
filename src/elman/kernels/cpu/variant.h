/* One variant of the kernel: every function compiled for REAL with vectors of VECTOR_BYTES. */
#pragma once
#include "head.h"

namespace {

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
const Variant VARIANT = {NAME, forward, backward, head_forward, head_backward, squash<true>, squash<false>};
