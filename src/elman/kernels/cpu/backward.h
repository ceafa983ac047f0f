/* The way back: dh_{t-1} = ξ_t (∂h_t/∂h_{t-1})ᵀ dh_t + dhs_{t-1} over a piece of time, then what it adds to every
 * weight gradient, as large products. */
#pragma once
#include "forward.h"
#include "head.h"
#include <atomic>

namespace {

struct Backward {
    const Job *job;
    const operand *panels; /* W_hh for y ↦ y W_hh */
    real *da, *da_hh;      /* (S, M): pulls on a_ih and on a_hh; one array unless a gate takes them apart */
    real *down;            /* (S, P, H): pulls on a described cell's own numbers */
    int64_t first;         /* the row of time and batch that all three begin with */
    const real *dhs;       /* (S, H), or null */
    int64_t pulled;        /* the row that this begins with */
    bool shared;           /* whether other threads will read da, whose rows are whole cache lines */

    const int64_t T = job->T, B = job->B, H = job->H, gates_n = gates_of(job->cell), M = gates_n * H;
    const int64_t C = extra_of(job->cell) * H;
    const real *hs = static_cast<const real *>(job->hs), *cs = static_cast<const real *>(job->cs);
    const real *gates = static_cast<const real *>(job->gates);
    const real *xi = static_cast<const real *>(job->xi);

    bool held(int64_t t, int64_t b) const { return job->lengths && t >= job->lengths[b]; }
    real carry(int64_t t, int64_t b) const { return !xi ? real(1) : job->xi_per_row ? xi[t * B + b] : xi[t]; }

    /* Pulls that others have read lie in their cores' caches, which must let go of a line before it can be written: so
     * those are written past all caches, where nobody waits. */
    INLINE void keep_pull(real *to, vec v, int64_t n) const {
        if (shared) return stream(to, v);
        store(to, v, n);
    }
    /* One row, its units [from, to): from dh + dhs (and dc) to da; leaves in dh what goes back without passing W_hh. */
    template <int CELL>
    void row(int64_t s, int64_t last, real keep, real *dh, real *dc, operand *y, int64_t from, int64_t to) const {
        for (int64_t u = from; u < to; u += LANES) {
            int64_t n = H - u;
            vec d = load(dh + u, n);
            if (dhs) d += load(dhs + (s - pulled) * H + u, n);
            if constexpr (CELL == GRU || CELL == LSTM)
                gated<CELL>(s, last, u, n, keep, d, dh, dc, y);
#ifdef OWN_CELL
            else if constexpr (CELL == OWN)
                own(s, last, u, n, keep, d, dh, dc, y);
#endif
            else {
                vec h = load(hs + (s + B) * H + u, n);
                d = CELL == TANH ? d * (real(1) - h * h) : CELL == RELU ? (h <= 0 ? vec{} : d) : d;
                keep_pull(da + (s - first) * M + u, d, n);
                store_operand(y + u, d, n);
                store(dh + u, vec{}, n);
            }
        }
    }
    template <int CELL>
    INLINE void gated(int64_t s, int64_t last, int64_t u, int64_t n, real keep, vec d, real *dh, real *dc, operand *y) const {
        vec g[4], a[4];
        FLATTEN for (int i = 0; i < 4; i++) g[i] = load(gates + (s * 4 + i) * H + u, n);
        if constexpr (CELL == GRU) { /* g = r z n a_hn */
            vec h = load(hs + last * H + u, n);
            a[2] = d * (real(1) - g[1]) * (real(1) - g[2] * g[2]);
            a[1] = d * (h - g[2]) * (g[1] * (real(1) - g[1]));
            a[0] = a[2] * g[3] * (g[0] * (real(1) - g[0]));
            a[3] = a[2] * g[0];
            store(dh + u, d * g[1], n);
            FLATTEN for (int i = 0; i < 3; i++) {
                vec hidden_side = a[i == 2 ? 3 : i];
                keep_pull(da + (s - first) * M + i * H + u, a[i], n);
                keep_pull(da_hh + (s - first) * M + i * H + u, hidden_side, n);
                store_operand(y + i * H + u, hidden_side, n);
            }
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
                keep_pull(da + (s - first) * M + i * H + u, a[i], n);
                store_operand(y + i * H + u, a[i], n);
            }
        }
    }
#ifdef OWN_CELL
    INLINE void own(int64_t s, int64_t last, int64_t u, int64_t n, real keep, vec d, real *dh, real *dc, operand *y) const {
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
            store(da + (s - first) * M + g * H + u, da_x[g], n);
            if (OWN_APART) store(da_hh + (s - first) * M + g * H + u, da_h[g], n);
            store_operand(y + g * H + u, da_h[g], n);
        }
    }
#endif
    void row_of_cell(int64_t t, int64_t b, real *dh, real *dc, operand *y, int64_t from, int64_t to) const {
        int64_t s = start_of(job, t) + b, last = before(job, t) + b;
        real keep = carry(t, b);
#ifdef OWN_CELL
        return row<OWN>(s, last, keep, dh, dc, y, from, to);
#endif
        switch (job->cell) {
        case TANH: return row<TANH>(s, last, keep, dh, dc, y, from, to);
        case RELU: return row<RELU>(s, last, keep, dh, dc, y, from, to);
        case LINEAR: return row<LINEAR>(s, last, keep, dh, dc, y, from, to);
        case GRU: return row<GRU>(s, last, keep, dh, dc, y, from, to);
        default: return row<LSTM>(s, last, keep, dh, dc, y, from, to);
        }
    }
    /* A held step: its pull passes by it, its weights get nothing. */
    void pass(int64_t s, real *dh, operand *y) const {
        for (int64_t u = 0; dhs && u < H; u += LANES)
            store(dh + u, load(dh + u, H - u) + load(dhs + (s - pulled) * H + u, H - u), H - u);
        memset(da + (s - first) * M, 0, size_t(M) * sizeof(real));
        memset(da_hh + (s - first) * M, 0, size_t(M) * sizeof(real));
        if (down) memset(down + (s - first) * OWN_PARAMETERS * H, 0, size_t(OWN_PARAMETERS * H) * sizeof(real));
        memset(y, 0, size_t(M) * sizeof(operand));
    }
    /* dh ← ξ (dh + y W_hh) for the rows that moved, units [from, to): whole pairs of vectors. */
    void hand_back(int64_t t, int64_t b0, int64_t rows, const operand *y, real *dh, int64_t from, int64_t to) const {
        int64_t k_steps = ceil_div(M, PAIR), y_row = padded(M);
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
    /* Rows [b0, b1) back through steps [t0, t1); dh and dc hold their pulls, y one step of da. */
    void run(int64_t t0, int64_t t1, int64_t b0, int64_t b1, real *dh, real *dc, operand *y) const {
        int64_t y_row = padded(M);
        for (int64_t t = t1 - 1; t >= t0; t--) {
            int64_t active = 0, rows = at_most(rows_at(job, t), b1) - b0;
            for (int64_t r = 0; r < rows; r++) {
                if (held(t, b0 + r)) {
                    pass(t * B + b0 + r, dh + r * H, y + r * y_row);
                } else {
                    row_of_cell(t, b0 + r, dh + r * H, dc ? dc + r * C : nullptr, y + r * y_row, 0, H);
                    active = r + 1;
                }
            }
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
        for (int64_t t = t1 - 1; t >= t0 - 1; t--)
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

/* dxs = da W_ih, S rows; `panels` is W_ih for y ↦ y W_ih. */
void pack_inputs_back(const Job *job, int64_t threads, operand *panels) {
    each(threads, Layout{1, job->I}.panels(), [&](int64_t p) {
        pack_straight(p, static_cast<const real *>(job->W_ih), gates_of(job->cell) * job->H, job->I, panels);
    });
}
struct InputTasks {
    const Job *job;
    const operand *panels;
    const real *da;
    int64_t S;
    void *dxs;
    int64_t threads;
    const int64_t M = gates_of(job->cell) * job->H, I = job->I, tasks = dxs ? threads * 4 : 0;
    const Product product{da, M, M, panels, nullptr, static_cast<real *>(dxs), I, I};
    const Buffer<operand> scratch{tasks * product.scratch()};

    void run(int64_t i) const { product.run(S * i / tasks, S * (i + 1) / tasks, scratch.data + i * product.scratch()); }
};

/* Those of weights and inputs, of steps [t0, t1) alone, which are `piece`. The largest parts come first, so that threads
 * end together. */
bool gradients_of_piece(const Job *piece, int64_t threads, const real *da, const real *da_hh, const InputTasks &below,
                        const OutputTasks &above, const ByToken &tokens, int64_t t0) {
    int64_t M = gates_of(piece->cell) * piece->H;
    real *db_ih = static_cast<real *>(piece->db_ih), *db_hh = static_cast<real *>(piece->db_hh);
    bool fresh = piece->fresh, same = da == da_hh;
    OuterTasks hidden{{piece->T, piece->B, da_hh, M, static_cast<const real *>(piece->hs), piece->H, piece->H,
                       static_cast<real *>(piece->dW_hh), fresh, piece->sizes, piece->starts, true}, threads};
    OuterTasks input{{piece->T, piece->B, da, M, static_cast<const real *>(piece->xs), piece->I, piece->I,
                      static_cast<real *>(piece->dW_ih), fresh, piece->sizes, piece->starts}, threads};
    int64_t inputs = piece->ids ? 0 : input.tasks, outputs = above.tasks;
    int64_t strips = db_ih && db_hh ? ceil_div(M, STRIP) : 0;
    std::atomic<bool> ok{true};
    each(threads, hidden.tasks + inputs + below.tasks + outputs + tokens.tasks + strips, [&](int64_t i) {
        if (i < hidden.tasks) {
            if (!hidden.run(i)) ok = false;
        } else if ((i -= hidden.tasks) < inputs) {
            if (!input.run(i)) ok = false;
        } else if ((i -= inputs) < below.tasks) {
            below.run(i);
        } else if ((i -= below.tasks) < outputs) {
            if (!above.run(i)) ok = false;
        } else if ((i -= outputs) < tokens.tasks) {
            tokens.run(i, t0, t0 + piece->T, da);
        } else {
            int64_t m = (i - tokens.tasks) * STRIP;
            add_rows(piece, M, da, m, fresh, db_ih, same ? db_hh : nullptr);
            if (!same) add_rows(piece, M, da_hh, m, fresh, db_hh);
        }
    });
    return ok;
}

/* Through an embedding: dW_ih = Dᵀ E, dE = D W_ih: products with a row for each token instead of each step. */
bool embedding_gradients(const Job *job, int64_t threads, const ByToken &tokens) {
    int64_t V = job->V, M = gates_of(job->cell) * job->H, I = job->I;
    Buffer<real> D(V * M);
    if (!D.ok()) return false;
    tokens.copy(D.data);
    OuterTasks outer{{1, V, D.data, M, static_cast<const real *>(job->E), I, I, static_cast<real *>(job->dW_ih), true}, threads};
    std::atomic<bool> ok{true};
    each(threads, outer.tasks, [&](int64_t i) {
        if (!outer.run(i)) ok = false;
    });
    Buffer<operand> panels(Layout{1, I}.size(M));
    if (!ok || !panels.ok()) return false;
    pack_inputs_back(job, threads, panels.data);
    InputTasks back{job, panels.data, D.data, V, job->dE, threads};
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
    bool together = splits_units(job), apart = job->cell == GRU || (job->cell == OWN && OWN_APART);
    int64_t blocks = blocks_of(job, threads), y_size = ceil_div(B, blocks) * padded(M);
    int64_t own = job->cell == OWN ? OWN_PARAMETERS * H : 0, C = extra_of(job->cell) * H;
    int64_t steps = steps_back(job, (apart ? 2 : 1) * M * int64_t(sizeof(real))), pieces = ceil_div(job->T, steps);
    int64_t most = ceil_div(job->T, pieces) * B;
    Layout at{1, H};
    Buffer<operand> panels(at.size(M)), ys(together ? 2 * B * padded(M) : blocks * y_size);
    Buffer<operand> inputs(job->dxs ? Layout{1, job->I}.size(M) : 0), scratch(out && !together ? blocks * out->scratch() : 0);
    Buffer<real> da(most * M), da_hh(apart ? most * M : 0), down(most * own), pulls(out ? most * H : 0);
    ByToken tokens{job};
    if (!panels.ok() || !ys.ok() || !inputs.ok() || !scratch.ok() || !da.ok() || !da_hh.ok() || !down.ok() || !pulls.ok() ||
        !tokens.sums.ok())
        return NO_MEMORY;

    each(threads, at.panels(), [&](int64_t p) {
        pack_straight(p, static_cast<const real *>(job->W_hh), M, H, panels.data);
    });
    if (job->dxs) pack_inputs_back(job, threads, inputs.data);
    memset(ys.data, 0, size_t(together ? 2 * B * padded(M) : blocks * y_size) * sizeof(operand));
    real *dh = static_cast<real *>(job->dh_0), *dc = static_cast<real *>(job->dc_0);
    memcpy(dh, job->dh_T, size_t(B * H) * sizeof(real));
    if (dc) memcpy(dc, job->dc_T, size_t(B * C) * sizeof(real));

    int64_t read = out ? out->head->T : 0; /* steps of the output layer from here on are in its gradients */
    for (int64_t i = pieces - 1; i >= 0; i--) {
        int64_t t0 = job->T * i / pieces, t1 = job->T * (i + 1) / pieces, first = start_of(job, t0);
        real *hidden_side = apart ? da_hh.data : da.data;
        Backward run{job, panels.data, da.data, hidden_side, own ? down.data : nullptr, first,
                     out ? pulls.data : static_cast<const real *>(job->dhs), out ? first : 0, threads > 1 && !together && H % LANES == 0};
        if (together) {
            if (out && !out->run_all(first, t1 * B, pulls.data)) return NO_MEMORY;
            run.run_together(job->threads, t0, t1, dh, dc, ys.data);
        } else
            each(threads, blocks, [&](int64_t i) {
                int64_t b0 = B * i / blocks, b1 = B * (i + 1) / blocks;
                for (int64_t t = t0; out && t < t1; t++)
                    groups(b1 - b0, Output::ROWS_AT_ONCE, [&](int64_t from, int64_t to) {
                        int64_t s = t * B + b0;
                        out->run(s + from, s + to, pulls.data + (s + from - first) * H, scratch.data + i * out->scratch());
                    });
                run.run(t0, t1, b0, b1, dh + b0 * H, dc ? dc + b0 * C : nullptr, ys.data + i * y_size);
            });
        Job piece = piece_of(job, t0, t1);
        for (int64_t m = 0; m < own; m += STRIP)
            add_rows(&piece, own, down.data, m, piece.fresh, static_cast<real *>(job->down));
        InputTasks below{job, inputs.data, da.data, start_of(job, t1) - first, piece.dxs, threads};
        int64_t whole = out ? ceil_div(first, out->head->B) : 0; /* the first of its steps that has been read from its beginning */
        OutputTasks above{out, whole, read, threads};
        read = whole;
        if (!below.scratch.ok() || !gradients_of_piece(&piece, threads, da.data, hidden_side, below, above, tokens, t0))
            return NO_MEMORY;
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
