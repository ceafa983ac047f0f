/* The output layer with its softmax and cross-entropy: the logits of a row become its loss and its
 * gradient ŷ - 1, and that the pull on its hidden state, while they are still in the cache. */
#pragma once
#include "backward.h"
#include <cmath>

namespace {

/* One row: logits → (softmax - one-hot) / S in place; returns -log softmax[target]. */
double soften(real *o, int64_t V, int64_t target, real share) {
    vec highest = splat(o[0]);
    int64_t whole = V / LANES * LANES;
    for (int64_t v = 0; v < whole; v += LANES) {
        vec x = load(o + v);
        highest = x > highest ? x : highest;
    }
    real top = o[0];
    for (int i = 0; i < LANES; i++) top = highest[i] > top ? highest[i] : top;
    for (int64_t v = whole; v < V; v++) top = o[v] > top ? o[v] : top;
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

/* The loss of the rows, and where wanted their gradient: do = softmax(o) - one-hot, dhs = do W. */
struct HeadRows {
    const Head *head;
    Product logits, states; /* o = hs Wᵀ + b;  dhs = do W */
    double *nats;

    void run(int64_t first, int64_t last, operand *scratch) const {
        logits.run(first, last, scratch);
        real share = real(1) / real(head->T * head->B);
        for (int64_t s = first; s < last; s++)
            nats[s] = soften(logits.Y + s * head->V, head->V, head->targets[s], share);
        if (states.Y) states.run(first, last, scratch);
    }
};

/* dW = Σ do ⊗ hs;  db = Σ do. */
bool head_weights(const Head *head, int64_t threads, const real *d) {
    int64_t V = head->V, H = head->H;
    real *db = static_cast<real *>(head->db);
    OuterTasks outer{{head->T, head->B, d, V, static_cast<const real *>(head->hs), H, H, static_cast<real *>(head->dW), true},
                     threads};
    Job rows = {};
    rows.T = head->T, rows.B = head->B;
    std::atomic<bool> ok{true};
    each(threads, outer.tasks + (db ? ceil_div(V, STRIP) : 0), [&](int64_t i) {
        if (i >= outer.tasks)
            add_rows(&rows, V, d, (i - outer.tasks) * STRIP, true, db);
        else if (!outer.run(i))
            ok = false;
    });
    return ok;
}

int head(const Head *head) {
    int64_t S = head->T * head->B, H = head->H, V = head->V, threads = worth_two(S * V * H) ? head->threads : 1;
    const real *hs = static_cast<const real *>(head->hs), *W = static_cast<const real *>(head->W);
    for (int64_t s = 0; s < S; s++)
        if (head->targets[s] < 0 || head->targets[s] >= V) return BAD_ID;
    Layout there{1, V}, back{1, H};
    int64_t panels = there.panels(), all = panels + (head->dhs ? back.panels() : 0);
    Buffer<operand> turned(threads * LANES * padded(H)), W_there(there.size(H)), W_back(head->dhs ? back.size(V) : 0);
    Buffer<real> o(S * V);
    Buffer<double> nats(S);
    HeadRows rows{head,
                  {hs, H, H, W_there.data, static_cast<const real *>(head->b), o.data, V, V},
                  {o.data, V, V, W_back.data, nullptr, static_cast<real *>(head->dhs), H, H},
                  nats.data};
    constexpr int64_t ROWS_OF_TASK = 4 * ROWS<2>;
    int64_t tasks = ceil_div(S, ROWS_OF_TASK), size = rows.logits.scratch() + rows.states.scratch();
    Buffer<operand> scratch(tasks * size);
    if (!turned.ok() || !W_there.ok() || !W_back.ok() || !o.ok() || !nats.ok() || !scratch.ok()) return NO_MEMORY;
    each(threads, threads, [&](int64_t i) {
        for (int64_t p = all * i / threads; p < all * (i + 1) / threads; p++)
            if (p < panels)
                pack_transposed(there, p, W, H, W_there.data + p * there.panel_size(H), turned.data + i * LANES * padded(H));
            else
                pack_straight(p - panels, W, V, H, W_back.data);
    });
    each(threads, tasks, [&](int64_t i) {
        rows.run(i * ROWS_OF_TASK, at_most(S, (i + 1) * ROWS_OF_TASK), scratch.data + i * size);
    });
    double total = 0;
    for (int64_t s = 0; s < S; s++) total += nats.data[s];
    *static_cast<real *>(head->nats) = real(total / double(S));
    return !head->dW || head_weights(head, threads, o.data) ? OK : NO_MEMORY;
}

} // namespace
