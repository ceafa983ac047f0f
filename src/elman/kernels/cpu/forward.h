/* The way there: h_0 … h_T of one layer, threads splitting the batch. */
#pragma once
#include "product.h"
#include <atomic>

namespace {

/* A block of rows runs through all of time by itself, so threads never wait for one another. */
constexpr int64_t BLOCK_ROWS = 64;

INLINE int64_t blocks_of(const Job *job, int64_t threads) {
    int64_t least = ceil_div(job->B, BLOCK_ROWS);
    return at_most(job->B, ceil_div(least, threads) * threads);
}

/* Small jobs are done before a second thread has begun. */
INLINE int64_t useful_threads(const Job *job) { return worth_two(work_of(job)) ? job->threads : 1; }

/* Few rows and a matrix that no core's own cache holds: threads that split the rows would each read all of
 * W_hh in every step, so they split the units instead, and meet after every step: not beside other programs, where
 * whoever is not running would hold up every step. */
INLINE bool splits_units(const Job *job) {
    int64_t entries = gates_of(job->cell) * job->H * job->H, least = job->B == 1 ? 1 << 17 : job->B <= 3 ? 3 << 16 : 1 << 19;
    if (job->B > 3) { /* of few steps also smaller ones: what one thread has packed the other would have to fetch */
        int64_t short_of = job->T * (job->B < 16 ? 3 << 12 : 1 << 11);
        least = at_most(least, short_of > 1 << 16 ? short_of : 1 << 16);
    }
    return entries >= least && job->B <= 16 * job->threads && job->threads > 1 && !job->lengths && !job->sizes && !is_busy();
}

constexpr int64_t READ_ONCE = 768; /* rows up to which W_ih is packed panel by panel as it is read */
constexpr int64_t STEP_BYTES = 256 << 10; /* of the rows of a single step that are read for every panel */
constexpr int64_t MANY_STEPS = 12; /* for which a matrix is worth copying, line by line */

/* Whether inputs are multiplied just before the states, by a tile of the same rows, so that no product waits in memory. Then
 * every step reads all of W_ih, too, which is slower where both matrices are too large for the third-level cache or, of few
 * rows, come from there at every step; and of one gate there is too little to wait for. */
INLINE bool multiplies_late(const Job *job) {
    int64_t gates = gates_of(job->cell), bytes = gates * job->H * (job->H + job->I) * int64_t(sizeof(operand));
    return gates > 1 && !job->ids && bytes <= (job->B < 8 ? 5 << 20 : 10 << 20);
}

/* The same of a single step, where each panel of W_ih is packed beside that of W_hh: threads meet once, not twice. Rows of x
 * and h are then read for every panel, and must stay in a core's own cache. */
INLINE bool steps_late(const Job *job) {
    return !job->ids && job->B * (job->H + job->I) * int64_t(sizeof(operand)) <= STEP_BYTES;
}

/* The i-th of [from, to), every other step from the end: so a step begins with what the step before has read last, which
 * a core's own cache still holds where it does not hold the whole matrix. */
INLINE int64_t turning(int64_t t, int64_t i, int64_t from, int64_t to) { return t % 2 ? from + to - 1 - i : i; }

struct Forward {
    const Job *job;
    Layout at;
    const operand *panels; /* null: W_hh is read where it lies, */
    const real *lined;     /* or where it was lined up for many steps of one row, */
    bool dealt;            /* or in those panels, but dealt out, for more rows than that but few; */
    operand *room;         /* or, in a single step, packed into this panel by panel, a place for each thread */
    const real *table;     /* rows of x W_ihᵀ + b_ih + b_hh (without b_hn for a gru) named by job->ids; null: in order */
    int64_t in_stride;     /* of a row of it, wherever it lies */
    real *gates;
    bool late;           /* inputs are multiplied with the states, and rows are those of x: */
    const operand *W_ih; /* by these panels or, in a single step, by others in that room */
    const real *bias;    /* b_ih + b_hh, for those */
    operand *xs;         /* room for those of a step, of all rows */

    const int64_t T = job->T, B = job->B, H = job->H, C = extra_of(job->cell) * H;
    const real *W_hh = static_cast<const real *>(job->W_hh);
    const real *b_hn = job->cell == GRU && job->b_hh ? static_cast<const real *>(job->b_hh) + 2 * H : nullptr;
    real *hs = static_cast<real *>(job->hs), *cs = static_cast<real *>(job->cs);

    bool held(int64_t t, int64_t b) const { return job->lengths && t >= job->lengths[b]; }

    /* Rows of one step from b on, and their projected inputs; or the inputs themselves, as operands, too. */
    struct Rows {
        int64_t t, b, count;
        const real *in;
        Operands x;
        const real *found = nullptr; /* x W_ihᵀ + b of the tile that is being finished, where it was multiplied late */
    };
    Rows rows_of(int64_t t, int64_t b, int64_t count, const real *in) const {
        if (!late) return {t, b, count, in, {}};
        return {t, b, count, in, operands_of(in, in_stride, count, job->I, xs + b * padded(job->I))};
    }
    Rows part(Rows rows, int64_t lo, int64_t hi) const {
        Operands x{rows.x.first + lo * rows.x.stride, rows.x.stride};
        return {rows.t, rows.b + lo, hi - lo, rows.in + lo * in_stride, x};
    }
    /* The projected input of a row from panel p on, a vector for every vector of the panel, */
    const real *input(int64_t p, Rows rows, int64_t r) const {
        if (rows.found) return rows.found + r * at.vectors() * LANES;
        const real *row = table ? table + job->ids[start_of(job, rows.t) + rows.b + r] * in_stride : rows.in + r * in_stride;
        return row + at.unit(p, 0);
    }
    /* so far from one another. */
    int64_t apart(Rows rows) const { return rows.found || at.gates == 1 ? LANES : H; }

    /* h_t of the rows, from the product with h_{t-1} in `sums`. */
    template <int CELL> void finish(int64_t p, Rows rows, const real *sums, operand *next) const {
        if constexpr (CELL == LSTM) return lstm(p, rows, sums, next);
        int vectors = at.vectors();
        for (int64_t r = 0; r < rows.count; r++, sums += vectors * LANES, next += padded(H)) {
            int64_t s = start_of(job, rows.t) + rows.b + r, last = before(job, rows.t) + rows.b + r;
            const real *x = input(p, rows, r);
            if constexpr (CELL == GRU)
                gru(at.unit(p, 0), s, last, x, apart(rows), sums, next);
#ifdef OWN_CELL
            else if constexpr (CELL == OWN)
                for (int c = 0; c < at.blocks(); c++)
                    own(at.unit(p, c), s, last, x + c * LANES, apart(rows), sums + c * LANES, next);
#endif
            else
                for (int c = 0; c < 2; c++) plain<CELL>(at.unit(p, c), s, x + c * LANES, sums + c * LANES, next);
        }
    }
    template <int CELL> INLINE void plain(int64_t u, int64_t s, const real *x, const real *sums, operand *next) const {
        int64_t n = H - u;
        if (n <= 0) return;
        vec a = load(x, n) + load(sums);
        vec h = CELL == TANH ? vtanh(a) : CELL == RELU ? (a < 0 ? vec{} : a) : a;
        store(hs + (s + B) * H + u, h, n);
        store_operand(next + u, h, LANES);
    }
    INLINE void gru(int64_t u, int64_t s, int64_t last, const real *x, int64_t apart, const real *sums, operand *next) const {
        int64_t n = H - u;
        vec a[4];
        a[0] = vsigmoid(load(x, n) + load(sums));
        a[1] = vsigmoid(load(x + apart, n) + load(sums + LANES));
        a[3] = load(sums + 2 * LANES);
        if (b_hn) a[3] += load(b_hn + u, n);
        a[2] = vtanh(load(x + 2 * apart, n) + a[0] * a[3]);
        vec h = a[2] + a[1] * (load(hs + last * H + u, n) - a[2]);
        if (gates) FLATTEN for (int g = 0; g < 4; g++) store(gates + (s * 4 + g) * H + u, a[g], n);
        store(hs + (s + B) * H + u, h, n);
        store_operand(next + u, h, LANES);
    }
    /* All rows' c_t before any h_t, which would wait for its own. */
    void lstm(int64_t p, Rows rows, const real *sums, operand *next) const {
        constexpr int64_t MOST = ROWS<4> > 4 ? ROWS<4> : 4;
        int64_t u = at.unit(p, 0), n = H - u, start = start_of(job, rows.t) + rows.b;
        const real *c_last = cs + (job->c_in_place ? rows.b : before(job, rows.t) + rows.b) * H + u;
        real *c_next = cs + (job->c_in_place ? rows.b : start + B) * H + u;
        vec o[MOST], c[MOST];
        for (int64_t r = 0; r < rows.count; r++) {
            const real *x = input(p, rows, r);
            vec a[4];
            FLATTEN for (int g = 0; g < 4; g++) a[g] = load(x + g * apart(rows), n) + load(sums + (r * 4 + g) * LANES);
            a[0] = vsigmoid(a[0]);
            a[1] = vsigmoid(a[1]);
            a[2] = vtanh(a[2]);
            a[3] = vsigmoid(a[3]);
            o[r] = a[3], c[r] = a[1] * load(c_last + r * H, n) + a[0] * a[2];
            store(c_next + r * H, c[r], n);
            if (gates) FLATTEN for (int g = 0; g < 4; g++) store(gates + ((start + r) * 4 + g) * H + u, a[g], n);
        }
        for (int64_t r = 0; r < rows.count; r++) {
            vec h = o[r] * vtanh(c[r]);
            store(hs + (start + r + B) * H + u, h, n);
            store_operand(next + r * padded(H) + u, h, LANES);
        }
    }
#ifdef OWN_CELL
    INLINE void own(int64_t u, int64_t s, int64_t last, const real *x, int64_t apart, const real *sums, operand *next) const {
        int64_t n = H - u;
        if (n <= 0) return;
        const real *b_hh = static_cast<const real *>(job->b_hh), *p = static_cast<const real *>(job->own);
        vec a[OWN_GATES], a_h[OWN_GATES], before[OWN_STATES], after[OWN_STATES], own[OWN_PARAMETERS + 1];
        FLATTEN for (int g = 0; g < OWN_GATES; g++) {
            a[g] = load(x + g * apart, n), a_h[g] = load(sums + g * LANES);
            if (OWN_SUMMED[g])
                a[g] += a_h[g];
            else if (b_hh)
                a_h[g] += load(b_hh + g * H + u, n);
        }
        before[0] = load(hs + last * H + u, n);
        FLATTEN for (int i = 1; i < OWN_STATES; i++) before[i] = load(cs + last * C + (i - 1) * H + u, n);
        FLATTEN for (int i = 0; i < OWN_PARAMETERS; i++) own[i] = load(p + i * H + u, n);
        vec drawn[OWN_NOISE + 1];
        const real *noise = static_cast<const real *>(job->noise) + s * OWN_NOISE * H + u;
        FLATTEN for (int i = 0; i < OWN_NOISE; i++) drawn[i] = load(noise + i * H, n);
        vec kept[OWN_GATES + OWN_APART];
        own_step(a, a_h, before, own, drawn, after, kept);
        real *to = gates + s * kept_of(OWN) * H + u;
        if (gates) FLATTEN for (int i = 0; i < OWN_GATES + OWN_APART; i++) store(to + i * H, kept[i], n);
        FLATTEN for (int i = 1; i < OWN_STATES; i++) store(cs + (s + B) * C + (i - 1) * H + u, after[i], n);
        store(hs + (s + B) * H + u, after[0], n);
        store_operand(next + u, after[0], n); /* beyond n may be anything, and must stay 0 */
    }
#endif
    void finish_cell(int64_t p, Rows rows, const real *sums, operand *next) const {
#ifdef OWN_CELL
        return finish<OWN>(p, rows, sums, next);
#endif
        switch (job->cell) {
        case TANH: return finish<TANH>(p, rows, sums, next);
        case RELU: return finish<RELU>(p, rows, sums, next);
        case LINEAR: return finish<LINEAR>(p, rows, sums, next);
        case GRU: return finish<GRU>(p, rows, sums, next);
        default: return finish<LSTM>(p, rows, sums, next);
        }
    }

    /* The units of panels [from, to) alone. */
    template <int C>
    void step(Rows rows, const operand *h, operand *next, int64_t from, int64_t to, operand *place) const {
        int64_t ld = padded(H), size = at.panel_size(H), inputs = at.panel_size(job->I);
        operand *below = place && late ? place + size : nullptr, *turned = place ? place + size + (late ? inputs : 0) : nullptr;
        alignas(64) real sums[ROWS<C> * C * LANES], found[ROWS<C> * C * LANES];
        for (int64_t i = from; i < to; i++) {
            int64_t p = turning(rows.t, i, from, to);
            if (place) pack_transposed(at, p, W_hh, H, place, turned);
            if (below) pack_transposed(at, p, static_cast<const real *>(job->W_ih), job->I, below, turned);
            const operand *panel = place ? place : panels + p * size;
            groups(rows.count, ROWS<C>, [&](int64_t lo, int64_t hi) {
                Rows some = part(rows, lo, hi);
                if (late) some.found = multiply_inputs<C>(p, below ? below : W_ih + p * inputs, some, found);
                expect(p, some);
                multiply<C>(p, int(hi - lo), {h + lo * ld, ld}, panel, H, sums);
                finish_cell(p, some, sums, next + lo * ld);
            });
        }
    }
    /* The rows times panel p of W_hh or W_ih, K deep: C vectors of sums a row, in `out`. */
    template <int C> INLINE void multiply(int64_t p, int rows, Operands x, const operand *panel, int64_t K, real *out) const {
        if (at.sharing(p) > 1) {
            alignas(64) real sums[ROWS<C> * C * LANES];
            multiply_shared<C - 1, ROWS<C>>(at.vectors(p), rows, x, panel, K, sums);
            for (int r = 0; r < rows; r++) part_gates(p, sums + r * at.vectors(p) * LANES, out + r * C * LANES);
            return;
        }
#ifndef HALF
        if (dealt) return dealt_tile_of<C>(rows, x.first, x.stride, panel, K, out);
#endif
        tile_of<C>(rows, x.first, x.stride, panel, ceil_div(K, PAIR), out);
    }
    /* At most MOST rows times a panel of at most C vectors. */
    template <int C, int MOST>
    INLINE void multiply_shared(int vectors, int rows, Operands x, const operand *panel, int64_t K, real *out) const {
        if constexpr (C > 1)
            if (vectors < C) return multiply_shared<C - 1, MOST>(vectors, rows, x, panel, K, out);
#ifndef HALF
        if (dealt) return dealt_short_of<C, at_most(MOST, FEW)>(rows, x.first, x.stride, panel, K, out);
#endif
        tile_of<C, MOST>(rows, x.first, x.stride, panel, ceil_div(K, PAIR), out);
    }
    /* Sums of gates that share vectors, to a vector for each. */
    INLINE void part_gates(int64_t p, const real *sums, real *out) const {
        int64_t left = at.left(), sharing = at.sharing(p);
        for (int64_t g = 0; g < at.gates; g++)
            store(out + g * LANES, load(sums + g / sharing * LANES + g % sharing * left, left));
    }
    /* x W_ihᵀ + b of the rows, in `out`. */
    template <int C> INLINE const real *multiply_inputs(int64_t p, const operand *panel, Rows rows, real *out) const {
        multiply<C>(p, int(rows.count), rows.x, panel, job->I, out);
        for (int64_t r = 0; r < rows.count; r++)
            FLATTEN for (int c = 0; c < C; c++) {
                int64_t u = at.unit(p, c);
                real *sums = out + (r * C + c) * LANES;
                if (u < H) store(sums, load(sums) + load(bias + at.gate(c) * H + u, H - u));
            }
        return out;
    }
    /* Units [u, u + LANES) of a row, which may begin anywhere in a cache line. */
    template <int WRITE> static INLINE void fetch(const real *row) {
        __builtin_prefetch(row, WRITE);
        __builtin_prefetch(row + LANES - 1, WRITE);
    }
    /* What `finish` will read and write far from here, fetched while the product is found. */
    INLINE void expect(int64_t p, Rows rows) const {
        int64_t u = at.unit(p, 0), s = start_of(job, rows.t) + rows.b, kept = gates ? kept_of(job->cell) : 0;
        for (int64_t r = 0; r < rows.count; r++, s++) {
            for (int c = 0; !late && c < at.vectors(); c++) fetch<0>(input(p, rows, r) + c * apart(rows));
            fetch<1>(hs + (s + B) * H + u);
            if (job->c_in_place)
                fetch<1>(cs + (rows.b + r) * H + u);
            else if (cs)
                fetch<0>(cs + s * C + u), fetch<1>(cs + (s + B) * C + u);
            for (int64_t g = 0; g < kept; g++) fetch<1>(gates + (s * kept + g) * H + u);
        }
    }
#ifndef HALF
    void few_step(Rows rows, const operand *h, operand *next, int64_t from, int64_t to) const {
        int64_t row = at.vectors() * LANES;
        alignas(64) real sums[FEW * (OWN_GATES > 4 ? OWN_GATES : 4) * LANES] = {};
        for (int64_t i = from; i < to; i++) {
            int64_t p = turning(rows.t, i, from, to);
            for (int c = 0; c < at.vectors(); c++) {
                int64_t u = at.unit(p, c), n = at_most(H - u, LANES);
                if (n > 0 && lined)
                    lined_dots(h, lined + (p * at.vectors() + c) * LANES * whole_vectors(H), H, n, sums + c * LANES);
                else if (n > 0)
                    dots_of(rows.count, h, padded(H), W_hh + (at.gate(c) * H + u) * H, H, n, sums + c * LANES, row);
            }
            finish_cell(p, rows, sums, next);
        }
    }
#endif
    /* How many of rows [b0, b1) there are at a step. */
    int64_t here(int64_t t, int64_t b0, int64_t b1) const {
        int64_t all = at_most(rows_at(job, t), b1);
        return all > b0 ? all - b0 : 0;
    }
    /* h_0 of rows [b0, b1) as operands. */
    void start(int64_t b0, int64_t b1, operand *h) const {
        for (int64_t b = b0; b < b1; b++) pack_row(hs + b * H, H, h + (b - b0) * padded(H));
    }
    /* Rows [b0, b1) through steps [t0, t1); `in` are their inputs, or those of all rows from b0 on. `h` and `next` hold
     * them as operands, and change places at each step. */
    void run(int64_t t0, int64_t t1, int64_t b0, int64_t b1, const real *in, bool of_all, operand *&h, operand *&next) const {
        int64_t ld = padded(H), rows = b1 - b0;
        for (int64_t t = t0; t < t1; t++) {
            int64_t there = here(t, b0, b1);
            if (rows > there) rows = there;
            while (rows > 0 && held(t, b0 + rows - 1)) rows--; /* the last rows have all ended */
            if (rows > 0) advance(rows_of(t, b0, rows, in), h, next, 0, at.panels());
            if (job->lengths)
                for (int64_t b = b0; b < b1; b++)
                    if (held(t, b)) hold(t, b, h + (b - b0) * ld, next + (b - b0) * ld);
            swap(h, next);
            in += (of_all ? rows_at(job, t) : there) * in_stride;
        }
    }
    /* Rows [b0, b1) through all of time, every input in `in`. */
    void run_all(int64_t b0, int64_t b1, const real *in, operand *h, operand *next) const {
        start(b0, b1, h);
        run(0, T, b0, b1, in + b0 * in_stride, true, h, next);
    }
    static void swap(operand *&a, operand *&b) {
        operand *other = a;
        a = b;
        b = other;
    }
    /* Of each thread, in a single step: a panel of W_hh and, of late inputs, of W_ih, and LANES rows while they are turned. */
    static int64_t room_of(Layout at, int64_t I) {
        return at.panel_size(at.units) + at.panel_size(I) + LANES * padded(I > at.units ? I : at.units);
    }

    void advance(Rows rows, const operand *h, operand *next, int64_t from, int64_t to, operand *place = nullptr) const {
#ifndef HALF
        if (!panels && !place) return few_step(rows, h, next, from, to);
#endif
#ifdef OWN_CELL
        return step<OWN_GATES == 1 ? 2 : OWN_GATES>(rows, h, next, from, to, place);
#endif
        switch (at.vectors()) {
        case 2: return step<2>(rows, h, next, from, to, place);
        case 3: return step<3>(rows, h, next, from, to, place);
        default: return step<4>(rows, h, next, from, to, place);
        }
    }
    /* All rows through all of time, threads splitting the units. */
    void run_together(int64_t threads, const real *in, operand *h, operand *next) const {
        start(0, B, h);
        for (int64_t t = 0; t < T; t++, in += B * in_stride) {
            Rows rows = rows_of(t, 0, B, in);
            each(threads, threads, [&](int64_t i) {
                advance(rows, h, next, at.panels() * i / threads, at.panels() * (i + 1) / threads,
                        room ? room + i * room_of(at, late ? job->I : 0) : nullptr);
            });
            swap(h, next);
        }
    }
    void hold(int64_t t, int64_t b, const operand *h, operand *next) const {
        int64_t from = t * B + b, to = from + B;
        memcpy(hs + to * H, hs + from * H, size_t(H) * sizeof(real));
        if (cs && !job->c_in_place) memcpy(cs + to * C, cs + from * C, size_t(C) * sizeof(real));
        memcpy(next, h, size_t(padded(H)) * sizeof(operand));
    }
};

/* Whether a gate uses W_hh h + b_hh by itself before the input's share is added. */
INLINE bool is_apart(int64_t cell, int64_t gate) {
#ifdef OWN_CELL
    return !OWN_SUMMED[gate];
#endif
    return cell == GRU && gate == 2;
}

/* b_ih + b_hh; a gru adds b_hn inside the reset gate's product instead. */
void add_biases(const Job *job, real *bias) {
    int64_t M = gates_of(job->cell) * job->H;
    const real *b_ih = static_cast<const real *>(job->b_ih), *b_hh = static_cast<const real *>(job->b_hh);
    for (int64_t m = 0; m < M; m++)
        bias[m] = (b_ih ? b_ih[m] : real(0)) + (b_hh && !is_apart(job->cell, m / job->H) ? b_hh[m] : real(0));
}

/* Row i of out = column ids[i] of W_ih (or column i, where there are no ids) + bias. */
void look_up(const Job *job, int64_t threads, const int64_t *ids, int64_t rows, const real *bias, real *out) {
    int64_t M = gates_of(job->cell) * job->H, I = job->I;
    const real *W_ih = static_cast<const real *>(job->W_ih);
    int64_t tasks = at_most(threads, rows);
    each(threads, tasks, [&](int64_t task) {
        for (int64_t i = rows * task / tasks; i < rows * (task + 1) / tasks; i++)
            for (int64_t m = 0, id = ids ? ids[i] : i; m < M; m++) out[i * M + m] = W_ih[m * I + id] + bias[m];
    });
}

/* `turned` holds LANES · padded(K) operands for each thread. */
void pack_all(Layout at, int64_t threads, const real *W, int64_t K, operand *panels, operand *turned, bool dealt = false) {
    int64_t starts[LANES], dealt_before = 0;
    for (int i = 0; i < LANES; dealt_before += hand_size(K, hand(i++))) starts[hand(i)] = dealt_before;
    each(threads, threads, [&](int64_t i) {
        for (int64_t p = at.panels() * i / threads; p < at.panels() * (i + 1) / threads; p++)
            pack_transposed(at, p, W, K, panels + p * at.panel_size(K), turned + i * LANES * padded(K),
                            dealt ? starts : nullptr);
    });
}

#ifndef HALF
void line_up_all(Layout at, int64_t threads, const real *W, int64_t K, real *out) {
    int64_t vectors = at.panels() * at.vectors(), tasks = at_most(threads, vectors);
    each(threads, tasks, [&](int64_t i) {
        for (int64_t v = vectors * i / tasks; v < vectors * (i + 1) / tasks; v++) {
            int c = int(v % at.vectors());
            int64_t unit = at.unit(v / at.vectors(), c);
            line_up(W + (at.gate(c) * at.units + unit) * K, K, at.units - unit, out + v * LANES * whole_vectors(K));
        }
    });
}
#endif

/* in = x W_ihᵀ + bias, S rows, into rows of `stride`. */
struct Projection {
    const Job *job;
    const Layout at;
    const real *bias;
    int64_t threads;
    const int64_t M = gates_of(job->cell) * job->H, I = job->I;
    const real *W_ih = static_cast<const real *>(job->W_ih);

    bool run(const real *xs, int64_t S, real *in, int64_t stride) const {
#ifndef HALF
        /* by the batch alone, so that pieces of time agree to the last bit: both sum in one order */
        if (job->B <= FEW) return I <= LANES / 2 && S >= MANY_STEPS ? dealt(xs, S, in, stride) : few(xs, S, in, stride);
#endif
        if (S <= READ_ONCE) return once(xs, S, in, stride);
        Buffer<operand> panels(at.size(I));
        return pack(panels) && packed(panels.data, xs, S, in, stride);
    }
#ifndef HALF
    /* Of inputs of a few numbers: `few` would add up lanes that hold nothing. */
    bool dealt(const real *xs, int64_t S, real *in, int64_t stride) const {
        Buffer<operand> panels(at.size(I));
        return pack(panels, true) && packed(panels.data, xs, S, in, stride, true);
    }
    bool few(const real *xs, int64_t S, real *in, int64_t stride) const {
        Buffer<real> x(S * padded(I));
        if (!x.ok()) return false;
        for (int64_t s = 0; s < S; s++) pack_row(xs + s * I, I, x.data + s * padded(I));
        int64_t fitting = (64 << 10) / int64_t(sizeof(real)) / I; /* rows of W_ih that stay in the cache */
        int64_t width = at_most(ceil_div(M, threads), fitting < LANES ? LANES : fitting / LANES * LANES);
        each(threads, ceil_div(M, width), [&](int64_t i) {
            int64_t m = i * width, n = at_most(width, M - m);
            groups(S, A_FEW, [&](int64_t s, int64_t stop) {
                dots_of(stop - s, x.data + s * padded(I), padded(I), W_ih + m * I, I, n, in + s * stride + m, stride);
                for (; s < stop; s++)
                    for (int64_t u = m; u < m + n; u += LANES) {
                        real *to = in + s * stride + u;
                        store(to, load(to, m + n - u) + load(bias + u, m + n - u), m + n - u);
                    }
            });
        });
        return true;
    }
#endif
    bool once(const real *xs, int64_t S, real *in, int64_t stride) const {
        int64_t parts = at_most(threads, at.panels()), panel = at.panel_size(I), turned = LANES * padded(I);
        Product product{xs, I, I, nullptr, bias, in, M, stride};
        Buffer<operand> room(parts * (panel + turned + S * padded(I)));
        if (!room.ok()) return false;
        each(threads, parts, [&](int64_t i) {
            operand *mine = room.data + i * (panel + turned + S * padded(I));
            product.run_once(at, W_ih, at.panels() * i / parts, at.panels() * (i + 1) / parts, S, mine, mine + panel,
                             mine + panel + turned);
        });
        return true;
    }
    bool pack(Buffer<operand> &panels, bool is_dealt = false) const {
        Buffer<operand> turned(threads * LANES * padded(I));
        if (!panels.ok() || !turned.ok()) return false;
        pack_all(at, threads, W_ih, I, panels.data, turned.data, is_dealt);
        return true;
    }
    bool packed(const operand *panels, const real *xs, int64_t S, real *in, int64_t stride, bool is_dealt = false) const {
        Product product{xs, I, I, panels, bias, in, M, stride, is_dealt};
        int64_t tasks = threads * 4;
        Buffer<operand> scratch(tasks * product.scratch());
        if (!scratch.ok()) return false;
        each(threads, tasks, [&](int64_t i) {
            product.run(S * i / tasks, S * (i + 1) / tasks, scratch.data + i * product.scratch());
        });
        return true;
    }
};

/* Steps whose inputs are projected together: few enough to be read while they are still in the cache, but enough rows
 * for one more visit to all of W_ih. */
INLINE int64_t steps_ahead(const Job *job, int64_t rows) {
    int64_t least = job->I < Product::ROWS_AT_ONCE ? Product::ROWS_AT_ONCE : job->I;
    return at_most(job->T, ceil_div(least, rows));
}

/* Rows [b0, b1) through all of time, their inputs projected some steps ahead; `W_ih` is packed. */
bool run_ahead(const Forward &run, const real *bias, const operand *W_ih, int64_t b0, int64_t b1, operand *h, operand *next) {
    const Job *job = run.job;
    int64_t rows = b1 - b0, I = job->I, M = gates_of(job->cell) * job->H, ahead = steps_ahead(job, rows);
    bool apart = rows < job->B; /* they do not lie side by side */
    Buffer<real> in(ahead * rows * M), gathered(apart ? ahead * rows * padded(I) : 0);
    Product product{gathered.data, padded(I), I, W_ih, bias, in.data, M, M};
    Buffer<operand> scratch(product.scratch());
    if (!in.ok() || !gathered.ok() || !scratch.ok()) return false;
    run.start(b0, b1, h);
    for (int64_t t0 = 0; t0 < job->T; t0 += ahead) {
        int64_t t1 = at_most(job->T, t0 + ahead);
        const real *xs = static_cast<const real *>(job->xs) + b0 * I;
        if (!apart) product.X = xs + start_of(job, t0) * I, product.x_stride = I;
        int64_t count = apart ? 0 : start_of(job, t1) - start_of(job, t0);
        for (int64_t t = t0; apart && t < t1; t++)
            for (int64_t b = 0, here = run.here(t, b0, b1); b < here; b++)
                memcpy(gathered.data + count++ * padded(I), xs + (start_of(job, t) + b) * I, size_t(I) * sizeof(real));
        product.run(0, count, scratch.data);
        run.run(t0, t1, b0, b1, in.data, false, h, next);
    }
    return true;
}

int forward(const Job *job) {
    int64_t S = start_of(job, job->T), H = job->H, threads = useful_threads(job);
    Layout at{gates_of(job->cell), H};
    int64_t M = at.gates * H;
    int64_t kept = kept_of(job->cell);
    bool gated = at.gates > 1 || job->cell == OWN, few = PAIR == 1 && job->B <= 4, table = job->ids && (job->E || job->I <= S);
    if (job->ids)
        for (int64_t s = 0; s < S; s++)
            if (job->ids[s] < 0 || job->ids[s] >= names_of(job)) return BAD_ID;

    bool once = !few && job->T == 1 && !job->lengths && !job->sizes, together = once || splits_units(job);
    int64_t blocks = together ? 1 : blocks_of(job, threads), rows = ceil_div(job->B, blocks);
    bool many = few && job->T >= MANY_STEPS, dealt = many && rows > 1, packed = dealt || (!few && !once);
    bool late = !few && (once ? steps_late(job) : multiplies_late(job)), ahead = !job->ids && !few && !together && !late && S > READ_ONCE;
    Buffer<real> lined(many && !dealt ? at.panels() * at.vectors() * LANES * ceil_div(H, LANES) * LANES : 0);
    Buffer<operand> panels(packed ? at.size(H) : 0), turned(packed ? threads * LANES * padded(H) : 0);
    Buffer<operand> room(once ? threads * Forward::room_of(at, late ? job->I : 0) : 0);
    Buffer<operand> W_ih(late && once ? 0 : late ? at.size(job->I) : ahead ? Layout{1, M}.size(job->I) : 0), late_xs(late ? job->B * padded(job->I) : 0);
    Buffer<real> bias(M), looked(job->ids ? (table ? names_of(job) : S) * M : 0);
    Buffer<real> unwanted(!job->ids && !ahead && !late && gated && !job->gates ? S * kept * H : 0);
    int64_t state = rows * padded(H);
    Buffer<operand> states(2 * blocks * state);
    if (!lined.ok() || !room.ok() || !panels.ok() || !turned.ok() || !bias.ok() || !looked.ok() || !unwanted.ok() || !states.ok() ||
        !late_xs.ok())
        return NO_MEMORY;

    real *hs = static_cast<real *>(job->hs), *gates = static_cast<real *>(job->gates);
    memcpy(hs, job->h_0, size_t(job->B * H) * sizeof(real));
    if (job->c_0) memcpy(job->cs, job->c_0, size_t(job->B * extra_of(job->cell) * H) * sizeof(real));
    memset(states.data, 0, size_t(2 * blocks * state) * sizeof(operand));
    add_biases(job, bias.data);
#ifndef HALF
    if (lined.data) line_up_all(at, threads, static_cast<const real *>(job->W_hh), H, lined.data);
#endif
    if (panels.data)
        pack_all(at, threads, static_cast<const real *>(job->W_hh), H, panels.data, turned.data, dealt);
    Projection inputs{job, late ? at : Layout{1, M}, bias.data, threads};
    /* Projected inputs wait where the results of the same step will overwrite them, unless they are found as they are wanted. */
    real *in = job->ids ? looked.data : !gated ? hs + job->B * H : gates ? gates : unwanted.data;
    int64_t stride = late ? job->I : job->ids || !gated || ahead ? M : kept * H;
    const real *xs = static_cast<const real *>(job->E ? job->E : job->xs), *read = late ? xs : in;
    if (job->ids && !job->E)
        look_up(job, threads, table ? nullptr : job->ids, table ? job->I : S, bias.data, in);
    else if (!(once && late) && !(late || ahead ? inputs.pack(W_ih) : inputs.run(xs, job->E ? job->V : S, in, stride)))
        return NO_MEMORY;

    Forward run{job, at, panels.data, lined.data, dealt, room.data, table ? in : nullptr, stride, gates, late, W_ih.data,
                bias.data, late_xs.data};
    if (together) {
        run.run_together(once ? threads : job->threads, read, states.data, states.data + state);
        return OK;
    }
    std::atomic<bool> ok{true};
    each(threads, blocks, [&](int64_t i) {
        int64_t b0 = job->B * i / blocks, b1 = job->B * (i + 1) / blocks;
        operand *h = states.data + 2 * i * state, *next = h + state;
        if (!ahead)
            run.run_all(b0, b1, read, h, next);
        else if (!run_ahead(run, bias.data, W_ih.data, b0, b1, h, next))
            ok = false;
    });
    return ok ? OK : NO_MEMORY;
}

} // namespace
