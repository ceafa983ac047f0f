/* The way back: dh_{t-1} = ξ_t (∂h_t/∂h_{t-1})ᵀ dh_t + dhs_{t-1} over a piece of time, then what it adds to every
 * weight gradient, as large products. */
#pragma once
#include "forward.h"
#include "head.h"
#include <atomic>

namespace {

/* Which gates' pulls on a_hh are not those on a_ih: they lie beside them, `shift` gates further. */
INLINE Columns hidden_columns(const Job *job) {
    int64_t gates = gates_of(job->cell);
    if (job->cell == GRU) return {gates, job->H, 2, 1};
    if (job->cell == OWN && OWN_APART) return {gates, job->H, 0, gates};
    return {gates, job->H};
}
INLINE Columns input_columns(const Job *job) { return {gates_of(job->cell), job->H}; }
/* Blocks of a row of pulls. */
INLINE int64_t pulls_of(const Job *job) {
    Columns hidden = hidden_columns(job);
    return hidden.blocks() + hidden.shift * hidden.per_gate();
}

struct Backward {
    const Job *job;
    const operand *panels; /* W_hh for y ↦ y W_hh */
    real *da;              /* pulls on a_ih and, where they differ, on a_hh, by blocks */
    real *down;            /* (S, P, H): pulls on a described cell's own numbers */
    int64_t first;         /* the row of time and batch that both begin with */
    const real *dhs;       /* (S, H), or null */
    int64_t pulled;        /* the row that this begins with, */
    real *found;           /* or the pulls of one step, (B, H), that are found just before it goes back, */
    const Output *out;     /* from this loss */
    bool shared;           /* whether other threads will read da */
    const operand *inputs; /* W_ih for y ↦ y W_ih, where dxs are found step by step; or null */
    real *room = nullptr;  /* (B, padded(H)) for sums where W_hh is read where it lies, without panels */

    const int64_t T = job->T, B = job->B, H = job->H, gates_n = gates_of(job->cell), M = gates_n * H;
    const int64_t C = extra_of(job->cell) * H, per_gate = ceil_div(H, LANES), width = pulls_of(job) * LANES;
    const real *hs = static_cast<const real *>(job->hs), *cs = static_cast<const real *>(job->cs);
    const real *gates = static_cast<const real *>(job->gates);
    const real *xi = static_cast<const real *>(job->xi);

    bool held(int64_t t, int64_t b) const { return job->lengths && t >= job->lengths[b]; }
    real carry(int64_t t, int64_t b) const { return !xi ? real(1) : job->xi_per_row ? xi[t * B + b] : xi[t]; }

    /* The pulls of one row: a vector for each block, `apart` from one another. */
    struct Kept {
        real *first;
        int64_t apart;
    };
    Kept kept_at(int64_t t, int64_t b) const {
        return {da + (start_of(job, t) - first) * width + b * LANES, rows_at(job, t) * LANES};
    }
    /* Pulls that others have read lie in their cores' caches, which must let go of a line before it can be written: so
     * those are written past all caches, where nobody waits. */
    INLINE void keep_pull(Kept kept, int64_t gate, int64_t u, vec v) const {
        real *to = kept.first + (gate * per_gate + u / LANES) * kept.apart;
        if (shared) return stream(to, v);
        store(to, v);
    }
    /* One row, its units [from, to): from dh + dhs (and dc) to da; leaves in dh what goes back without passing W_hh. */
    template <int CELL>
    void row(int64_t s, int64_t last, const real *pull, Kept kept, real keep, real *dh, real *dc, operand *y, int64_t from,
             int64_t to) const {
        for (int64_t u = from; u < to; u += LANES) {
            int64_t n = H - u;
            vec d = load(dh + u, n);
            if (pull) d += load(pull + u, n);
            if constexpr (CELL == GRU || CELL == LSTM)
                gated<CELL>(s, last, u, n, kept, keep, d, dh, dc, y);
#ifdef OWN_CELL
            else if constexpr (CELL == OWN)
                own(s, last, u, n, kept, keep, d, dh, dc, y);
#endif
            else {
                vec h = load(hs + (s + B) * H + u, n);
                d = CELL == TANH ? d * (real(1) - h * h) : CELL == RELU ? (h <= 0 ? vec{} : d) : d;
                keep_pull(kept, 0, u, d);
                store_operand(y + u, d, n);
                store(dh + u, vec{}, n);
            }
        }
    }
    template <int CELL>
    INLINE void gated(int64_t s, int64_t last, int64_t u, int64_t n, Kept kept, real keep, vec d, real *dh, real *dc,
                      operand *y) const {
        vec g[4], a[4];
        FLATTEN for (int i = 0; i < 4; i++) g[i] = load(gates + (s * 4 + i) * H + u, n);
        if constexpr (CELL == GRU) { /* g = r z n a_hn */
            vec h = load(hs + last * H + u, n);
            a[2] = d * (real(1) - g[1]) * (real(1) - g[2] * g[2]);
            a[1] = d * (h - g[2]) * (g[1] * (real(1) - g[1]));
            a[0] = a[2] * g[3] * (g[0] * (real(1) - g[0]));
            a[3] = a[2] * g[0];
            store(dh + u, d * g[1], n);
            FLATTEN for (int i = 0; i < 4; i++) keep_pull(kept, i, u, a[i]);
            FLATTEN for (int i = 0; i < 3; i++) store_operand(y + i * H + u, a[i == 2 ? 3 : i], n);
        } else { /* g = i f g o */
            vec tanh_c = vtanh(load(cs + (s + B) * H + u, n)), c = load(cs + last * H + u, n);
            vec e = load(dc + u, n) + d * g[3] * (real(1) - tanh_c * tanh_c);
            a[0] = e * g[2] * (g[0] * (real(1) - g[0]));
            a[1] = e * c * (g[1] * (real(1) - g[1]));
            a[2] = e * g[0] * (real(1) - g[2] * g[2]);
            a[3] = d * tanh_c * (g[3] * (real(1) - g[3]));
            store(dh + u, vec{}, n);
            store(dc + u, keep == 0 ? vec{} : keep * e * g[1], n);
            FLATTEN for (int i = 0; i < 4; i++) {
                keep_pull(kept, i, u, a[i]);
                store_operand(y + i * H + u, a[i], n);
            }
        }
    }
#ifdef OWN_CELL
    INLINE void own(int64_t s, int64_t last, int64_t u, int64_t n, Kept pulls, real keep, vec d, real *dh, real *dc,
                    operand *y) const {
        const real *from = gates + s * kept_of(OWN) * H + u, *p = static_cast<const real *>(job->own);
        vec kept[OWN_GATES + OWN_APART], before[OWN_STATES], own[OWN_PARAMETERS + 1], dafter[OWN_STATES];
        vec da_x[OWN_GATES], da_h[OWN_GATES], dbefore[OWN_STATES], downs[OWN_PARAMETERS + 1];
        FLATTEN for (int i = 0; i < OWN_GATES + OWN_APART; i++) kept[i] = load(from + i * H, n);
        before[0] = load(hs + last * H + u, n), dafter[0] = d;
        FLATTEN for (int i = 1; i < OWN_STATES; i++) {
            before[i] = load(cs + last * C + (i - 1) * H + u, n);
            dafter[i] = load(dc + (i - 1) * H + u, n);
        }
        FLATTEN for (int i = 0; i < OWN_PARAMETERS; i++) own[i] = load(p + i * H + u, n);
        vec drawn[OWN_NOISE + 1];
        const real *noise = static_cast<const real *>(job->noise) + s * OWN_NOISE * H + u;
        FLATTEN for (int i = 0; i < OWN_NOISE; i++) drawn[i] = load(noise + i * H, n);
        own_step_back(kept, before, own, drawn, dafter, da_x, da_h, dbefore, downs);
        store(dh + u, dbefore[0], n);
        FLATTEN for (int i = 1; i < OWN_STATES; i++)
            store(dc + (i - 1) * H + u, keep == 0 ? vec{} : keep * dbefore[i], n);
        FLATTEN for (int i = 0; i < OWN_PARAMETERS; i++) store(down + ((s - first) * OWN_PARAMETERS + i) * H + u, downs[i], n);
        FLATTEN for (int g = 0; g < OWN_GATES; g++) {
            keep_pull(pulls, g, u, da_x[g]);
            if (OWN_APART) keep_pull(pulls, OWN_GATES + g, u, da_h[g]);
            store_operand(y + g * H + u, da_h[g], n);
        }
    }
#endif
    void row_of_cell(int64_t t, int64_t b, real *dh, real *dc, operand *y, int64_t from, int64_t to) const {
        int64_t s = start_of(job, t) + b, last = before(job, t) + b;
        Kept kept = kept_at(t, b);
        real keep = carry(t, b);
#ifdef OWN_CELL
        return row<OWN>(s, last, pull_on(t, b), kept, keep, dh, dc, y, from, to);
#endif
        switch (job->cell) {
        case TANH: return row<TANH>(s, last, pull_on(t, b), kept, keep, dh, dc, y, from, to);
        case RELU: return row<RELU>(s, last, pull_on(t, b), kept, keep, dh, dc, y, from, to);
        case LINEAR: return row<LINEAR>(s, last, pull_on(t, b), kept, keep, dh, dc, y, from, to);
        case GRU: return row<GRU>(s, last, pull_on(t, b), kept, keep, dh, dc, y, from, to);
        default: return row<LSTM>(s, last, pull_on(t, b), kept, keep, dh, dc, y, from, to);
        }
    }
    /* A held step: its pull passes by it, its weights get nothing. */
    void pass(int64_t t, int64_t b, real *dh, operand *y) const {
        int64_t s = t * B + b;
        const real *pull = pull_on(t, b);
        for (int64_t u = 0; pull && u < H; u += LANES) store(dh + u, load(dh + u, H - u) + load(pull + u, H - u), H - u);
        Kept kept = kept_at(t, b);
        for (int64_t p = 0; p < pulls_of(job); p++) store(kept.first + p * kept.apart, vec{});
        if (down) memset(down + (s - first) * OWN_PARAMETERS * H, 0, size_t(OWN_PARAMETERS * H) * sizeof(real));
        memset(y, 0, size_t(M) * sizeof(operand));
    }
    /* dh ← ξ (dh + y W_hh) for the rows that moved, units [from, to): whole pairs of vectors. */
    void hand_back(int64_t t, int64_t b0, int64_t rows, const operand *y, real *dh, int64_t from, int64_t to) const {
        int64_t k_steps = ceil_div(M, PAIR), y_row = padded(M);
#ifndef HALF
        if (!panels) {
            int64_t row = padded(H);
            real *found = room + b0 * row;
            weigh(y, y_row, rows, static_cast<const real *>(job->W_hh), M, H, from, to, found, row);
            for (int64_t n = from; n < to; n += 2 * LANES)
                for (int64_t r = 0; r < rows; r++)
                    if (!held(t, b0 + r)) add(carry(t, b0 + r), n, found + r * row + n, dh + r * H);
            return;
        }
#endif
        alignas(64) real sums[SUMS * LANES];
        for (int64_t n = from; n < to; n += 2 * LANES)
            groups(rows, ROWS<2>, [&](int64_t lo, int64_t hi) {
                two_vectors(H - n, int(hi - lo), y + lo * y_row, y_row, panels + n / LANES * k_steps * PANEL, k_steps, sums);
                for (int64_t r = lo; r < hi; r++)
                    if (!held(t, b0 + r)) add(carry(t, b0 + r), n, sums + (r - lo) * 2 * LANES, dh + r * H);
            });
    }
    INLINE void add(real keep, int64_t n, const real *sums, real *dh) const {
        for (int64_t u = n; u < n + 2 * LANES && u < H; u += LANES) {
            vec d = keep * (load(dh + u, H - u) + load(sums + u - n));
            store(dh + u, keep == 0 ? vec{} : d, H - u);
        }
    }
    bool all_cut(int64_t t, int64_t b0, int64_t rows) const {
        for (int64_t b = b0; b < b0 + rows; b++)
            if (held(t, b) || carry(t, b) != 0) return false;
        return true;
    }
    /* dx_t = da_t W_ih, while da_t lies in the cache row by row. */
    void pull_inputs(int64_t t, int64_t b0, int64_t rows, const operand *y) const {
        int64_t s = start_of(job, t) + b0, I = job->I;
        Product below{nullptr, 0, M, inputs, nullptr, static_cast<real *>(job->dxs), I, I};
        below.run_on({y, padded(M)}, s, s + rows, 0, ceil_div(M, PAIR));
    }
    /* The pull on a row of h_t from outside. */
    const real *pull_on(int64_t t, int64_t b) const {
        return found ? found + b * H : dhs ? dhs + (start_of(job, t) + b - pulled) * H : nullptr;
    }
    void find_pulls(int64_t t, int64_t b0, int64_t b1, operand *scratch) const {
        groups(b1 - b0, Output::ROWS_AT_ONCE, [&](int64_t from, int64_t to) {
            out->run(t * B + b0 + from, t * B + b0 + to, found + (b0 + from) * H, scratch);
        });
    }
    /* Rows [b0, b1) back through steps [t0, t1); dh and dc hold their pulls, y one step of da; `scratch` is for the loss. */
    void run(int64_t t0, int64_t t1, int64_t b0, int64_t b1, real *dh, real *dc, operand *y, operand *scratch) const {
        int64_t y_row = padded(M);
        for (int64_t t = t1 - 1; t >= t0; t--) {
            if (found) find_pulls(t, b0, b1, scratch);
            int64_t active = 0, rows = at_most(rows_at(job, t), b1) - b0;
            for (int64_t r = 0; r < rows; r++) {
                if (held(t, b0 + r)) {
                    pass(t, b0 + r, dh + r * H, y + r * y_row);
                } else {
                    row_of_cell(t, b0 + r, dh + r * H, dc ? dc + r * C : nullptr, y + r * y_row, 0, H);
                    active = r + 1;
                }
            }
            if (inputs) pull_inputs(t, b0, rows, y);
            if (!t && !job->dh_0) break; /* nobody asks what pulls on the first states */
            if (active > 0 && active == rows && all_cut(t, b0, rows))
                memset(dh, 0, size_t(rows * H) * sizeof(real));
            else if (active > 0)
                hand_back(t, b0, active, y, dh, 0, H);
        }
        if (shared) end_streams();
    }
    /* All rows back through steps [t0, t1), threads splitting the units, one meeting a step: who has handed back
     * to its own units needs no others to go on with them. y has room for two steps, since the last may still
     * be read. */
    void run_together(int64_t threads, int64_t t0, int64_t t1, real *dh, real *dc, operand *y) const {
        int64_t pairs = ceil_div(H, 2 * LANES), y_row = padded(M);
        int64_t last = t0 || job->dh_0 ? t0 - 1 : t0; /* nobody may ask what pulls on the first states */
        for (int64_t t = t1 - 1; t >= last; t--)
            each(threads, threads, [&](int64_t i) {
                int64_t from = pairs * i / threads * 2 * LANES, to = at_most(pairs * (i + 1) / threads * 2 * LANES, H);
                if (t < t1 - 1) back_to(t + 1, y + (t + 1) % 2 * B * y_row, dh, from, to);
                for (int64_t b = 0; t >= t0 && b < B; b++)
                    row_of_cell(t, b, dh + b * H, dc ? dc + b * C : nullptr,
                                y + (t % 2 * B + b) * y_row, from, to);
            });
    }
    void back_to(int64_t t, const operand *y, real *dh, int64_t from, int64_t to) const {
        if (!all_cut(t, 0, B)) return hand_back(t, 0, B, y, dh, from, to);
        for (int64_t b = 0; b < B && from < to; b++) memset(dh + b * H + from, 0, size_t(to - from) * sizeof(real));
    }
};

/* Whether a job has so few rows in all that to pack a matrix takes longer than to read it where it lies. */
bool has_few(const Job *job) {
#ifdef HALF
    (void)job;
    return false;
#else
    return start_of(job, job->T) <= FEW;
#endif
}

/* dxs = da W_ih, S rows; `panels` is W_ih for y ↦ y W_ih, null: it is read where it lies. */
void pack_inputs_back(const Job *job, int64_t threads, operand *panels) {
    each(threads, Layout{1, job->I}.panels(), [&](int64_t p) {
        pack_straight(p, static_cast<const real *>(job->W_ih), gates_of(job->cell) * job->H, job->I, panels);
    });
}
struct InputTasks {
    const Job *job;
    const operand *panels;
    const Blocks *da;
    int64_t S;
    void *dxs;
    int64_t threads;
    const real *rows = nullptr; /* or row by row */
    const int64_t M = gates_of(job->cell) * job->H, I = job->I, tasks = dxs ? threads * 4 : 0;
    const Product product{rows, M, M, panels, nullptr, static_cast<real *>(dxs), I, I, false, da};
    const int64_t each_scratch = panels ? product.scratch() : S * padded(M);
    const Buffer<operand> scratch{tasks * each_scratch};

    void run(int64_t i) const {
        operand *own = scratch.data + i * each_scratch;
#ifndef HALF
        if (!panels) {
            int64_t vectors = ceil_div(I, LANES), from = vectors * i / tasks * LANES, to = vectors * (i + 1) / tasks * LANES;
            auto [y, ld] = da->operands(0, S, 0, M, own);
            real *out = static_cast<real *>(dxs);
            return weigh(y, ld, S, static_cast<const real *>(job->W_ih), M, I, from, at_most(to, I), out, I);
        }
#endif
        product.run(S * i / tasks, S * (i + 1) / tasks, own);
    }
};

/* What a piece of time, steps [t0, t1), adds to every gradient of weights, and the pull on its inputs. */
struct PieceTasks {
    const Job *piece;
    int64_t t0, threads;
    Grid da;
    const ByToken &tokens;
    const Output *out;
    int64_t out_from, out_to; /* of its steps */
    const operand *inputs;    /* W_ih for y ↦ y W_ih */
    void *dxs;                /* null: not wanted, or found already */

    const Steps at{piece->T, piece->B, piece->sizes, piece->starts};
    const Columns hidden_side = hidden_columns(piece), input_side = input_columns(piece);
    const real *h = static_cast<const real *>(piece->hs), *x = static_cast<const real *>(piece->xs);
    const int64_t I = piece->ids ? 0 : piece->I;
    const bool weighs = piece->dW_hh != nullptr; /* whether anybody wants gradients of weights */
    const Buffer<operand> H{weighs ? Side{at, h, piece->H}.size() : 0}, X{weighs ? Side{at, x, I}.size() : 0};
    const Side hs{at, h, piece->H, true, H.data}, xs{at, x, I, false, X.data};
    const OuterTasks hidden{{at, da, hidden_side, hs, static_cast<real *>(piece->dW_hh), piece->fresh != 0}, threads};
    const OuterTasks input{{at, da, input_side, xs, static_cast<real *>(piece->dW_ih), piece->fresh != 0}, threads};
    const Blocks rows{at, da, input_side};
    const InputTasks below{piece, inputs, &rows, start_of(piece, piece->T) - start_of(piece, 0), dxs, threads};
    const OutputTasks above{out, out_from, out_to, threads};
    const int64_t hidden_tasks = weighs ? hidden.tasks : 0, input_tasks = weighs && !piece->ids ? input.tasks : 0;
    const int64_t tasks = hidden_tasks + input_tasks + below.tasks + above.tasks;

    bool ok() const { return H.ok() && X.ok() && below.scratch.ok() && above.X.ok(); }
    /* Part i of `parts` of what all tasks read, but for the pulls. */
    void pack(int64_t i, int64_t parts) const {
        int64_t b0 = at.B * i / parts, b1 = at.B * (i + 1) / parts;
        if (weighs) hs.pack(b0, b1, H.data);
        if (weighs && xs.N) xs.pack(b0, b1, X.data);
        above.pack(i, parts);
    }
    /* Whether there was memory. The largest parts come first, so that threads end together. */
    bool run(int64_t i) const {
        if (i < hidden_tasks) {
            for (int64_t p = hidden.first(i); i % hidden.across == 0 && p < hidden.last(i); p++) sum(p);
            return hidden.run(i);
        }
        if ((i -= hidden_tasks) < input_tasks) return input.run(i);
        if ((i -= input_tasks) < above.tasks) return above.run(i);
        below.run(i - above.tasks);
        return true;
    }
    /* Biases and tokens: block p of the rows of all weights. */
    void sum(int64_t p) const {
        if (piece->ids) tokens.run(p, t0, at, da);
        real *db_ih = static_cast<real *>(piece->db_ih), *db_hh = static_cast<real *>(piece->db_hh);
        if (!db_ih || !db_hh) return;
        bool same = input_side.place(p) == hidden_side.place(p);
        add_rows(at, da, input_side, p, piece->fresh, db_ih, same ? db_hh : nullptr);
        if (!same) add_rows(at, da, hidden_side, p, piece->fresh, db_hh);
    }
};

/* Through an embedding: dW_ih = Dᵀ E, dE = D W_ih: products with a row for each token instead of each step. */
bool embedding_gradients(const Job *job, int64_t threads, const ByToken &tokens) {
    int64_t V = job->V, M = gates_of(job->cell) * job->H, I = job->I;
    Buffer<real> D(V * M);
    if (!D.ok()) return false;
    tokens.copy(D.data);
    Steps at{1, V};
    const real *rows = static_cast<const real *>(job->E);
    Buffer<operand> X(Side{at, rows, I}.size());
    Side E{at, rows, I, false, X.data};
    if (!X.ok()) return false;
    each(threads, threads, [&](int64_t i) { E.pack(V * i / threads, V * (i + 1) / threads, X.data); });
    OuterTasks outer{{at, {D.data, M, false}, {1, M}, E, static_cast<real *>(job->dW_ih), true}, threads};
    std::atomic<bool> ok{true};
    each(threads, outer.tasks, [&](int64_t i) {
        if (!outer.run(i)) ok = false;
    });
    Buffer<operand> panels(Layout{1, I}.size(M));
    if (!ok || !panels.ok()) return false;
    pack_inputs_back(job, threads, panels.data);
    InputTasks back{job, panels.data, nullptr, V, job->dE, threads, D.data};
    if (!back.scratch.ok()) return false;
    each(threads, back.tasks, [&](int64_t i) { back.run(i); });
    return true;
}

/* Steps that go back together before their weight gradients are found: as many as leave their pulls in the cache, but
 * enough rows for one more visit to all gradients of weights. */
INLINE int64_t steps_back(const Job *job, int64_t bytes) {
    int64_t fitting = (1 << 20) / (job->B * bytes), least = ceil_div(job->H + (job->ids ? 0 : job->I), job->B);
    return at_most(job->T, fitting < least ? least : fitting);
}

/* Whether each dx_t is found just after da_t, from rows that lie in the cache: one matrix more to read at every step, which
 * does not pay for few rows or large matrices. The pulls on a_ih must be those on a_hh. */
INLINE bool pulls_inputs_stepwise(const Job *job, int64_t rows) {
    int64_t bytes = gates_of(job->cell) * job->H * (job->H + job->I) * int64_t(sizeof(operand));
    return !hidden_columns(job).shift && rows >= 3 && bytes <= 12 << 20;
}

/* Steps [t0, t1) alone. */
Job piece_of(const Job *job, int64_t t0, int64_t t1) {
    Job piece = *job;
    int64_t s = start_of(job, t0), real_bytes = int64_t(sizeof(real));
    if (job->sizes) piece.sizes += t0, piece.starts += t0;
    piece.T = t1 - t0, piece.fresh = job->fresh && t1 == job->T;
    piece.hs = static_cast<char *>(job->hs) + s * job->H * real_bytes;
    if (job->xs) piece.xs = static_cast<const char *>(job->xs) + s * job->I * real_bytes;
    if (job->dxs) piece.dxs = static_cast<char *>(job->dxs) + s * job->I * real_bytes;
    return piece;
}

/* Back through all of time. Where an output layer is given it pulls on hs, a piece of time just before that is read. */
int back_through(const Job *job, const Output *out) {
    int64_t B = job->B, H = job->H, M = gates_of(job->cell) * H, threads = useful_threads(job);
    bool together = splits_units(job);
    int64_t blocks = blocks_of(job, threads), y_size = ceil_div(B, blocks) * padded(M);
    int64_t own = job->cell == OWN ? OWN_PARAMETERS * H : 0, C = extra_of(job->cell) * H;
    int64_t width = pulls_of(job) * LANES, steps = steps_back(job, width * int64_t(sizeof(real)));
    int64_t pieces = ceil_div(job->T, steps);
    int64_t most = ceil_div(job->T, pieces) * B;
    Layout at{1, H};
    bool hands_back = job->T > 1 || job->dh_0, few = has_few(job);
    bool stepwise = job->dxs && !few && !together && pulls_inputs_stepwise(job, ceil_div(B, blocks));
    Buffer<operand> panels(hands_back && !few ? at.size(M) : 0), ys(together ? 2 * B * padded(M) : blocks * y_size);
    Buffer<operand> inputs(job->dxs && !few ? Layout{1, job->I}.size(M) : 0);
    Buffer<operand> scratch(out && !together ? blocks * out->scratch() : 0);
    Buffer<real> room(hands_back && few ? B * padded(H) : 0);
    Buffer<real> da(most * width), down(most * own), pulls(out ? (together ? most : B) * H : 0);
    Buffer<real> h(job->dh_0 ? 0 : B * H), c(!job->dh_0 && job->dc_T ? B * C : 0);
    ByToken tokens{job};
    if (!h.ok() || !c.ok() || !room.ok() || !panels.ok() || !ys.ok() || !inputs.ok() || !scratch.ok() || !da.ok() || !down.ok() || !pulls.ok() ||
        !tokens.sums.ok())
        return NO_MEMORY;

    each(threads, hands_back && !few ? at.panels() : 0, [&](int64_t p) {
        pack_straight(p, static_cast<const real *>(job->W_hh), M, H, panels.data);
    });
    if (job->dxs && !few) pack_inputs_back(job, threads, inputs.data);
    memset(ys.data, 0, size_t(together ? 2 * B * padded(M) : blocks * y_size) * sizeof(operand));
    real *dh = job->dh_0 ? static_cast<real *>(job->dh_0) : h.data, *dc = job->dh_0 ? static_cast<real *>(job->dc_0) : c.data;
    memcpy(dh, job->dh_T, size_t(B * H) * sizeof(real));
    if (dc) memcpy(dc, job->dc_T, size_t(B * C) * sizeof(real));

    int64_t read = out ? out->head->T : 0; /* steps of the output layer from here on are in its gradients */
    for (int64_t i = pieces - 1; i >= 0; i--) {
        int64_t t0 = job->T * i / pieces, t1 = job->T * (i + 1) / pieces, first = start_of(job, t0);
        const real *dhs = out ? pulls.data : static_cast<const real *>(job->dhs);
        Backward run{job, few ? nullptr : panels.data, da.data, own ? down.data : nullptr, first, dhs, out ? first : 0,
                     together ? nullptr : pulls.data, out, threads > 1 && !together, stepwise ? inputs.data : nullptr, room.data};
        Job piece = piece_of(job, t0, t1);
        int64_t whole = out ? ceil_div(first, out->head->B) : 0; /* the first of its steps that is read from its beginning */
        PieceTasks gradients{&piece, t0, threads, {da.data, width, true}, tokens, out, whole, read,
                             few ? nullptr : inputs.data, stepwise ? nullptr : piece.dxs};
        read = whole;
        if (!gradients.ok()) return NO_MEMORY;
        if (together) {
            if (out && !out->run_all(first, t1 * B, pulls.data)) return NO_MEMORY;
            run.run_together(job->threads, t0, t1, dh, dc, ys.data);
            each(threads, threads, [&](int64_t i) { gradients.pack(i, threads); });
        } else
            each(threads, blocks, [&](int64_t i) {
                int64_t b0 = B * i / blocks, b1 = B * (i + 1) / blocks;
                run.run(t0, t1, b0, b1, dh + b0 * H, dc ? dc + b0 * C : nullptr, ys.data + i * y_size,
                        out ? scratch.data + i * out->scratch() : nullptr);
                gradients.pack(i, blocks);
            });
        for (int64_t p = 0; p < ceil_div(own, LANES); p++)
            add_rows(gradients.at, {down.data, own, false}, {1, own}, p, piece.fresh, static_cast<real *>(job->down));
        std::atomic<bool> ok{true};
        each(threads, gradients.tasks, [&](int64_t i) {
            if (!gradients.run(i)) ok = false;
        });
        if (!ok) return NO_MEMORY;
    }
    return !job->E || embedding_gradients(job, threads, tokens) ? OK : NO_MEMORY;
}

int backward(const Job *job) {
    if (!job->head) return back_through(job, nullptr);
    Output out{job->head, true};
    if (!out.in_range()) return BAD_TARGET;
    if (!out.ok()) return NO_MEMORY;
    out.pack();
    int status = back_through(job, &out);
    out.finish();
    return status;
}

} // namespace
