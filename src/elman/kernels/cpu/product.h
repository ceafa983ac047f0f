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

constexpr INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

/* A row of operands is padded to whole vectors, and past them so that rows of a power-of-two
 * width do not fall on the same cache lines. */
INLINE int64_t padded(int64_t k) { return ceil_div(k, 2 * LANES) * 2 * LANES + LANES; }

/* sums[r][c] += a[r] panel[c] of one k (or pair). Whichever side has fewer vectors stays in registers; where neither has room
 * beside the sums, a compiler would put sums into memory. */
template <int C, int R> INLINE void meet(const operand *a, int64_t row, const operand *panel, vec (&sums)[R][C]) {
    if constexpr (R < C && R * C + C >= REGISTERS) {
        decltype(broadcast(a)) x[R];
        FLATTEN for (int r = 0; r < R; r++) x[r] = broadcast(a + r * row);
        FLATTEN for (int c = 0; c < C; c++) {
            auto b = load_operands(panel + c * PANEL);
            FLATTEN for (int r = 0; r < R; r++) sums[r][c] = multiply_add(x[r], b, sums[r][c]);
        }
        return;
    }
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
 * there is one gate, two neighbouring blocks): everything one tile needs to finish those units. Where so few units are left
 * for the last panel that several gates fit into a vector, they share it. */
struct Layout {
    int64_t gates, units;
    int vectors() const { return gates == 1 ? 2 : int(gates); }
    int64_t blocks() const { return gates == 1 ? 2 : 1; } /* blocks of units in a panel */
    int64_t panels() const { return ceil_div(units, blocks() * LANES); }
    int64_t unit(int64_t panel, int c) const { return (panel * blocks() + (gates == 1 ? c : 0)) * LANES; }
    int64_t gate(int c) const { return gates == 1 ? 0 : c; }
    int64_t panel_size(int64_t k) const { return vectors() * ceil_div(k, PAIR) * PANEL; }
    int64_t size(int64_t k) const { return panels() * panel_size(k); }

    int64_t left() const { return gates == 1 ? 0 : units % LANES; } /* units of a panel that is not full */
    int64_t sharing(int64_t panel) const { return left() && panel == panels() - 1 ? LANES / left() : 1; } /* gates of a vector */
    int vectors(int64_t panel) const { return int(ceil_div(vectors(), sharing(panel))); }
    /* The row of W in a lane of vector c, or -1. */
    int64_t row(int64_t panel, int c, int lane) const {
        int64_t shared = sharing(panel), first = unit(panel, c);
        if (shared == 1) return first + lane < units ? gate(c) * units + first + lane : -1;
        int64_t gate = c * shared + lane / left();
        return lane < shared * left() && gate < gates ? gate * units + first + lane % left() : -1;
    }
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

/* A row of K reals as lanes of operands, each as wide as a real: where it lies, or rounded into `room`. */
INLINE const real *line_of(const real *row, int64_t K, operand *room) {
#ifdef HALF
    pack_row(row, K, room);
    return reinterpret_cast<const real *>(room);
#else
    (void)K, (void)room;
    return row;
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
    int64_t k_steps = ceil_div(K, PAIR), width = at.vectors(p) * LANES;
    real *to = reinterpret_cast<real *>(out);
    for (int c = 0; c < at.vectors(p); c++) {
        const real *lines[LANES];
        for (int i = 0; i < LANES; i++) {
            int64_t row = at.row(p, c, i);
            lines[i] = row < 0 ? nullptr : line_of(W + row * K, K, rows + i * padded(K));
        }
        for (int64_t k = 0; k < k_steps; k += LANES) {
            vec block[LANES];
            FLATTEN for (int i = 0; i < LANES; i++) block[i] = lines[i] ? load(lines[i] + k, k_steps - k) : vec{};
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

/* y ↦ y W for a few rows, W (K, N) read once, where it lies: columns [from, to) of `out`. Each sum goes over k in the
 * order that panels have, and so to the same bits. */
void weigh(const real *y, int64_t ld, int64_t rows, const real *W, int64_t K, int64_t N, int64_t from, int64_t to, real *out,
           int64_t row) {
    constexpr int64_t DEEP = 512;
    for (int64_t k = 0; k < K; k += DEEP)
        for (int64_t c = from; c < to; c += LANES)
            for (int64_t r = 0; r < rows; r++) {
                const real *a = y + r * ld + k, *w = W + k * N + c;
                real *at = out + r * row + c;
                vec sum = k ? load(at, to - c) : vec{};
                if (k + DEEP <= K) {
                    FLATTEN for (int i = 0; i < DEEP; i++) sum = multiply_add(a[i], load(w + i * N, to - c), sum);
                } else
                    for (int64_t i = 0; i < K - k; i++) sum = multiply_add(a[i], load(w + i * N, to - c), sum);
                store(at, sum, to - c);
            }
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
 * across lanes. The sums of hands wait for those that they are added to. */
constexpr int levels_of(int n) { return n < 2 ? 0 : 1 + levels_of(n / 2); }

/* For few k: where of 2, 4 … hands in succession the first alone has any, the others are left out. */
template <int C, int R> void dealt_short(const real *a, int64_t row, const real *panel, int64_t K, real *out) {
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

/* The sums of 2^LEVEL hands in succession, written out, so that the processor foresees what it adds and goes on with the next
 * hand meanwhile. */
template <int C, int R, int LEVEL, int FIRST = 0>
INLINE void add_hands(const real *a, int64_t row, const real *&panel, int64_t K, vec (&sums)[R][C]) {
    if constexpr (LEVEL == 0) {
        FLATTEN for (int r = 0; r < R; r++) FLATTEN for (int c = 0; c < C; c++) sums[r][c] = vec{};
        for (int64_t k = hand(FIRST); k < K; k += LANES, panel += C * LANES) meet<C, R>(a + k, row, panel, sums);
    } else {
        alignas(64) real waiting[R * C * LANES];
        add_hands<C, R, LEVEL - 1, FIRST>(a, row, panel, K, sums);
        FLATTEN for (int r = 0; r < R; r++) FLATTEN for (int c = 0; c < C; c++) store(waiting + (r * C + c) * LANES, sums[r][c]);
        add_hands<C, R, LEVEL - 1, FIRST + (1 << (LEVEL - 1))>(a, row, panel, K, sums);
        FLATTEN for (int r = 0; r < R; r++) FLATTEN for (int c = 0; c < C; c++) sums[r][c] += load(waiting + (r * C + c) * LANES);
    }
}
template <int C, int R> void dealt_tile(const real *a, int64_t row, const real *panel, int64_t K, real *out) {
    vec sums[R][C];
    add_hands<C, R, levels_of(LANES)>(a, row, panel, K, sums);
    FLATTEN for (int r = 0; r < R; r++) FLATTEN for (int c = 0; c < C; c++) store(out + (r * C + c) * LANES, sums[r][c]);
}
template <int C, int R = ROWS<C>>
INLINE void dealt_short_of(int rows, const real *a, int64_t row, const real *panel, int64_t K, real *out) {
    if constexpr (R > 1)
        if (rows < R) return dealt_short_of<C, R - 1>(rows, a, row, panel, K, out);
    dealt_short<C, R>(a, row, panel, K, out);
}
template <int C, int R = ROWS<C> < FEW ? ROWS<C> : FEW>
INLINE void dealt_tile_of(int rows, const real *a, int64_t row, const real *panel, int64_t K, real *out) {
    if constexpr (R > 1)
        if (rows < R) return dealt_tile_of<C, R - 1>(rows, a, row, panel, K, out);
    if (K > LANES / 2) return dealt_tile<C, R>(a, row, panel, K, out);
    dealt_short<C, R>(a, row, panel, K, out);
}

template <bool PADDED = true, int R = 1>
INLINE void dots_of(int64_t rows, const real *h, int64_t ld, const real *W, int64_t K, int64_t n, real *out, int64_t row) {
    if constexpr (R < A_FEW)
        if (rows > R) return dots_of<PADDED, R + 1>(rows, h, ld, W, K, n, out, row);
    dots<R, PADDED>(h, ld, W, K, n, out, row);
}
#endif

/* The rows of a piece of time: those of the batch, step after step. */
struct Steps {
    int64_t T, B;
    const int64_t *sizes = nullptr, *starts = nullptr; /* as in `Job` */

    int64_t rows(int64_t t) const { return sizes ? sizes[t] : B; }
    int64_t start(int64_t t) const { return sizes ? starts[t] - starts[0] : t * B; }
    int64_t pairs(int64_t t) const { return ceil_div(rows(t), PAIR); }
    int64_t pairs_from(int64_t t) const { /* of this step and all later ones */
        if (!sizes) return (T - t) * pairs(0);
        int64_t sum = 0;
        for (; t < T; t++) sum += pairs(t);
        return sum;
    }
};

/* A row of numbers for each of those rows, one after the other; or by blocks of LANES columns, of each step the first block
 * of all its rows, then the next: whoever sums over rows then reads a block from its beginning to its end. */
struct Grid {
    const real *data;
    int64_t width; /* of a row, whole blocks where they lie so */
    bool by_blocks;

    const real *at(int64_t start, int64_t rows, int64_t block) const {
        return data + start * width + block * (by_blocks ? rows : 1) * LANES;
    }
    int64_t stride() const { return by_blocks ? LANES : width; }
};

/* The rows of dW by blocks of LANES: gates of `units` each. What pulls on gates from `aside` on lies `shift` gates further
 * in a grid of pulls. */
struct Columns {
    int64_t gates, units, aside = gates, shift = 0;

    int64_t per_gate() const { return ceil_div(units, LANES); }
    int64_t blocks() const { return gates * per_gate(); }
    int64_t first(int64_t p) const { return p / per_gate() * units + p % per_gate() * LANES; }
    int64_t count(int64_t p) const { return at_most(LANES, units - p % per_gate() * LANES); }
    int64_t place(int64_t p) const { return p + (p / per_gate() >= aside ? shift * per_gate() : 0); }
};

/* Rows of a grid by blocks, to be multiplied. */
struct Blocks {
    Steps at;
    Grid grid;
    Columns columns;

    /* Columns [k, end) of rows [first, first + rows), gathered in `room`. */
    Operands operands(int64_t first, int64_t rows, int64_t k, int64_t end, operand *room) const {
        int64_t ld = padded(end - k);
        for (int64_t r = 0; (end - k) % PAIR && r < rows; r++) room[r * ld + end - k] = 0;
        for (int64_t p = 0; p < columns.blocks(); p++) {
            int64_t column = columns.first(p), from = column < k ? k : column, to = at_most(column + columns.count(p), end);
            if (from >= to) continue;
            int64_t t = 0;
            for (int64_t r = 0; r < rows; r++) {
                while (first + r >= at.start(t) + at.rows(t)) t++;
                const real *x = grid.at(at.start(t), at.rows(t), columns.place(p)) + (first + r - at.start(t)) * LANES;
                store_operand(room + r * ld + from - k, load(x + from - column, to - from), to - from);
            }
        }
        return {room, ld};
    }
};

/* Y (S, N) = X (S, K) · panels + bias, rows [first, last). A block of rows and of k and the panel that meets them stay in
 * the second-level cache; from one block of k to the next Y holds the sums. */
struct Product {
    const real *X;
    int64_t x_stride, K;
    const operand *panels; /* of two vectors */
    const real *bias;
    real *Y;
    int64_t N, y_stride;
    bool dealt = false;             /* those panels, of one block of k */
    const Blocks *blocks = nullptr; /* X lies in these */

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
        run_on(operands(first, last - first, k * PAIR, at_most(K, end * PAIR), scratch), first, last, k, end);
    }
    /* The same of rows that are operands already. */
    void run_on(Operands x, int64_t first, int64_t last, int64_t k, int64_t end) const {
        int64_t k_steps = ceil_div(K, PAIR);
        for (int64_t n = 0; n < N; n += 2 * LANES) {
            const operand *panel = panels + (n / LANES * k_steps + 2 * k) * PANEL;
            groups(last - first, ROWS<2>, [&](int64_t lo, int64_t hi) {
                alignas(64) real out[SUMS * LANES];
                real *y = Y + (first + lo) * y_stride + n;
                begin(int(hi - lo), n, y, out, k > 0);
                multiply(n, int(hi - lo), x.first + lo * x.stride, x.stride, panel, k, end, out);
                finish(int(hi - lo), n, out, y, end == k_steps);
            });
        }
    }
    INLINE void multiply(int64_t n, int rows, const operand *x, int64_t ld, const operand *panel, int64_t k, int64_t end,
                         real *out) const {
#ifndef HALF
        if (dealt) return dealt_short_of<2>(rows, x, ld, panel, K, out);
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
        if (blocks) return blocks->operands(first, rows, k, end, scratch);
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

/* X for sums over rows: where it lies or, as panels of C vectors of columns, packed step after step, the last first. */
struct Side {
    /* Rows and vectors of columns of a tile of such a sum, and whether its running totals have registers, too. */
    static constexpr int R = at_most(LANES, REGISTERS / 4);
    static constexpr bool TOTALS = R >= 8;
    static constexpr int C = TOTALS ? 1 : REGISTERS / 2 / R;
    Steps at;
    const real *X;
    int64_t N;
    bool states = false; /* X are those before each step */

    const operand *packed = nullptr;

    /* Narrow rows, and enough of them in a step, are read as fast where they lie. */
    bool in_place() const {
        return PAIR == 1 && at.B >= 16 && N % (C * LANES) == 0 && N * int64_t(sizeof(real)) <= 2048;
    }
    int64_t panels() const { return ceil_div(N, C * LANES); }
    int64_t panel_size() const { return at.pairs_from(0) * C * PANEL; }
    int64_t size() const { return in_place() ? 0 : panels() * panel_size(); }
    int64_t start(int64_t t) const { return at.start(t) + (at.sizes && states ? at.B - at.sizes[t - 1] : 0); }

    /* Rows [b0, b1) of every step, in whole pairs. */
    void pack(int64_t b0, int64_t b1, operand *out) const {
        if (in_place()) return;
        int64_t panel = panel_size();
        b0 = ceil_div(b0, PAIR) * PAIR;
        for (int64_t t = at.T - 1; t >= 0; out += at.pairs(t--) * C * PANEL) {
            int64_t rows = at.rows(t);
            for (int64_t b = b0; b < at_most(b1, rows); b += PAIR) {
                const real *x = X + (start(t) + b) * N;
                operand *to = out + b / PAIR * C * PANEL;
                for (int64_t n = 0; n < panels() * C * LANES; n += LANES) {
                    vec two[PAIR];
                    FLATTEN for (int i = 0; i < PAIR; i++) two[i] = n < N && b + i < rows ? load(x + i * N + n, N - n) : vec{};
                    store_rows(to + n / (C * LANES) * panel + n / LANES % C * PANEL, two);
                }
            }
        }
    }
};

/* dW (M, N) += Σ_t Σ_b A_tb ⊗ X_tb.
 *
 * Each step of time is summed by itself and then added, the last step first: about as accurate as
 * autograd's own order, and independent of how time was cut into pieces. */
struct Outer {
    Steps at;
    Grid A;
    Columns columns;
    Side X;
    real *dW;
    bool fresh; /* dW holds nothing yet */

    static constexpr int R = Side::R, C = Side::C;
    const bool packs = PAIR > 1 || !A.by_blocks, in_place = X.in_place();
    static constexpr int MOST_FIXED = PAIR == 1 ? 8 : 0;
    static constexpr int MOST_TOTALS = Side::TOTALS ? 0 : 4;
    const bool fixed = !packs && !in_place && !at.sizes && at.B <= MOST_FIXED; /* every step has as many rows, and few */
    const int64_t N = X.N, panel = X.panel_size(), apart = in_place ? N : C * PANEL;
    static const operand *where_it_lies(const real *x) { return reinterpret_cast<const operand *>(x); } /* they are the same */

    /* Steps of time of which a block of A and a panel of X take little of the second-level cache, or fit into the first. */
    int64_t chunk() const {
        int64_t bytes = fixed ? 24 << 10 : 64 << 10;
        int64_t steps = bytes / (at.pairs(0) * (C + 1) * PANEL * int64_t(sizeof(operand)));
        return steps < 1 ? 1 : at_most(steps, at.T);
    }
    int64_t scratch() const { return packs ? chunk() * ceil_div(at.B, PAIR) * PANEL : 0; }

    /* A block of A of steps [t0, t1), the last first, as pairs of rows. */
    void pack(int64_t p, int64_t t0, int64_t t1, operand *out) const {
        int64_t block = columns.place(p), n = columns.count(p), stride = A.stride();
        for (int64_t t = t1 - 1; t >= t0; t--) {
            const real *a = A.at(at.start(t), at.rows(t), block);
            for (int64_t b = 0, rows = at.rows(t); b < rows; b += PAIR, out += PANEL) {
                vec two[PAIR];
                FLATTEN for (int i = 0; i < PAIR; i++) two[i] = b + i < rows ? load(a + (b + i) * stride, n) : vec{};
                store_rows(out, two);
            }
        }
    }
    /* dW[r][·] += Σ_t Σ_b a[t][b][r] x[t][b][·], each step summed by itself; `row` steps dW by r. The block of `a` is in
     * `packed`, or where it lies. FIXED rows in every step, where that is not 0: then the loop over them is unrolled, and a
     * step of few rows is little more than its multiply-adds. */
    template <int FIXED = 0>
    void add(int64_t p, int64_t from, int64_t n, int64_t t0, int64_t t1, const operand *packed, const operand *x, bool fresh,
             real *dW, int64_t row) const {
        constexpr bool FEWER = FIXED > 0 && FIXED <= MOST_TOTALS;
        for (int64_t r = 0; r < R; r += FEWER ? R / 2 : R)
            add_rows<FIXED, FEWER ? R / 2 : R, Side::TOTALS || FEWER>(p, from + r, n, t0, t1, packed, x, fresh, dW + r * row, row);
    }
    template <int FIXED, int R, bool TOTALS>
    INLINE void add_rows(int64_t p, int64_t from, int64_t n, int64_t t0, int64_t t1, const operand *packed, const operand *x,
                         bool fresh, real *dW, int64_t row) const {
        int64_t block = columns.place(p);
        vec totals[R][C];
        if (TOTALS) FLATTEN for (int r = 0; r < R; r++) FLATTEN for (int j = 0; j < C; j++)
            totals[r][j] = fresh ? vec{} : load(dW + r * row + j * LANES);
        for (int64_t t = t1 - 1; t >= t0; t--) {
            int64_t start = FIXED ? t * FIXED : at.start(t), rows = FIXED ? FIXED : at.rows(t);
            const operand *a = (!FIXED && packs ? packed : where_it_lies(A.at(start, rows, block))) + from * PAIR;
            if (!FIXED && in_place) x = where_it_lies(X.X + X.start(t) * N + n);
            vec sums[R][C];
            FLATTEN for (int r = 0; r < R; r++) FLATTEN for (int j = 0; j < C; j++) sums[r][j] = vec{};
            if constexpr (FIXED > 0) {
                FLATTEN for (int b = 0; b < FIXED; b++) meet_row(a + b * PANEL, x + b * C * PANEL, sums);
                x += FIXED * C * PANEL;
            } else {
                int64_t pairs = at.pairs(t);
                for (int64_t b = 0; b < pairs; b++, a += PANEL, x += apart) meet_row(a, x, sums);
                if (packs) packed += pairs * PANEL;
            }
            FLATTEN for (int r = 0; r < R; r++) FLATTEN for (int j = 0; j < C; j++)
                if constexpr (TOTALS) {
                    totals[r][j] += sums[r][j];
                } else {
                    real *to = dW + r * row + j * LANES;
                    store(to, (fresh ? vec{} : load(to)) + sums[r][j]);
                }
            fresh = false;
        }
        if (TOTALS) FLATTEN for (int r = 0; r < R; r++) FLATTEN for (int j = 0; j < C; j++)
            store(dW + r * row + j * LANES, totals[r][j]);
    }
    /* sums[r][j] += a[r] x[j] of one row of the batch (or a pair of them). */
    template <int R> static INLINE void meet_row(const operand *a, const operand *x, vec (&sums)[R][C]) {
        decltype(load_operands(x)) columns[C];
        FLATTEN for (int j = 0; j < C; j++) columns[j] = load_operands(x + j * PANEL);
        if constexpr (R < Side::R) FLATTEN for (int j = 0; j < C; j++) hold(columns[j]);
        FLATTEN for (int r = 0; r < R; r++) {
            auto y = broadcast(a + r * PAIR);
            FLATTEN for (int j = 0; j < C; j++) sums[r][j] = multiply_add(y, columns[j], sums[r][j]);
        }
    }
    /* The same, by the number of rows. */
    template <int FIXED = MOST_FIXED>
    INLINE void add_steps(int64_t p, int64_t from, int64_t n, int64_t t0, int64_t t1, const operand *packed, const operand *x,
                          bool fresh, real *dW, int64_t row) const {
        if constexpr (FIXED > 0)
            if (at.B != FIXED || !fixed) return add_steps<FIXED - 1>(p, from, n, t0, t1, packed, x, fresh, dW, row);
        add<FIXED>(p, from, n, t0, t1, packed, x, fresh, dW, row);
    }
    /* The same for the part of a tile that lies inside dW: rows from the `from`th of block p, columns from n on. */
    void add_part(int64_t p, int64_t from, int64_t n, int64_t t0, int64_t t1, const operand *packed, const operand *x) const {
        bool empty = fresh && t1 == at.T;
        int64_t rows = at_most(R, columns.count(p) - from);
        real *c = dW + (columns.first(p) + from) * N + n;
        if (rows == R && n + C * LANES <= N) return add_steps(p, from, n, t0, t1, packed, x, empty, c, N);
        alignas(64) real whole[R * C * LANES] = {};
        size_t bytes = size_t(at_most(N - n, C * LANES)) * sizeof(real);
        for (int64_t r = 0; !empty && r < rows; r++) memcpy(whole + r * C * LANES, c + r * N, bytes);
        add_steps(p, from, n, t0, t1, packed, x, false, whole, C * LANES);
        for (int64_t r = 0; r < rows; r++) memcpy(c + r * N, whole + r * C * LANES, bytes);
    }
    /* The same for the last panel, where it has at most MOST columns: a row of dW in each lane and a sum for each column,
     * instead of lanes without one. */
    template <int MOST>
    void add_narrow(int64_t p, int64_t n, int64_t t0, int64_t t1, const operand *packed, const operand *x) const {
        alignas(64) real turned[MOST * LANES] = {};
        int64_t block = columns.place(p), rows = columns.count(p);
        real *c = dW + columns.first(p) * N + n;
        bool empty = fresh && t1 == at.T;
        for (int64_t r = 0; !empty && r < rows; r++)
            for (int64_t j = 0; j < N - n; j++) turned[j * LANES + r] = c[r * N + j];
        vec totals[MOST];
        FLATTEN for (int j = 0; j < MOST; j++) totals[j] = load(turned + j * LANES);
        for (int64_t t = t1 - 1; t >= t0; t--) {
            int64_t pairs = at.pairs(t);
            const operand *a = packs ? packed : where_it_lies(A.at(at.start(t), at.rows(t), block));
            vec sums[MOST];
            FLATTEN for (int j = 0; j < MOST; j++) sums[j] = vec{};
            for (int64_t b = 0; b < pairs; b++, a += PANEL, x += PANEL) {
                auto y = load_operands(a);
                FLATTEN for (int j = 0; j < MOST; j++) sums[j] = multiply_add(broadcast(x + j * PAIR), y, sums[j]);
            }
            FLATTEN for (int j = 0; j < MOST; j++) totals[j] += sums[j];
            if (packs) packed += pairs * PANEL;
        }
        FLATTEN for (int j = 0; j < MOST; j++) store(turned + j * LANES, totals[j]);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < N - n; j++) c[r * N + j] = turned[j * LANES + r];
    }
    /* All rows of block p, columns from n on. */
    void add_block(int64_t p, int64_t n, int64_t t0, int64_t t1, const operand *packed, const operand *x) const {
        if constexpr (C == 1) {
            if (N - n <= 4) return add_narrow<4>(p, n, t0, t1, packed, x);
            if (N - n <= LANES / 2) return add_narrow<LANES / 2>(p, n, t0, t1, packed, x);
        }
        for (int64_t from = 0; from < columns.count(p); from += R) add_part(p, from, n, t0, t1, packed, x);
    }
    /* Blocks [first, last) of the rows of dW, panels [begin, end) of its columns. */
    void run(int64_t first, int64_t last, int64_t begin, int64_t end, operand *scratch) const {
        for (int64_t t1 = at.T; t1 > 0; t1 -= at_most(chunk(), t1)) {
            int64_t t0 = t1 - at_most(chunk(), t1), skipped = at.pairs_from(t1) * C * PANEL;
            for (int64_t p = first; p < last; p++) {
                if (packs) pack(p, t0, t1, scratch);
                for (int64_t n = begin; n < end; n++)
                    add_block(p, n * C * LANES, t0, t1, scratch, X.packed + n * panel + skipped);
            }
        }
    }
};

} // namespace
