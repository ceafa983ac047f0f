/* The output layer with its softmax and cross-entropy: the logits of a row become its loss and its
 * gradient ŷ - 1 while they are still in the cache. */
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

int head_forward(const Head *head) {
    int64_t S = head->T * head->B, H = head->H, V = head->V, threads = head->threads, tasks = threads * 4;
    const real *hs = static_cast<const real *>(head->hs);
    for (int64_t s = 0; s < S; s++)
        if (head->targets[s] < 0 || head->targets[s] >= V) return BAD_ID;
    Layout at{1, V};
    Buffer<operand> panels(at.size(H));
    real *o = static_cast<real *>(head->dlogits);
    Product product{hs, H, panels.data, static_cast<const real *>(head->b), o, V, V};
    Buffer<operand> scratch(tasks * product.scratch());
    Buffer<double> nats(tasks);
    if (!panels.ok() || !scratch.ok() || !nats.ok()) return NO_MEMORY;
    pack_all(at, threads, static_cast<const real *>(head->W), H, panels.data, scratch.data);
    each(threads, tasks, [&](int64_t i) {
        int64_t first = S * i / tasks, last = S * (i + 1) / tasks;
        product.run(first, last, scratch.data + i * product.scratch());
        nats.data[i] = 0;
        for (int64_t s = first; s < last; s++) nats.data[i] += soften(o + s * V, V, head->targets[s], real(1) / real(S));
    });
    *head->nats = 0;
    for (int64_t i = 0; i < tasks; i++) *head->nats += nats.data[i] / double(S);
    return OK;
}

/* dhs = dlogits W;  dW = dlogitsᵀ hs;  db = Σ dlogits. */
int head_backward(const Head *head) {
    int64_t S = head->T * head->B, H = head->H, V = head->V, threads = head->threads, tasks = threads * 4;
    const real *d = static_cast<const real *>(head->dlogits), *hs = static_cast<const real *>(head->hs);
    Layout at{1, H};
    Buffer<operand> panels(at.size(V));
    Product product{d, V, panels.data, nullptr, static_cast<real *>(head->dhs), H, H};
    Buffer<operand> scratch(tasks * product.scratch());
    if (!panels.ok() || !scratch.ok()) return NO_MEMORY;
    if (head->dhs) {
        each(threads, at.panels(), [&](int64_t p) {
            pack_straight(p, static_cast<const real *>(head->W), V, H, panels.data);
        });
        each(threads, tasks, [&](int64_t i) {
            product.run(S * i / tasks, S * (i + 1) / tasks, scratch.data + i * product.scratch());
        });
    }
    real *db = static_cast<real *>(head->db);
    if (db) each(threads, ceil_div(V, STRIP), [&](int64_t i) { add_rows(head->T, head->B, V, d, i * STRIP, db); });
    Outer outer{head->T, head->B, d, V, hs, H, H, static_cast<real *>(head->dW)};
    return add_outer(outer, threads) ? OK : NO_MEMORY;
}

} // namespace
