/* Gradients of weights: sums over time and batch, the last step first, a piece of time at a time. */
#pragma once
#include "product.h"
#include <initializer_list>

namespace {

/* Products of one kind of gradient, split between threads: by blocks of the rows of dW and, where there are few of those, by
 * its columns, into so many that threads end together. */
struct OuterTasks {
    Outer outer;
    int64_t threads;
    static constexpr int64_t EACH = 4; /* tasks of a thread */
    const int64_t blocks = outer.columns.blocks(), panels = ceil_div(outer.N, Outer::C * LANES);
    const int64_t down = at_most(blocks, EACH * threads), across = down ? at_most(panels, threads / down + 1) : 0;
    const int64_t tasks = down * across;

    int64_t first(int64_t i) const { return blocks * (i / across) / down; }
    int64_t last(int64_t i) const { return blocks * (i / across + 1) / down; }
    bool run(int64_t i) const {
        Buffer<operand> scratch(outer.scratch());
        if (!scratch.ok()) return false;
        int64_t part = i % across;
        outer.run(first(i), last(i), panels * part / across, panels * (part + 1) / across, scratch.data);
        return true;
    }
};

/* db += Σ_t Σ_b A_tb, of one block of columns: each step by itself, the last step first. The sums are also added to `twin`,
 * where there is one. */
void add_rows(const Steps &at, const Grid &A, const Columns &columns, int64_t p, bool fresh, real *db, real *twin = nullptr) {
    int64_t n = columns.count(p), m = columns.first(p), stride = A.stride();
    vec total = fresh ? vec{} : load(db + m, n), other = fresh || !twin ? vec{} : load(twin + m, n);
    for (int64_t t = at.T - 1; t >= 0; t--) {
        const real *row = A.at(at.start(t), at.rows(t), columns.place(p));
        vec sum = {};
        for (int64_t b = 0; b < at.rows(t); b++, row += stride) sum += load(row, n);
        total += sum, other += sum;
    }
    store(db + m, total, n);
    if (twin) store(twin + m, other, n);
}

/* D_v = Σ da over the steps that read token v, block by block. */
struct ByToken {
    const Job *job;
    const int64_t V = names_of(job);
    const Columns columns{gates_of(job->cell), job->H};
    const Buffer<real> sums{job->ids ? columns.blocks() * V * LANES : 0}; /* [block][token][lane] */

    /* Block p of D goes on with the steps from t0 on, whose pulls are `da`. */
    void run(int64_t p, int64_t t0, const Steps &at, const Grid &da) const {
        int64_t t1 = t0 + at.T;
        real *D = sums.data + p * V * LANES;
        if (t1 == job->T) begin(p, D);
        for (int64_t t = t1 - 1; t >= t0; t--) {
            const real *d = da.at(at.start(t - t0), at.rows(t - t0), p);
            const int64_t *ids = job->ids + start_of(job, t);
            for (int64_t b = 0; b < rows_at(job, t); b++) {
                if (job->lengths && t >= job->lengths[b]) continue;
                real *to = D + ids[b] * LANES;
                store(to, load(to) + load(d + b * LANES));
            }
        }
        if (t0 == 0 && !job->E) finish(p, D);
    }
    /* Of one-hot rows D is dW_ihᵀ, which may hold something already. */
    void begin(int64_t p, real *D) const {
        memset(D, 0, size_t(V * LANES) * sizeof(real));
        if (job->fresh || job->E) return;
        const real *dW = static_cast<const real *>(job->dW_ih) + columns.first(p) * V;
        for (int64_t v = 0; v < V; v++)
            for (int64_t u = 0; u < columns.count(p); u++) D[v * LANES + u] = dW[u * V + v];
    }
    void finish(int64_t p, const real *D) const {
        real *dW = static_cast<real *>(job->dW_ih) + columns.first(p) * V;
        for (int64_t v = 0; v < V; v++)
            for (int64_t u = 0; u < columns.count(p); u++) dW[u * V + v] = D[v * LANES + u];
    }
    /* D, a row for each token. */
    void copy(real *to) const {
        for (int64_t p = 0; p < columns.blocks(); p++)
            for (int64_t v = 0; v < V; v++)
                memcpy(to + v * gates_of(job->cell) * job->H + columns.first(p), sums.data + (p * V + v) * LANES,
                       size_t(columns.count(p)) * sizeof(real));
    }
};

} // namespace
