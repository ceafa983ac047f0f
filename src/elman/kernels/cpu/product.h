/* Products of matrices, built from one register tile.
 *
 * A tile multiplies R rows of an operand by a panel of C·LANES packed columns, holding all R·C
 * sums in registers. Operands are `real`, or (with HALF) pairs of bfloat16 summed in float32. */
#pragma once
#include "job.h"
#include <cstdlib>
#include "vector.h"
#ifdef HALF
#include <immintrin.h>
#endif

namespace {

/* Memory for one call; `ok()` is false where there was none. */
template <class T> struct Buffer {
    T *data = nullptr;
    int64_t wanted;
    explicit Buffer(int64_t n) : wanted(n) {
        void *p = nullptr;
        if (n > 0 && posix_memalign(&p, 64, size_t(n) * sizeof(T)) == 0) data = static_cast<T *>(p);
    }
    ~Buffer() { free(data); }
    Buffer(const Buffer &) = delete;
    bool ok() const { return data || wanted <= 0; }
};

#ifdef HALF
using operand = uint16_t;
constexpr int PAIR = 2; /* steps of k that one multiply takes */
typedef uint32_t pair_bits __attribute__((may_alias));

INLINE operand to_operand(real x) { /* round to nearest even; NaN stays quiet NaN */
    uint32_t u;
    memcpy(&u, &x, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return uint16_t((u >> 16) | 0x40);
    return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
INLINE void store_operand(operand *p, vec v, int64_t n) {
    if (n < LANES) {
        for (int64_t i = 0; i < n; i++) p[i] = to_operand(v[i]);
        return;
    }
    __m256bh half = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &half, sizeof half);
}
INLINE __m512bh load_operands(const operand *p) { return (__m512bh)_mm512_loadu_si512(p); }
INLINE __m512bh broadcast(const operand *p) {
    return (__m512bh)_mm512_set1_epi32(int(*reinterpret_cast<const pair_bits *>(p)));
}
INLINE vec multiply_add(__m512bh a, __m512bh b, vec sum) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, a, b);
}
#else
using operand = real;
constexpr int PAIR = 1;
INLINE operand to_operand(real x) { return x; }
INLINE void store_operand(operand *p, vec v, int64_t n) { store(p, v, n); }
INLINE vec load_operands(const operand *p) { return load(p); }
INLINE real broadcast(const operand *p) { return *p; }
INLINE vec multiply_add(real a, vec b, vec sum) { return sum + b * a; }
#endif

constexpr int PANEL = PAIR * LANES; /* operands of one packed vector */
constexpr int SUMS = REGISTERS * 3 / 4;

INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

/* A row of operands is padded to whole vectors, and past them so that rows of a power-of-two
 * width do not fall on the same cache lines. */
INLINE int64_t padded(int64_t k) { return ceil_div(k, 2 * LANES) * 2 * LANES + LANES; }

/* out[r][c] = Σ_k a[r][k] panel[k][c]; `a` steps by `row` per row and `step` per k (or pair). */
template <int C, int R>
void tile(const operand *a, int64_t row, int64_t step, const operand *panel, int64_t k, real *out) {
    vec sums[R][C];
    FLATTEN for (int r = 0; r < R; r++) FLATTEN for (int c = 0; c < C; c++) sums[r][c] = vec{};
    for (int64_t i = 0; i < k; i++, a += step, panel += C * PANEL) {
        decltype(load_operands(panel)) b[C];
        FLATTEN for (int c = 0; c < C; c++) b[c] = load_operands(panel + c * PANEL);
        FLATTEN for (int r = 0; r < R; r++) {
            auto x = broadcast(a + r * row);
            FLATTEN for (int c = 0; c < C; c++) sums[r][c] = multiply_add(x, b[c], sums[r][c]);
        }
    }
    FLATTEN for (int r = 0; r < R; r++) FLATTEN for (int c = 0; c < C; c++)
        store(out + (r * C + c) * LANES, sums[r][c]);
}

template <int C> constexpr int ROWS = SUMS / C;

template <int C, int R = ROWS<C>>
INLINE void tile_of(int rows, const operand *a, int64_t row, const operand *panel, int64_t k, real *out) {
    if constexpr (R > 1)
        if (rows < R) return tile_of<C, R - 1>(rows, a, row, panel, k, out);
    tile<C, R>(a, row, PAIR, panel, k, out);
}

/* Visit n items in as few groups of at most `most` as possible, of nearly equal size. */
template <class F> INLINE void groups(int64_t n, int64_t most, F &&visit) {
    int64_t count = ceil_div(n, most);
    for (int64_t g = 0; g < count; g++) visit(n * g / count, n * (g + 1) / count);
}

/* Panels of W for x ↦ x Wᵀ. Panel p holds, for one block of units, a vector per gate (or, where
 * there is one gate, two neighbouring blocks): everything one tile needs to finish those units. */
struct Layout {
    int64_t gates, units;
    int vectors() const { return gates == 1 ? 2 : int(gates); }
    int64_t blocks() const { return gates == 1 ? 2 : 1; } /* blocks of units in a panel */
    int64_t panels() const { return ceil_div(units, blocks() * LANES); }
    int64_t unit(int64_t panel, int c) const { return (panel * blocks() + (gates == 1 ? c : 0)) * LANES; }
    int64_t gate(int c) const { return gates == 1 ? 0 : c; }
    int64_t size(int64_t k) const { return panels() * vectors() * ceil_div(k, PAIR) * PANEL; }
};

void pack_transposed(Layout at, int64_t p, const real *W, int64_t K, operand *out) {
    int64_t k_steps = ceil_div(K, PAIR), width = at.vectors() * PANEL;
    out += p * width * k_steps;
    for (int c = 0; c < at.vectors(); c++) {
        int64_t unit = at.unit(p, c), n = at_most(at.units - unit, LANES);
        const real *w = W + (at.gate(c) * at.units + unit) * K;
        for (int64_t k = 0; k < k_steps * PAIR; k++) {
            operand *to = out + k / PAIR * width + c * PANEL + k % PAIR;
            for (int64_t i = 0; i < LANES; i++)
                to[i * PAIR] = i < n && k < K ? to_operand(w[i * K + k]) : operand(0);
        }
    }
}

/* Panels of W for y ↦ y W: two vectors of columns each. */
void pack_straight(int64_t p, const real *W, int64_t K, int64_t N, operand *out) {
    int64_t k_steps = ceil_div(K, PAIR);
    out += p * 2 * PANEL * k_steps;
    for (int64_t k = 0; k < k_steps * PAIR; k++)
        for (int c = 0; c < 2; c++) {
            operand *to = out + k / PAIR * 2 * PANEL + c * PANEL + k % PAIR;
            int64_t column = (2 * p + c) * LANES, n = k < K ? at_most(N - column, LANES) : 0;
            for (int64_t i = 0; i < LANES; i++)
                to[i * PAIR] = i < n ? to_operand(W[k * N + column + i]) : operand(0);
        }
}

#ifndef HALF
/* The same sums for a few rows without packing: each row of W is read once, where it lies. */
template <int R> void dots(const real *h, int64_t ld, const real *W, int64_t K, int64_t n, real *out, int64_t row) {
    for (int64_t i = 0; i < n; i += 4) {
        vec sums[4][R] = {};
        const real *w[4];
        FLATTEN for (int j = 0; j < 4; j++) w[j] = W + at_most(i + j, n - 1) * K;
        for (int64_t k = 0; k < K; k += LANES) FLATTEN for (int j = 0; j < 4; j++) {
            vec x = load(w[j] + k, K - k);
            FLATTEN for (int r = 0; r < R; r++) sums[j][r] += x * load(h + r * ld + k);
        }
        FLATTEN for (int j = 0; j < 4; j++) FLATTEN for (int r = 0; r < R; r++)
            if (i + j < n) out[r * row + i + j] = sum(sums[j][r]);
    }
}

constexpr int64_t FEW = 4;

INLINE void dots_of(int64_t rows, const real *h, int64_t ld, const real *W, int64_t K, int64_t n, real *out, int64_t row) {
    if (rows == 1) return dots<1>(h, ld, W, K, n, out, row);
    if (rows == 2) return dots<2>(h, ld, W, K, n, out, row);
    if (rows == 3) return dots<3>(h, ld, W, K, n, out, row);
    dots<4>(h, ld, W, K, n, out, row);
}
#endif

/* One row of reals as operands, with zeros up to a whole number of vectors. */
INLINE void pack_row(const real *from, int64_t n, operand *to) {
    for (int64_t k = 0; k < n; k += LANES) store_operand(to + k, load(from + k, n - k), LANES);
}

/* Y (S, N) = X (S, K) · panels + bias, rows [first, last). `scratch` holds ROWS_AT_ONCE rows of X. */
struct Product {
    const real *X;
    int64_t K;
    const operand *panels; /* of two vectors */
    const real *bias;
    real *Y;
    int64_t N, y_stride;

    static constexpr int64_t ROWS_AT_ONCE = 4 * ROWS<2>;
    int64_t scratch() const { return ROWS_AT_ONCE * padded(K); }

    void run(int64_t first, int64_t last, operand *x) const {
        int64_t ld = padded(K), k_steps = ceil_div(K, PAIR);
        groups(last - first, ROWS_AT_ONCE, [&](int64_t from, int64_t to) {
            for (int64_t s = from; s < to; s++) pack_row(X + (first + s) * K, K, x + (s - from) * ld);
            for (int64_t n = 0; n < N; n += 2 * LANES)
                groups(to - from, ROWS<2>, [&](int64_t lo, int64_t hi) {
                    real out[SUMS * LANES];
                    tile_of<2>(int(hi - lo), x + lo * ld, ld, panels + n / LANES * k_steps * PANEL, k_steps, out);
                    for (int64_t r = lo; r < hi; r++) finish(first + from + r, n, out + (r - lo) * 2 * LANES);
                });
        });
    }
    void finish(int64_t row, int64_t n, const real *sums) const {
        for (int64_t c = n; c < n + 2 * LANES && c < N; c += LANES) {
            vec y = load(sums + c - n);
            if (bias) y += load(bias + c, N - c);
            store(Y + row * y_stride + c, y, N - c);
        }
    }
};

/* dW (M, N) += Σ_t Σ_b A_tb ⊗ B_tb for rows [first, last) of dW, and db += Σ_t Σ_b A_tb.
 *
 * Each step of time is summed by itself and then added, the last step first: about as accurate as
 * autograd's own order, and independent of how time was cut into pieces. */
struct Outer {
    int64_t T, B;
    const real *A;
    int64_t M, a_stride;
    const real *X;
    int64_t N;
    real *dW, *db;

    static constexpr int R = SUMS / 4, C = 2; /* half the registers hold the running totals */
    int64_t pairs() const { return ceil_div(B, PAIR); }
    int64_t chunk() const { /* steps of time whose packed X stays in the second-level cache */
        int64_t bytes = pairs() * ceil_div(N, C * LANES) * C * PANEL * int64_t(sizeof(operand));
        int64_t steps = (384 << 10) / bytes;
        return steps < 1 ? 1 : at_most(steps, T);
    }
    int64_t x_size() const { return chunk() * pairs() * ceil_div(N, C * LANES) * C * PANEL; }
    int64_t a_size() const { return chunk() * pairs() * R * PAIR; }

    /* X of steps [t0, t0 + steps), latest first, as panels [column block][step][pair][vector]. */
    void pack_x(int64_t t0, int64_t steps, operand *out) const {
        int64_t width = C * PANEL, rows = steps * pairs();
        for (int64_t s = 0; s < steps; s++)
            for (int64_t b = 0; b < pairs() * PAIR; b++) {
                const real *x = X + ((t0 + steps - 1 - s) * B + b) * N;
                operand *to = out + (s * pairs() + b / PAIR) * width + b % PAIR;
                for (int64_t n = 0; n < ceil_div(N, C * LANES) * C * LANES; n += LANES) {
                    vec v = b < B ? load(x + n, N - n) : vec{};
                    put(to + n / (C * LANES) * rows * width + n / LANES % C * PANEL, v);
                }
            }
    }
    static INLINE void put(operand *to, vec v) {
        if constexpr (PAIR == 1)
            store_operand(to, v, LANES);
        else
            for (int i = 0; i < LANES; i++) to[i * PAIR] = to_operand(v[i]);
    }
    /* Columns [m, m + rows) of A, as [step][pair][column]; adds their sums to db. */
    void pack_a(int64_t t0, int64_t steps, int64_t m, int64_t rows, operand *out) const {
        for (int64_t s = 0; s < steps; s++) {
            real total[R] = {};
            for (int64_t b = 0; b < pairs() * PAIR; b++) {
                const real *a = A + ((t0 + steps - 1 - s) * B + b) * a_stride + m;
                operand *to = out + (s * pairs() + b / PAIR) * R * PAIR + b % PAIR;
                FLATTEN for (int r = 0; r < R; r++) {
                    real x = r < rows && b < B ? a[r] : real(0);
                    to[r * PAIR] = to_operand(x);
                    total[r] += x;
                }
            }
            if (db)
                for (int64_t r = 0; r < rows; r++) db[m + r] += total[r];
        }
    }
    void add(int64_t steps, int64_t m, int64_t rows, int64_t n, const operand *a, const operand *x) const {
        vec totals[R][C];
        FLATTEN for (int r = 0; r < R; r++) FLATTEN for (int c = 0; c < C; c++)
            totals[r][c] = r < rows ? load(dW + (m + r) * N + n + c * LANES, left(n, c)) : vec{};
        for (int64_t s = 0; s < steps; s++) {
            vec sums[R][C];
            FLATTEN for (int r = 0; r < R; r++) FLATTEN for (int c = 0; c < C; c++) sums[r][c] = vec{};
            for (int64_t b = 0; b < pairs(); b++, a += R * PAIR, x += C * PANEL)
                FLATTEN for (int r = 0; r < R; r++) {
                    auto y = broadcast(a + r * PAIR);
                    FLATTEN for (int c = 0; c < C; c++)
                        sums[r][c] = multiply_add(y, load_operands(x + c * PANEL), sums[r][c]);
                }
            FLATTEN for (int r = 0; r < R; r++) FLATTEN for (int c = 0; c < C; c++) totals[r][c] += sums[r][c];
        }
        FLATTEN for (int r = 0; r < R; r++) FLATTEN for (int c = 0; c < C; c++)
            if (r < rows) store(dW + (m + r) * N + n + c * LANES, totals[r][c], left(n, c));
    }
    int64_t left(int64_t n, int c) const {
        int64_t k = N - n - c * LANES;
        return k < 0 ? 0 : k;
    }
    void run(int64_t first, int64_t last, operand *a, operand *x) const {
        for (int64_t stop = T; stop > 0; stop -= chunk()) {
            int64_t steps = at_most(chunk(), stop), t0 = stop - steps, rows = steps * pairs();
            pack_x(t0, steps, x);
            groups(last - first, R, [&](int64_t lo, int64_t hi) {
                pack_a(t0, steps, first + lo, hi - lo, a);
                for (int64_t n = 0; n < N; n += C * LANES)
                    add(steps, first + lo, hi - lo, n, a, x + n / (C * LANES) * rows * C * PANEL);
            });
        }
    }
};

} // namespace
