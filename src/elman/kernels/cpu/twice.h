/* Gradients of gradients: one layer in one direction, around the states of its forward pass.
 *
 * Let u be a change of all that the layer reads, and h_u that of h along it. `along` finds h_u step after step; `back_twice`
 * finds the pulls of ⟨dh, h_u⟩, written dd, beside those of the loss, d. Each step is linear but for its bend, so both go
 * back together, and W_hh meets the two at once. recurrence/twice.py says what for. */
#pragma once
#include "gradients.h"
#include <atomic>

namespace {

#ifdef HALF
constexpr decltype(Variant::along) along = nullptr;
constexpr decltype(Variant::back_twice) back_twice = nullptr;
#else

/* A matrix to be multiplied by from the right: x ↦ x Wᵀ or, straight, y ↦ y W; null: none. */
struct Factor {
    int64_t K, N;
    Buffer<operand> panels;

    Factor(const void *W, int64_t rows, int64_t columns, bool straight, int64_t threads)
        : K(straight ? rows : columns), N(straight ? columns : rows), panels(W ? Layout{1, N}.size(K) : 0) {
        Layout at{1, N};
        const real *from = static_cast<const real *>(W);
        each(threads, panels.data ? at.panels() : 0, [&](int64_t p) {
            if (straight) return pack_straight(p, from, K, N, panels.data);
            pack_transposed(at, p, from, K, panels.data + p * at.panel_size(K), nullptr);
        });
    }
    bool ok() const { return panels.ok(); }
    bool there() const { return panels.data; }
    int64_t scratch() const { return Product{nullptr, K, K, nullptr, nullptr, nullptr, N, N}.scratch(); }
    void multiply(const real *X, int64_t rows, real *Y, operand *scratch) const {
        Product{X, K, K, panels.data, nullptr, Y, N, N}.run(0, rows, scratch);
    }
};

INLINE void add(real *to, const real *from, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) store(to + i, load(to + i, n - i) + load(from + i, n - i), n - i);
}

struct Twofold {
    const Twice *twice;
    const Job *job = twice->job;
    const int64_t T = job->T, B = job->B, H = job->H, I = job->I, S = start_of(job, T), M = gates_of(job->cell) * H;
    const Steps at{T, B, job->sizes, job->starts};
    const bool gru = job->cell == GRU, lstm = job->cell == LSTM;
    const int64_t kept = gru || lstm ? 4 : 0; /* changes of sums that are kept: r z s n, or i f g o */
    const int64_t threads = worth_two(S * M * (H + I)) ? job->threads : 1;
    const int64_t blocks = at_most(threads > 1 && job->sizes ? 4 * threads : threads, B); /* packed, the last rows are short */
    const real *hs = static_cast<const real *>(job->hs), *cs = static_cast<const real *>(job->cs);
    const real *g = static_cast<const real *>(job->gates);
    real *hs_u = static_cast<real *>(twice->hs_u), *cs_u = static_cast<real *>(twice->cs_u);
    real *as_u = static_cast<real *>(twice->as_u);

    /* How many of the rows [from, to) of the batch are there at a step. */
    int64_t there(int64_t t, int64_t from, int64_t to) const { return at_most(rows_at(job, t), to) - from; }

    /* Y (S, N) += X W, or = where it holds nothing yet. */
    bool multiply(const Factor &W, const real *X, real *Y, bool fresh) const {
        int64_t tasks = at_most(8 * threads, ceil_div(S, 16));
        std::atomic<bool> failed{false};
        each(threads, tasks, [&](int64_t i) {
            int64_t from = S * i / tasks, rows = S * (i + 1) / tasks - from;
            Buffer<operand> scratch(W.scratch());
            Buffer<real> apart(fresh ? 0 : rows * W.N);
            if (!scratch.ok() || !apart.ok()) return void(failed = true);
            W.multiply(X + from * W.K, rows, fresh ? Y + from * W.N : apart.data, scratch.data);
            if (!fresh) add(Y + from * W.N, apart.data, rows * W.N);
        });
        return !failed;
    }

    /* --------------------------------------------------------------------------------------------------------- forward */

    /* The change of a_x and a_h of every step, h held: null where there is none. */
    bool sums(const void *X, const void *W, bool &fresh, real *Y, int64_t columns) const {
        if (!X || !W) return true;
        Factor factor(W, M, columns, false, threads);
        if (!factor.ok() || !multiply(factor, static_cast<const real *>(X), Y, fresh)) return false;
        fresh = false;
        return true;
    }
    void begin(const void *b, bool fresh, real *Y) const {
        if (fresh) memset(Y, 0, size_t(S * M) * sizeof(real));
        for (int64_t s = 0; b && s < S; s++) add(Y + s * M, static_cast<const real *>(b), M);
    }
    /* h before each step, (S, H): where they lie or, packed, one after the other in `room`. */
    const real *befores(real *room) const {
        for (int64_t t = 0; job->sizes && t < T; t++)
            memcpy(room + start_of(job, t) * H, hs + before(job, t) * H, size_t(rows_at(job, t) * H) * sizeof(real));
        return job->sizes ? room : hs;
    }
    /* One row of step t from a, which W_hh has found. */
    template <int CELL> void change(int64_t t, int64_t b, const real *a, const real *a_x, const real *a_h) const {
        int64_t s = start_of(job, t) + b, last = before(job, t) + b;
        for (int64_t u = 0; u < H; u += LANES) {
            int64_t n = H - u;
            auto sum = [&](int i) { /* of a gate whose a_x and a_h are added */
                return load(a + i * H + u, n) + load(a_x + s * M + i * H + u, n) + load(a_h + s * M + i * H + u, n);
            };
            auto keep = [&](int i, vec v) { store(as_u + (s * 4 + i) * H + u, v, n); };
            vec h = load(hs + (s + B) * H + u, n), now;
            if constexpr (CELL == GRU) {
                vec r = gate(s, 0, u, n), z = gate(s, 1, u, n), c = gate(s, 2, u, n), q = gate(s, 3, u, n);
                vec a_r = sum(0), a_z = sum(1), a_n = load(a_x + s * M + 2 * H + u, n);
                vec q_u = load(a + 2 * H + u, n) + load(a_h + s * M + 2 * H + u, n);
                keep(0, a_r), keep(1, a_z), keep(2, q_u), keep(3, a_n);
                vec v_u = a_n + r * (real(1) - r) * a_r * q + r * q_u;
                now = (real(1) - z) * (real(1) - c * c) * v_u + z * load(hs_u + last * H + u, n);
                now += (load(hs + last * H + u, n) - c) * (z * (real(1) - z)) * a_z;
            } else if constexpr (CELL == LSTM) {
                vec i = gate(s, 0, u, n), f = gate(s, 1, u, n), c = gate(s, 2, u, n), o = gate(s, 3, u, n);
                vec a_i = sum(0), a_f = sum(1), a_c = sum(2), a_o = sum(3), tau = vtanh(load(cs + (s + B) * H + u, n));
                keep(0, a_i), keep(1, a_f), keep(2, a_c), keep(3, a_o);
                vec c_u = f * load(cs_u + last * H + u, n) + c * (i * (real(1) - i)) * a_i;
                c_u += load(cs + last * H + u, n) * (f * (real(1) - f)) * a_f + i * (real(1) - c * c) * a_c;
                store(cs_u + (s + B) * H + u, c_u, n);
                now = tau * (o * (real(1) - o)) * a_o + o * (real(1) - tau * tau) * c_u;
            } else {
                now = sum(0);
                now = CELL == TANH ? (real(1) - h * h) * now : CELL == RELU ? (h <= 0 ? vec{} : now) : now;
            }
            store(hs_u + (s + B) * H + u, now, n);
        }
    }
    INLINE vec gate(int64_t s, int i, int64_t u, int64_t n) const { return load(g + (s * 4 + i) * H + u, n); }

    template <int CELL> int along() const {
        Factor W(T > 1 || twice->h_0_u ? job->W_hh : nullptr, M, H, false, threads);
        Buffer<real> xs(S * M), states(S * M), lasts(twice->W_hh_u && job->sizes ? S * H : 0);
        if (!W.ok() || !xs.ok() || !states.ok() || !lasts.ok()) return NO_MEMORY;
        bool fresh = true;
        if (!sums(twice->xs_u, job->W_ih, fresh, xs.data, I) || !sums(job->xs, twice->W_ih_u, fresh, xs.data, I))
            return NO_MEMORY;
        begin(twice->b_ih_u, fresh, xs.data);
        fresh = true;
        if (twice->W_hh_u && !sums(befores(lasts.data), twice->W_hh_u, fresh, states.data, H)) return NO_MEMORY;
        begin(twice->b_hh_u, fresh, states.data);
        first(twice->h_0_u, hs_u), first(twice->c_0_u, cs_u);
        std::atomic<bool> failed{false};
        each(threads, blocks, [&](int64_t i) { /* rows of the batch, through all of time */
            int64_t from = B * i / blocks, to = B * (i + 1) / blocks;
            Buffer<operand> scratch(W.scratch());
            Buffer<real> a((to - from) * M);
            if (!scratch.ok() || !a.ok()) return void(failed = true);
            for (int64_t t = 0, rows; t < T && (rows = there(t, from, to)) > 0; t++) {
                if (t || twice->h_0_u) W.multiply(hs_u + (before(job, t) + from) * H, rows, a.data, scratch.data);
                else memset(a.data, 0, size_t(rows * M) * sizeof(real));
                for (int64_t b = 0; b < rows; b++) change<CELL>(t, from + b, a.data + b * M, xs.data, states.data);
            }
        });
        return failed ? NO_MEMORY : OK;
    }
    void first(const void *state, real *to) const {
        if (!to) return;
        if (state) memcpy(to, state, size_t(B * H) * sizeof(real));
        else memset(to, 0, size_t(B * H) * sizeof(real));
    }

    /* --------------------------------------------------------------------------------------------------------- backward */

    /* Pulls of one block of rows on the state before a step, and those that go on to W_hh. */
    struct Pair {
        real *h, *c, *a; /* (rows, H), (rows, H), (rows, M) */
    };
    /* One row of step t: from the pulls on its states to those on its sums; leaves those that pass W_hh by. */
    template <int CELL>
    void bend(int64_t t, int64_t b, int64_t row, Pair one, Pair two, real *da, real *dda) const {
        int64_t s = start_of(job, t) + b, last = before(job, t) + b;
        const real *dhs = static_cast<const real *>(job->dhs), *ddhs = static_cast<const real *>(twice->ddhs);
        for (int64_t u = 0; u < H; u += LANES) {
            int64_t n = H - u, at = row * H + u;
            vec d = load(one.h + at, n), dd = load(two.h + at, n);
            if (dhs) d += load(dhs + s * H + u, n);
            if (ddhs) dd += load(ddhs + s * H + u, n);
            auto a_u = [&](int i) { return load(as_u + (s * 4 + i) * H + u, n); };
            auto keep = [&](int i, vec v, vec w) { /* on a_x and a_h alike */
                store(da + s * M + i * H + u, v, n), store(dda + s * M + i * H + u, w, n);
                store(one.a + row * M + i * H + u, v, n), store(two.a + row * M + i * H + u, w, n);
            };
            if constexpr (CELL == GRU) {
                vec r = gate(s, 0, u, n), z = gate(s, 1, u, n), c = gate(s, 2, u, n), q = gate(s, 3, u, n);
                vec of_r = r * (real(1) - r), of_z = z * (real(1) - z), of_v = real(1) - c * c, by_v = (real(1) - z) * of_v;
                vec a_r = a_u(0), a_z = a_u(1), q_u = a_u(2), r_u = of_r * a_r, z_u = of_z * a_z;
                vec v_u = a_u(3) + r_u * q + r * q_u, apart = load(hs + last * H + u, n) - c;
                vec dv = d * by_v, ddv = dd * by_v - d * (of_v * z_u + real(2) * c * by_v * v_u);
                vec bent = load(hs_u + last * H + u, n) - of_v * v_u + apart * (real(1) - real(2) * z) * a_z;
                keep(0, dv * q * of_r, of_r * (q * ddv + dv * (q_u + q * (real(1) - real(2) * r) * a_r)));
                keep(1, d * apart * of_z, of_z * (dd * apart + d * bent));
                store(da + s * M + 2 * H + u, dv, n), store(dda + s * M + 2 * H + u, ddv, n);
                store(one.a + row * M + 2 * H + u, dv * r, n), store(two.a + row * M + 2 * H + u, r * ddv + dv * r_u, n);
                store(one.h + at, d * z, n), store(two.h + at, dd * z + d * z_u, n);
            } else if constexpr (CELL == LSTM) {
                vec i = gate(s, 0, u, n), f = gate(s, 1, u, n), c = gate(s, 2, u, n), o = gate(s, 3, u, n);
                vec of_i = i * (real(1) - i), of_f = f * (real(1) - f), of_c = real(1) - c * c, of_o = o * (real(1) - o);
                vec tau = vtanh(load(cs + (s + B) * H + u, n)), of_tau = real(1) - tau * tau, c_0 = load(cs + last * H + u, n);
                vec a_i = a_u(0), a_f = a_u(1), a_c = a_u(2), a_o = a_u(3), f_u = of_f * a_f;
                vec tau_u = of_tau * load(cs_u + (s + B) * H + u, n), c_0_u = load(cs_u + last * H + u, n);
                vec e = load(one.c + at, n) + d * o * of_tau;
                vec ee = load(two.c + at, n) + dd * o * of_tau + d * (of_tau * of_o * a_o - real(2) * tau * o * tau_u);
                keep(0, e * c * of_i, of_i * (ee * c + e * (of_c * a_c + c * (real(1) - real(2) * i) * a_i)));
                keep(1, e * c_0 * of_f, of_f * (ee * c_0 + e * (c_0_u + c_0 * (real(1) - real(2) * f) * a_f)));
                keep(2, e * i * of_c, of_c * (ee * i + e * (of_i * a_i - real(2) * i * c * a_c)));
                keep(3, d * tau * of_o, of_o * (dd * tau + d * (tau_u + tau * (real(1) - real(2) * o) * a_o)));
                store(one.c + at, e * f, n), store(two.c + at, ee * f + e * f_u, n);
                store(one.h + at, vec{}, n), store(two.h + at, vec{}, n);
            } else {
                vec h = load(hs + (s + B) * H + u, n);
                if constexpr (CELL == TANH) {
                    vec of = real(1) - h * h;
                    keep(0, d * of, dd * of - real(2) * h * load(hs_u + (s + B) * H + u, n) * d);
                } else if constexpr (CELL == RELU) {
                    keep(0, h <= 0 ? vec{} : d, h <= 0 ? vec{} : dd);
                } else keep(0, d, dd);
                store(one.h + at, vec{}, n), store(two.h + at, vec{}, n);
            }
        }
    }
    /* Rows [from, to) of the batch through all of time, the last step first. */
    template <int CELL>
    bool through(int64_t from, int64_t to, const Factor &W, const Factor &W_u, real *da, real *dda, real *da_h, real *dda_h) const {
        int64_t n = (to - from) * H;
        Buffer<real> h(2 * n), c(lstm ? 2 * n : 0), a(2 * (to - from) * M), found(2 * n);
        Buffer<operand> scratch(W.scratch());
        if (!h.ok() || !c.ok() || !a.ok() || !found.ok() || !scratch.ok()) return false;
        auto begin = [&](const void *last, real *pull) {
            memset(pull, 0, size_t(2 * n) * sizeof(real));
            if (last) memcpy(pull, static_cast<const real *>(last) + from * H, size_t(n) * sizeof(real));
        };
        begin(job->dh_T, h.data);
        if (lstm) begin(job->dc_T, c.data);
        Pair one{h.data, c.data, a.data}, two{h.data + n, lstm ? c.data + n : nullptr, nullptr};
        for (int64_t t = T - 1; t >= 0; t--) {
            int64_t rows = there(t, from, to), start = (start_of(job, t) + from) * M;
            if (rows <= 0) continue; /* all of them have ended before */
            two.a = a.data + rows * M; /* right behind, for one product */
            for (int64_t b = 0; b < rows; b++) bend<CELL>(t, from + b, b, one, two, da, dda);
            if (gru) {
                memcpy(da_h + start, one.a, size_t(rows * M) * sizeof(real));
                memcpy(dda_h + start, two.a, size_t(rows * M) * sizeof(real));
            }
            if (!t && !twice->ddh_0) break; /* nobody asks what pulls on the first states */
            W.multiply(a.data, 2 * rows, found.data, scratch.data);
            add(one.h, found.data, rows * H), add(two.h, found.data + rows * H, rows * H);
            if (!W_u.there()) continue;
            W_u.multiply(a.data, rows, found.data, scratch.data);
            add(two.h, found.data, rows * H);
        }
        auto end = [&](const real *pull, void *to) {
            if (to) memcpy(static_cast<real *>(to) + from * H, pull, size_t(n) * sizeof(real));
        };
        end(two.h, twice->ddh_0), end(two.c, twice->ddc_0);
        return true;
    }
    /* dW (M, N) += Σ A ⊗ X, or = where it holds nothing yet; X are rows of inputs or of states before each step. */
    bool outer(const real *A, const void *X, bool states, int64_t N, void *dW, bool fresh) const {
        Side side{at, static_cast<const real *>(X), N, states};
        Buffer<operand> packed(side.size());
        if (!packed.ok()) return false;
        each(threads, threads, [&](int64_t i) { side.pack(B * i / threads, B * (i + 1) / threads, packed.data); });
        side.packed = packed.data;
        OuterTasks tasks{{at, {A, M, false}, {1, M}, side, static_cast<real *>(dW), fresh}, threads};
        std::atomic<bool> failed{false};
        each(threads, tasks.tasks, [&](int64_t i) {
            if (!tasks.run(i)) failed = true;
        });
        return !failed;
    }
    bool outers(const real *dda, const void *X, const real *da, const void *X_u, bool states, int64_t N, void *dW) const {
        return !dW || (outer(dda, X, states, N, dW, true) && (!X_u || outer(da, X_u, states, N, dW, false)));
    }
    void rows(const real *A, void *db) const {
        for (int64_t p = 0; db && p < ceil_div(M, LANES); p++)
            add_rows(at, {A, M, false}, {1, M}, p, true, static_cast<real *>(db));
    }
    /* dX (S, I) = A W_ih + A_u W_ih_u. */
    bool inputs(const Factor &W, const real *A, const Factor &W_u, const real *A_u, void *to) const {
        real *dX = static_cast<real *>(to);
        return !dX || (multiply(W, A, dX, true) && (!W_u.there() || multiply(W_u, A_u, dX, false)));
    }
    template <int CELL> int back() const {
        bool meets = T > 1 || twice->ddh_0; /* W_hh, which first states that nobody asks about do not */
        Factor W(meets ? job->W_hh : nullptr, M, H, true, threads), W_u(meets ? twice->W_hh_u : nullptr, M, H, true, threads);
        Buffer<real> one(S * M), two(S * M), one_h(gru ? S * M : 0), two_h(gru ? S * M : 0);
        if (!W.ok() || !W_u.ok() || !one.ok() || !two.ok() || !one_h.ok() || !two_h.ok()) return NO_MEMORY;
        std::atomic<bool> failed{false};
        each(threads, blocks, [&](int64_t i) {
            int64_t from = B * i / blocks, to = B * (i + 1) / blocks;
            if (!through<CELL>(from, to, W, W_u, one.data, two.data, one_h.data, two_h.data)) failed = true;
        });
        if (failed) return NO_MEMORY;
        const real *da_h = gru ? one_h.data : one.data, *dda_h = gru ? two_h.data : two.data;
        bool reads = job->dxs || twice->ddxs;
        Factor W_ih(reads ? job->W_ih : nullptr, M, I, true, threads);
        Factor W_ih_u(twice->ddxs ? twice->W_ih_u : nullptr, M, I, true, threads), none(nullptr, M, I, true, 1);
        if (!W_ih.ok() || !W_ih_u.ok()) return NO_MEMORY;
        rows(two.data, twice->ddb_ih), rows(dda_h, twice->ddb_hh);
        return inputs(W_ih, one.data, none, nullptr, job->dxs) && inputs(W_ih, two.data, W_ih_u, one.data, twice->ddxs) &&
                       outers(two.data, job->xs, one.data, twice->xs_u, false, I, twice->ddW_ih) &&
                       outers(dda_h, hs, da_h, hs_u, true, H, twice->ddW_hh)
                   ? OK
                   : NO_MEMORY;
    }
};

template <bool FORWARD> int twofold(const Twice *twice) {
    Twofold job{twice};
    switch (twice->job->cell) {
    case TANH: return FORWARD ? job.along<TANH>() : job.back<TANH>();
    case RELU: return FORWARD ? job.along<RELU>() : job.back<RELU>();
    case LINEAR: return FORWARD ? job.along<LINEAR>() : job.back<LINEAR>();
    case GRU: return FORWARD ? job.along<GRU>() : job.back<GRU>();
    default: return FORWARD ? job.along<LSTM>() : job.back<LSTM>();
    }
}
int along(const Twice *twice) { return twofold<true>(twice); }
int back_twice(const Twice *twice) { return twofold<false>(twice); }
#endif

} // namespace
