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

typedef word word_bits __attribute__((may_alias)); /* a lane of operands */

/* Memory for one call; `ok()` is false where there was none. */
template <class T> struct Buffer {
    int64_t wanted;
    T *data;
    explicit Buffer(int64_t n) : wanted(n), data(n > 0 ? static_cast<T *>(borrow(n * int64_t(sizeof(T)))) : nullptr) {}
    ~Buffer() {
        if (data) give_back(data, wanted * int64_t(sizeof(T)));
    }
    Buffer(const Buffer &) = delete;
    bool ok() const { return data || wanted <= 0; }
};

#ifdef HALF
using operand = uint16_t;
constexpr int PAIR = 2; /* steps of k that one multiply takes */

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
/* Row k and row k + 1 of a matrix, lane by lane side by side. */
INLINE void store_rows(operand *p, const vec (&rows)[PAIR]) {
    __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)rows[0]));
    __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)rows[1]));
    _mm512_storeu_si512(p, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}
INLINE __m512bh load_operands(const operand *p) { return (__m512bh)_mm512_loadu_si512(p); }
INLINE __m512bh broadcast(const operand *p) {
    return (__m512bh)_mm512_set1_epi32(int(*reinterpret_cast<const word_bits *>(p)));
}
INLINE vec multiply_add(__m512bh a, __m512bh b, vec sum) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, a, b);
}
#else
using operand = real;
constexpr int PAIR = 1;
INLINE operand to_operand(real x) { return x; }
INLINE void store_operand(operand *p, vec v, int64_t n) { store(p, v, n); }
INLINE void store_rows(operand *p, const vec (&rows)[PAIR]) { store(p, rows[0]); }
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

/* sums[r][c] += a[r] panel[c] of one k (or pair). */
template <int C, int R> INLINE void meet(const operand *a, int64_t row, const operand *panel, vec (&sums)[R][C]) {
    decltype(load_operands(panel)) b[C];
    FLATTEN for (int c = 0; c < C; c++) b[c] = load_operands(panel + c * PANEL);
    if constexpr (R > 1 && R < 4) FLATTEN for (int c = 0; c < C; c++) hold(b[c]);
    FLATTEN for (int r = 0; r < R; r++) {
        auto x = broadcast(a + r * row);
        FLATTEN for (int c = 0; c < C; c++) sums[r][c] = multiply_add(x, b[c], sums[r][c]);
    }
}

/* out[r][c] = Σ_k a[r][k] panel[k][c]; `a` steps by `row` per row and `step` per k (or pair). Of panels that are
 * WIDE vectors wide, the first C. A sum that was `begun` goes on from what `out` holds. */
template <int C, int R, int WIDE = C>
void tile(const operand *a, int64_t row, int64_t step, const operand *panel, int64_t k, real *out, bool begun) {
    vec sums[R][C];
    FLATTEN for (int r = 0; r < R; r++) FLATTEN for (int c = 0; c < C; c++)
        sums[r][c] = begun ? load(out + (r * WIDE + c) * LANES) : vec{};
    for (int64_t i = 0; i < k; i++, a += step, panel += WIDE * PANEL) meet<C, R>(a, row, panel, sums);
    FLATTEN for (int r = 0; r < R; r++) FLATTEN for (int c = 0; c < C; c++)
        store(out + (r * WIDE + c) * LANES, sums[r][c]);
}

template <int C> constexpr int ROWS = C < SUMS ? SUMS / C : 1;

template <int C, int R = ROWS<C>>
INLINE void tile_of(int rows, const operand *a, int64_t row, const operand *panel, int64_t k, real *out, bool begun = false) {
    if constexpr (R > 1)
        if (rows < R) return tile_of<C, R - 1>(rows, a, row, panel, k, out, begun);
    tile<C, R>(a, row, PAIR, panel, k, out, begun);
}

/* The same for a panel of two vectors of which only `columns` are wanted. */
template <int R = ROWS<2>>
INLINE void half_tile_of(int rows, const operand *a, int64_t row, const operand *panel, int64_t k, real *out, bool begun) {
    if constexpr (R > 1)
        if (rows < R) return half_tile_of<R - 1>(rows, a, row, panel, k, out, begun);
    tile<1, R, 2>(a, row, PAIR, panel, k, out, begun);
}
INLINE void two_vectors(int64_t columns, int rows, const operand *a, int64_t row, const operand *panel, int64_t k, real *out,
                        bool begun = false) {
    if (columns > LANES) return tile_of<2>(rows, a, row, panel, k, out, begun);
    half_tile_of(rows, a, row, panel, k, out, begun);
}

/* Visit n items in as few groups of at most `most` as possible, of nearly equal size. */
template <class F> INLINE void groups(int64_t n, int64_t most, F &&visit) {
    int64_t count = ceil_div(n, most);
    for (int64_t g = 0; g < count; g++) visit(n * g / count, n * (g + 1) / count);
}

/* One row of reals as operands, with zeros up to a whole number of vectors. */
INLINE void pack_row(const real *from, int64_t n, operand *to) {
    for (int64_t k = 0; k < n; k += LANES) store_operand(to + k, load(from + k, n - k), LANES);
}

/* Rows of n reals as operands: where they lie, unless they must be rounded or would fall on the same cache lines. */
struct Operands {
    const operand *first;
    int64_t stride;
};
INLINE Operands operands_of(const real *from, int64_t stride, int64_t rows, int64_t n, operand *room) {
#ifndef HALF
    if (stride * int64_t(sizeof(real)) % 2048) return {from, stride};
#endif
    for (int64_t r = 0; r < rows; r++) pack_row(from + r * stride, n, room + r * padded(n));
    return {room, padded(n)};
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
    int64_t panel_size(int64_t k) const { return vectors() * ceil_div(k, PAIR) * PANEL; }
    int64_t size(int64_t k) const { return panels() * panel_size(k); }
};

/* Lanes of two vectors whose numbers differ by D, exchanged across the diagonal. */
template <int D> INLINE void exchange(vec &a, vec &b) {
#ifdef __clang__
    vec low, high;
    FLATTEN for (int j = 0; j < LANES; j++) low[j] = j & D ? b[j & ~D] : a[j], high[j] = j & D ? b[j] : a[j | D];
#else
    bits from_low, from_high;
    FLATTEN for (int j = 0; j < LANES; j++) {
        from_low[j] = word(j & D ? LANES + (j & ~D) : j);
        from_high[j] = word(j & D ? LANES + j : j | D);
    }
    vec low = __builtin_shuffle(a, b, from_low), high = __builtin_shuffle(a, b, from_high);
#endif
    a = low, b = high;
}
template <int D = LANES / 2> INLINE void transpose(vec (&v)[LANES]) {
    FLATTEN for (int i = 0; i < LANES; i++)
        if (!(i & D)) exchange<D>(v[i], v[i | D]);
    if constexpr (D > 1) transpose<D / 2>(v);
}

/* Rows of K reals as lanes of operands: where they lie, or rounded into `rows`. */
struct Lines {
    const real *first; /* a lane of operands is as wide as a real */
    int64_t stride;
};
INLINE Lines lines_of(const real *W, int64_t n, int64_t K, operand *rows) {
#ifdef HALF
    for (int64_t i = 0; i < n; i++) pack_row(W + i * K, K, rows + i * padded(K));
    return {reinterpret_cast<const real *>(rows), padded(K) / PAIR};
#else
    (void)n, (void)rows;
    return {W, K};
#endif
}

/* The LANES hands that k is dealt out to in turn, in the order in which `sums_of` adds them: 0, 8, 4, 12, 2 … of 16. */
INLINE int64_t hand(int i) {
    int64_t turned = 0;
    for (int bit = 1, other = LANES / 2; other; bit *= 2, other /= 2)
        if (i & bit) turned |= other;
    return turned;
}
INLINE int64_t hand_size(int64_t K, int64_t hand) { return hand < K ? ceil_div(K - hand, LANES) : 0; }

/* Panel p into `out`; `rows` holds LANES rows of K operands while they are turned. Steps of k lie in their order or, where
 * `starts` is given, every LANES-th from one of those on. */
void pack_transposed(Layout at, int64_t p, const real *W, int64_t K, operand *out, operand *rows, const int64_t *starts = nullptr) {
    int64_t k_steps = ceil_div(K, PAIR), width = at.vectors() * LANES;
    real *to = reinterpret_cast<real *>(out);
    for (int c = 0; c < at.vectors(); c++) {
        int64_t unit = at.unit(p, c), n = at_most(at.units - unit, LANES);
        Lines lines = lines_of(W + (at.gate(c) * at.units + unit) * K, n, K, rows);
        for (int64_t k = 0; k < k_steps; k += LANES) {
            vec block[LANES];
            FLATTEN for (int i = 0; i < LANES; i++)
                block[i] = i < n ? load(lines.first + i * lines.stride + k, k_steps - k) : vec{};
            transpose(block);
            FLATTEN for (int i = 0; i < LANES; i++)
                if (k + i < k_steps) store(to + (starts ? starts[i] + k / LANES : k + i) * width + c * LANES, block[i]);
        }
    }
}

/* Panels of W for y ↦ y W: two vectors of columns each. */
void pack_straight(int64_t p, const real *W, int64_t K, int64_t N, operand *out) {
    out += p * 2 * PANEL * ceil_div(K, PAIR);
    for (int64_t k = 0; k < K; k += PAIR, out += 2 * PANEL)
        for (int c = 0; c < 2; c++) {
            int64_t column = (2 * p + c) * LANES, n = N - column;
            vec rows[PAIR];
            FLATTEN for (int i = 0; i < PAIR; i++)
                rows[i] = n > 0 && k + i < K ? load(W + (k + i) * N + column, n) : vec{};
            store_rows(out + c * PANEL, rows);
        }
}

#ifndef HALF
/* The sums of LANES vectors, vector j's in lane j, each added up as `sum` does. */
template <int D = LANES / 2> INLINE vec sums_of(vec (&v)[LANES]) {
    FLATTEN for (int i = 0; i < D; i++) {
        exchange<D>(v[i], v[i + D]);
        v[i] += v[i + D];
    }
    if constexpr (D > 1) return sums_of<D / 2>(v);
    return v[0];
}

constexpr int64_t FEW = 4;   /* rows in a batch that is not worth packing for */
constexpr int64_t A_FEW = 6; /* rows multiplied at a time */
constexpr int power_of_two(int n) { return n < 2 ? 1 : 2 * power_of_two(n / 2); }
/* How many rows of W meet R rows of h in registers. */
template <int R> constexpr int MEETING = power_of_two(SUMS / R) < LANES ? power_of_two(SUMS / R) : LANES;

/* Sums of N · R vectors, `sums[r * N + j]`, into the first n of out[r * row + j]. */
template <int R, int N> INLINE void add_up(const vec (&sums)[R * N], int64_t n, real *out, int64_t row) {
    constexpr int ALL = (N * R + LANES - 1) / LANES * LANES;
    alignas(64) real totals[ALL];
    FLATTEN for (int g = 0; g < ALL; g += LANES) {
        vec v[LANES];
        FLATTEN for (int l = 0; l < LANES; l++) v[l] = g + l < N * R ? sums[g + l < N * R ? g + l : 0] : vec{};
        store(totals + g, sums_of(v));
    }
    FLATTEN for (int r = 0; r < R; r++) memcpy(out + r * row, totals + r * N, size_t(n) * sizeof(real));
}

/* The same sums for a few rows without packing: each row of W is read once, where it lies. */
template <int R, bool PADDED = true, int N = MEETING<R>> /* whether rows of h reach to whole vectors */
void dots(const real *h, int64_t ld, const real *W, int64_t K, int64_t n, real *out, int64_t row) {
    int64_t whole = K / LANES * LANES, i = 0;
    for (; i + N <= n; i += N) {
        vec sums[R * N] = {};
        const real *w = W + i * K;
        for (int64_t k = 0; k < whole; k += LANES) {
            vec x[R];
            FLATTEN for (int r = 0; r < R; r++) x[r] = load(h + r * ld + k);
            FLATTEN for (int j = 0; j < N; j++) {
                vec y = load(w + j * K + k);
                FLATTEN for (int r = 0; r < R; r++) sums[r * N + j] += y * x[r];
            }
        }
        if (whole < K) FLATTEN for (int j = 0; j < N; j++) {
            vec y = load(w + j * K + whole, K - whole);
            FLATTEN for (int r = 0; r < R; r++)
                sums[r * N + j] += y * load(h + r * ld + whole, PADDED ? LANES : K - whole);
        }
        add_up<R, N>(sums, N, out + i, row);
    }
    if constexpr (N > 1)
        if (i < n) dots<R, PADDED, N / 2>(h, ld, W + i * K, K, n - i, out + i, row);
}

/* And once more for one row and a W that is read in many steps: its vectors lie in the order in which they are read,
 * ABREAST rows side by side, with zeros past the last column and the last row of a block of LANES. */
constexpr int ABREAST = LANES < 8 ? LANES : 8;
INLINE int64_t whole_vectors(int64_t k) { return ceil_div(k, LANES) * LANES; }

void line_up(const real *W, int64_t K, int64_t n, real *out) {
    for (int64_t i = 0; i < LANES; i += ABREAST)
        for (int64_t k = 0; k < K; k += LANES)
            for (int64_t j = i; j < i + ABREAST; j++, out += LANES) store(out, j < n ? load(W + j * K + k, K - k) : vec{});
}

void lined_dots(const real *h, const real *W, int64_t K, int64_t n, real *out) {
    for (int64_t i = 0; i < n; i += ABREAST) {
        vec sums[ABREAST] = {};
        for (int64_t k = 0; k < K; k += LANES, W += ABREAST * LANES) {
            vec x = load(h + k);
            FLATTEN for (int j = 0; j < ABREAST; j++) sums[j] += load(W + j * LANES) * x;
        }
        add_up<1, ABREAST>(sums, at_most(ABREAST, n - i), out + i, 0);
    }
}

/* Rows meet panels whose k was dealt out: to the bits of `dots`, but with a unit in each lane, so that nothing is added
 * across lanes. The sums of hands wait for those that they are added to; where k is so small that of 2, 4 … hands in
 * succession the first alone has any, the others are left out. */
constexpr int levels_of(int n) { return n < 2 ? 0 : 1 + levels_of(n / 2); }

template <int C, int R> void dealt_tile(const real *a, int64_t row, const real *panel, int64_t K, real *out) {
    constexpr int LEVELS = levels_of(LANES);
    alignas(64) real waiting[LEVELS][R * C * LANES];
    int empty = 0;
    while (empty < LEVELS && K <= LANES >> (empty + 1)) empty++;
    for (int i = 0; i < LANES; i += 1 << empty) {
        vec sums[R][C] = {};
        for (int64_t k = hand(i); k < K; k += LANES, panel += C * LANES) meet<C, R>(a + k, row, panel, sums);
        int level = empty;
        for (; i >> level & 1; level++)
            FLATTEN for (int r = 0; r < R; r++) FLATTEN for (int c = 0; c < C; c++)
                sums[r][c] += load(waiting[level] + (r * C + c) * LANES);
        real *to = level < LEVELS ? waiting[level] : out;
        FLATTEN for (int r = 0; r < R; r++) FLATTEN for (int c = 0; c < C; c++) store(to + (r * C + c) * LANES, sums[r][c]);
    }
}
template <int C, int R = ROWS<C> < FEW ? ROWS<C> : FEW>
INLINE void dealt_tile_of(int rows, const real *a, int64_t row, const real *panel, int64_t K, real *out) {
    if constexpr (R > 1)
        if (rows < R) return dealt_tile_of<C, R - 1>(rows, a, row, panel, K, out);
    dealt_tile<C, R>(a, row, panel, K, out);
}

template <bool PADDED = true, int R = 1>
INLINE void dots_of(int64_t rows, const real *h, int64_t ld, const real *W, int64_t K, int64_t n, real *out, int64_t row) {
    if constexpr (R < A_FEW)
        if (rows > R) return dots_of<PADDED, R + 1>(rows, h, ld, W, K, n, out, row);
    dots<R, PADDED>(h, ld, W, K, n, out, row);
}
#endif

/* Y (S, N) = X (S, K) · panels + bias, rows [first, last). A block of rows and of k and the panel that meets them stay in
 * the second-level cache; from one block of k to the next Y holds the sums. */
struct Product {
    const real *X;
    int64_t x_stride, K;
    const operand *panels; /* of two vectors */
    const real *bias;
    real *Y;
    int64_t N, y_stride;
    bool dealt = false; /* those panels, of one block of k */

    static constexpr int64_t ROWS_AT_ONCE = 12 * ROWS<2>, DEEP = 512; /* steps of k */
    int64_t scratch() const { return ROWS_AT_ONCE * padded(at_most(K, DEEP * PAIR)); }

    void run(int64_t first, int64_t last, operand *scratch) const {
        groups(last - first, ROWS_AT_ONCE, [&](int64_t from, int64_t to) {
            groups(ceil_div(K, PAIR), DEEP, [&](int64_t k, int64_t end) {
                run_block(first + from, first + to, k, end, scratch);
            });
        });
    }
    /* Steps [k, end) of k alone. */
    void run_block(int64_t first, int64_t last, int64_t k, int64_t end, operand *scratch) const {
        int64_t k_steps = ceil_div(K, PAIR);
        auto [x, ld] = operands(first, last - first, k * PAIR, at_most(K, end * PAIR), scratch);
        for (int64_t n = 0; n < N; n += 2 * LANES) {
            const operand *panel = panels + (n / LANES * k_steps + 2 * k) * PANEL;
            groups(last - first, ROWS<2>, [&, x = x, ld = ld](int64_t lo, int64_t hi) {
                alignas(64) real out[SUMS * LANES];
                real *y = Y + (first + lo) * y_stride + n;
                begin(int(hi - lo), n, y, out, k > 0);
                multiply(n, int(hi - lo), x + lo * ld, ld, panel, k, end, out);
                finish(int(hi - lo), n, out, y, end == k_steps);
            });
        }
    }
    INLINE void multiply(int64_t n, int rows, const operand *x, int64_t ld, const operand *panel, int64_t k, int64_t end,
                         real *out) const {
#ifndef HALF
        if (dealt) return dealt_tile_of<2, ROWS<2>>(rows, x, ld, panel, K, out);
#endif
        two_vectors(N - n, rows, x, ld, panel, end - k, out, k > 0);
    }
    /* Every row, panels [from, to) alone, each packed into `panel` just before. For few rows: of a W that is read
     * once, nothing is written but what stays in the cache. */
    void run_once(Layout at, const real *W, int64_t from, int64_t to, int64_t rows, operand *panel, operand *turned,
                  operand *scratch) const {
        auto [x, ld] = operands(0, rows, 0, K, scratch);
        for (int64_t p = from; p < to; p++) {
            int64_t n = p * 2 * LANES;
            pack_transposed(at, p, W, K, panel, turned);
            groups(rows, ROWS<2>, [&, x = x, ld = ld](int64_t lo, int64_t hi) {
                alignas(64) real out[SUMS * LANES];
                two_vectors(N - n, int(hi - lo), x + lo * ld, ld, panel, ceil_div(K, PAIR), out);
                finish(int(hi - lo), n, out, Y + lo * y_stride + n, true);
            });
        }
    }
    Operands operands(int64_t first, int64_t rows, int64_t k, int64_t end, operand *scratch) const {
        return operands_of(X + first * x_stride + k, x_stride, rows, end - k, scratch);
    }
    /* Sums that Y holds already into `sums`, or the places where they will go, fetched while they are found. */
    INLINE void begin(int rows, int64_t n, const real *y, real *sums, bool begun) const {
        for (int r = 0; r < rows; r++, y += y_stride, sums += 2 * LANES)
            if (!begun) {
                __builtin_prefetch(y, 1);
                __builtin_prefetch(y + LANES, 1);
            } else {
                store(sums, load(y, N - n));
                if (n + LANES < N) store(sums + LANES, load(y + LANES, N - n - LANES));
            }
    }
    INLINE void finish(int rows, int64_t n, const real *sums, real *y, bool last) const {
        for (int64_t c = 0; c < 2 * LANES && n + c < N; c += LANES) {
            bool shifted = bias && last;
            vec shift = shifted ? load(bias + n + c, N - n - c) : vec{};
            for (int r = 0; r < rows; r++) {
                vec sum = load(sums + r * 2 * LANES + c);
                store(y + r * y_stride + c, shifted ? sum + shift : sum, N - n - c);
            }
        }
    }
};

/* dW (M, N) += Σ_t Σ_b A_tb ⊗ X_tb.
 *
 * Each step of time is summed by itself and then added, the last step first: about as accurate as
 * autograd's own order, and independent of how time was cut into pieces. */
struct Outer {
    int64_t T, B;
    const real *A;
    int64_t M;
    const real *X;
    int64_t N, ld; /* columns taken, and columns there are */
    real *dW;
    bool fresh; /* dW holds nothing yet */
    const int64_t *sizes = nullptr, *starts = nullptr; /* as in `Job` */
    bool states = false;                               /* X are those before each step */

    int64_t rows_at(int64_t t) const { return sizes ? sizes[t] : B; }
    int64_t a_start(int64_t t) const { return sizes ? starts[t] - starts[0] : t * B; }
    int64_t x_start(int64_t t) const { return a_start(t) + (sizes && states ? B - sizes[t - 1] : 0); }
    int64_t pairs_at(int64_t t) const { return ceil_div(rows_at(t), PAIR); }
    int64_t pairs_in(int64_t t0, int64_t steps) const {
        if (!sizes) return steps * pairs();
        int64_t sum = 0;
        for (int64_t t = t0; t < t0 + steps; t++) sum += pairs_at(t);
        return sum;
    }

    static constexpr int R = SUMS / 4, C = 2; /* half the registers hold the running totals */
    static constexpr int GROUP = 8;           /* tiles packed at a time, so that whole cache lines are read */
    static constexpr int64_t AHEAD = 8;       /* rows of A, pages apart, fetched before they are packed */
    int64_t pairs() const { return ceil_div(B, PAIR); }
    int64_t width() const { return ceil_div(N, C * LANES) * C * LANES; }
    Outer columns(int64_t from, int64_t to) const {
        Outer part = *this;
        part.X += from, part.N = to - from, part.dW += from;
        return part;
    }
    int64_t chunk() const { /* steps of time whose packed X stays in the second-level cache */
        int64_t bytes = pairs() * width() * PAIR * int64_t(sizeof(operand));
        int64_t steps = (384 << 10) / bytes;
        return steps < 1 ? 1 : at_most(steps, T);
    }
    int64_t x_size() const { return chunk() * pairs() * width() * PAIR; }
    int64_t a_size() const { return GROUP * chunk() * pairs() * R * PAIR; }

    /* X of steps [t0, t0 + steps), latest first, as panels [column block][step][pair][vector]. */
    void pack_x(int64_t t0, int64_t steps, operand *out) const {
        int64_t step = C * PANEL, panel = pairs_in(t0, steps) * step;
        for (int64_t t = t0 + steps - 1; t >= t0; t--)
            for (int64_t b = 0, B = rows_at(t); b < B; b += PAIR, out += step) {
                const real *x = X + (x_start(t) + b) * ld;
                for (int64_t n = 0; n < width(); n += LANES) {
                    vec rows[PAIR];
                    FLATTEN for (int i = 0; i < PAIR; i++)
                        rows[i] = n < N && b + i < B ? load(x + i * ld + n, N - n) : vec{};
                    store_rows(out + n / (C * LANES) * panel + n / LANES % C * PANEL, rows);
                }
            }
    }
    /* Columns [m, m + rows) of A, as [tile][step][pair][column]; rows < GROUP·R only at the end. */
    void pack_a(int64_t t0, int64_t steps, int64_t m, int64_t rows, operand *out) const {
        int64_t tile = pairs_in(t0, steps) * R * PAIR, tiles = ceil_div(rows, R);
        alignas(64) operand line[(GROUP * R + LANES) * PAIR] = {};
        for (int64_t t = t0 + steps - 1; t >= t0; t--)
            for (int64_t b = 0, B = rows_at(t); b < B; b += PAIR, out += R * PAIR) {
                const real *a = A + (a_start(t) + b) * M + m;
                const real *soon = a + (b + AHEAD < B ? AHEAD : AHEAD - 2 * B) * M; /* in the next step, if not in this */
                for (int64_t r = 0; r < rows; r += LANES) __builtin_prefetch(soon + r);
                const operand *from = pairs_of(a, rows, b + 1 < B, line);
                for (int64_t g = 0; g < tiles; g++) memcpy(out + g * tile, from + g * R * PAIR, R * PAIR * sizeof(operand));
            }
    }
    /* The columns of one pair of rows side by side, with zeros past the last: in `line`, or where they lie. */
    INLINE const operand *pairs_of(const real *a, int64_t rows, bool paired, operand *line) const {
#ifndef HALF
        if (rows == GROUP * R) return a;
#endif
        for (int64_t r = 0; r < rows; r += LANES) {
            vec two[PAIR];
            FLATTEN for (int i = 0; i < PAIR; i++) two[i] = i == 0 || paired ? load(a + i * M + r, rows - r) : vec{};
            store_rows(line + r * PAIR, two);
        }
        return line;
    }
    /* dW[r][·] += Σ_s Σ_b a[s][b][r] x[s][b][·], each step summed by itself; `row` steps dW by r. */
    void add(int64_t t0, int64_t steps, const operand *a, const operand *x, bool fresh, real *dW, int64_t row) const {
        vec totals[R][C];
        FLATTEN for (int r = 0; r < R; r++) FLATTEN for (int j = 0; j < C; j++)
            totals[r][j] = fresh ? vec{} : load(dW + r * row + j * LANES);
        for (int64_t t = t0 + steps - 1, pairs = pairs_at(t); t >= t0; t--) {
            if (sizes) pairs = pairs_at(t);
            vec sums[R][C];
            FLATTEN for (int r = 0; r < R; r++) FLATTEN for (int j = 0; j < C; j++) sums[r][j] = vec{};
            for (int64_t b = 0; b < pairs; b++, a += R * PAIR, x += C * PANEL) {
                decltype(load_operands(x)) columns[C];
                FLATTEN for (int j = 0; j < C; j++) columns[j] = load_operands(x + j * PANEL);
                FLATTEN for (int r = 0; r < R; r++) {
                    auto y = broadcast(a + r * PAIR);
                    FLATTEN for (int j = 0; j < C; j++) sums[r][j] = multiply_add(y, columns[j], sums[r][j]);
                }
            }
            FLATTEN for (int r = 0; r < R; r++) FLATTEN for (int j = 0; j < C; j++) totals[r][j] += sums[r][j];
        }
        FLATTEN for (int r = 0; r < R; r++) FLATTEN for (int j = 0; j < C; j++)
            store(dW + r * row + j * LANES, totals[r][j]);
    }
    /* The same for the part of a tile that lies inside dW, from column n of row c. */
    void add_part(int64_t t0, int64_t steps, const operand *a, const operand *x, bool empty, int64_t rows, int64_t n,
                  real *c) const {
        if (rows == R && n + C * LANES <= N) return add(t0, steps, a, x, empty, c, ld);
        alignas(64) real whole[R * C * LANES] = {};
        size_t bytes = size_t(at_most(N - n, C * LANES)) * sizeof(real);
        for (int64_t r = 0; !empty && r < rows; r++) memcpy(whole + r * C * LANES, c + r * ld, bytes);
        add(t0, steps, a, x, false, whole, C * LANES);
        for (int64_t r = 0; r < rows; r++) memcpy(c + r * ld, whole + r * C * LANES, bytes);
    }
    void run(int64_t first, int64_t last, operand *a, operand *x) const {
        for (int64_t stop = T; stop > 0; stop -= chunk()) {
            int64_t steps = at_most(chunk(), stop), t0 = stop - steps, pairs = pairs_in(t0, steps);
            pack_x(t0, steps, x);
            for (int64_t m = first; m < last; m += R) {
                int64_t tile = (m - first) / R % GROUP;
                if (tile == 0) pack_a(t0, steps, m, at_most(GROUP * R, last - m), a);
                const operand *rows = a + tile * pairs * R * PAIR;
                for (int64_t n = 0; n < N; n += C * LANES)
                    add_part(t0, steps, rows, x + n / LANES * pairs * PANEL, fresh && stop == T,
                             at_most(R, last - m), n, dW + m * ld + n);
            }
        }
    }
};

} // namespace
