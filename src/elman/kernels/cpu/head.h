/* The output layer with its softmax and cross-entropy: the logits of a row become its loss and its
 * gradient ŷ - 1, and that the pull on its hidden state, while they are still in the cache. */
#pragma once
#include "gradients.h"
#include <atomic>
#include <cmath>

namespace {

/* One row: logits → (softmax - one-hot) / S in place; returns -log softmax[target]. */
double soften(real *o, int64_t V, int64_t target, real share) {
    vec highest = splat(o[0]);
    int64_t whole = V / LANES * LANES;
    for (int64_t v = 0; whole > 0 && v < V; v += LANES) {
        vec x = load(o + at_most(v, V - LANES)); /* the last may overlap the one before */
        highest = x > highest ? x : highest;
    }
    real top = largest(highest);
    for (int64_t v = 0; whole == 0 && v < V; v++) top = o[v] > top ? o[v] : top;
    double chosen = double(o[target]) - double(top);
    vec sums = {};
    for (int64_t v = 0; v < V; v += LANES) {
        vec e = exp_minus(top - load(o + v, V - v));
        store(o + v, e, V - v);
        sums += v < whole ? e : load(o + v, V - v);
    }
    real total = sum(sums), scale = share / total;
    for (int64_t v = 0; v < V; v += LANES) store(o + v, load(o + v, V - v) * scale, V - v);
    o[target] -= share;
    return std::log(double(total)) - chosen;
}

/* The layer's rows in any order, then the gradients of its weights, the last rows first. */
struct Output {
    const Head *head;
    bool pulls;                         /* whether dhs is wanted */
    int64_t room = head->T * head->B;   /* rows whose logits are in memory at a time, */
    int64_t base = 0;                   /* from this one on */
    const int64_t S = head->T * head->B, H = head->H, V = head->V;
    const int64_t threads = worth_two(S * V * H) ? head->threads : 1;
    const Layout there{1, V}, back{1, H};
    const Buffer<operand> W_there{there.size(H)}, W_back{pulls ? back.size(V) : 0}, turned{threads * LANES * padded(H)};
    const Buffer<real> o{room * V}; /* logits, and then the pulls on them */
    const Buffer<double> nats{S};

    bool ok() const { return W_there.ok() && W_back.ok() && turned.ok() && o.ok() && nats.ok(); }
    bool in_range() const {
        for (int64_t s = 0; s < S; s++)
            if (head->targets[s] < 0 || head->targets[s] >= V) return false;
        return true;
    }
    void pack() const {
        const real *W = static_cast<const real *>(head->W);
        int64_t panels = there.panels(), all = panels + (pulls ? back.panels() : 0);
        each(threads, threads, [&](int64_t i) {
            for (int64_t p = all * i / threads; p < all * (i + 1) / threads; p++)
                if (p < panels)
                    pack_transposed(there, p, W, H, W_there.data + p * there.panel_size(H), turned.data + i * LANES * padded(H));
                else
                    pack_straight(p - panels, W, V, H, W_back.data);
        });
    }
    static constexpr int64_t ROWS_AT_ONCE = 4 * ROWS<2>;
    int64_t scratch() const { return ROWS_AT_ONCE * padded(H > V ? H : V); }

    /* o = hs Wᵀ + b becomes the loss and do = softmax(o) - one-hot, and that dhs = do W; of up to ROWS_AT_ONCE rows. */
    void run(int64_t first, int64_t last, real *dhs, operand *scratch) const {
        real *mine = o.data + (first - base) * V, share = real(1) / real(S);
        const real *hs = static_cast<const real *>(head->hs) + first * H, *b = static_cast<const real *>(head->b);
        Product{hs, H, H, W_there.data, b, mine, V, V}.run(0, last - first, scratch);
        for (int64_t s = first; s < last; s++) nats.data[s] = soften(mine + (s - first) * V, V, head->targets[s], share);
        if (dhs) Product{mine, V, V, W_back.data, nullptr, dhs, H, H}.run(0, last - first, scratch);
    }
    /* Rows [first, last), dhs beginning with the first of them; whether there was memory. */
    bool run_all(int64_t first, int64_t last, real *dhs) const {
        int64_t tasks = ceil_div(last - first, ROWS_AT_ONCE), size = scratch();
        Buffer<operand> room(tasks * size);
        if (!room.ok()) return false;
        each(threads, tasks, [&](int64_t i) {
            int64_t from = first + i * ROWS_AT_ONCE, to = at_most(last, from + ROWS_AT_ONCE);
            run(from, to, dhs ? dhs + (from - first) * H : nullptr, room.data + i * size);
        });
        return true;
    }
    /* The mean, and each by itself. */
    void finish() const {
        double total = 0;
        for (int64_t s = 0; s < S; s++) total += nats.data[s];
        *static_cast<real *>(head->nats) = real(total / double(S));
        for (int64_t s = 0; head->each && s < S; s++) static_cast<real *>(head->each)[s] = real(nats.data[s]);
    }
};

/* dW += Σ do ⊗ hs, db += Σ do, of steps [t0, t1). */
struct OutputTasks {
    const Output *out;
    int64_t t0, t1, threads;
    const bool wanted = out && out->head->dW && t1 > t0;
    const Head none = {}, *head = wanted ? out->head : &none;
    const Steps at{wanted ? t1 - t0 : 0, head->B};
    const Side all{at, wanted ? static_cast<const real *>(head->hs) + t0 * head->B * head->H : nullptr, head->H, false};
    const Grid d{wanted ? out->o.data + (t0 * head->B - out->base) * head->V : nullptr, head->V, false};
    const Columns columns{1, head->V};
    const Buffer<operand> X{wanted ? all.size() : 0};
    const Side states{at, all.X, all.N, false, X.data};
    const bool fresh = t1 == head->T;
    const OuterTasks outer{{at, d, columns, states, static_cast<real *>(head->dW), fresh}, threads};
    const int64_t tasks = wanted ? outer.tasks : 0;

    /* Part i of `parts` of what all tasks read. */
    void pack(int64_t i, int64_t parts) const {
        if (wanted) states.pack(head->B * i / parts, head->B * (i + 1) / parts, X.data);
    }
    bool run(int64_t i) const {
        for (int64_t p = outer.first(i); head->db && i % outer.across == 0 && p < outer.last(i); p++)
            add_rows(at, d, columns, p, fresh, static_cast<real *>(head->db));
        return outer.run(i);
    }
};

/* The gradients of weights go on with steps [t0, t1), whose pulls are in memory; whether there was memory. */
bool add_steps(const Output &out, int64_t t0, int64_t t1) {
    std::atomic<bool> ok{true};
    int64_t steps = ceil_div(1 << 20, out.head->B * out.H * int64_t(sizeof(real))); /* whose states stay in the cache */
    for (; t1 > t0 && ok; t1 -= at_most(steps, t1 - t0)) {
        OutputTasks weights{&out, t1 - at_most(steps, t1 - t0), t1, out.threads};
        if (!weights.X.ok()) return false;
        each(out.threads, out.threads, [&](int64_t i) { weights.pack(i, out.threads); });
        each(out.threads, weights.tasks, [&](int64_t i) {
            if (!weights.run(i)) ok = false;
        });
    }
    return ok;
}

constexpr int64_t LOGITS = 1 << 22; /* in memory at a time, or as many as make rows for every thread */

int head(const Head *head) {
    int64_t rows = LOGITS / head->V, least = 2 * head->threads * Output::ROWS_AT_ONCE;
    int64_t steps = at_most(ceil_div(rows > least ? rows : least, head->B), head->T);
    Output out{head, head->dhs != nullptr, steps * head->B};
    if (!out.in_range()) return BAD_TARGET;
    if (!out.ok()) return NO_MEMORY;
    out.pack();
    for (int64_t t1 = head->T; t1 > 0; t1 -= at_most(steps, t1)) {
        int64_t t0 = t1 - at_most(steps, t1);
        out.base = t0 * head->B;
        real *dhs = static_cast<real *>(head->dhs);
        if (!out.run_all(out.base, t1 * head->B, dhs ? dhs + out.base * head->H : nullptr)) return NO_MEMORY;
        if (!add_steps(out, t0, t1)) return NO_MEMORY;
    }
    out.finish();
    return OK;
}

} // namespace
