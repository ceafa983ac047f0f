/* Gradients of weights: sums over time and batch, the last step first, a piece of time at a time. */
#pragma once
#include "product.h"
#include <initializer_list>

namespace {

constexpr int64_t STRIP = 8 * LANES;

/* db += Σ_t Σ_b da_tb, columns [m, m + STRIP): each step by itself, the last step first. The sums are
 * also added to `twin`, where there is one. */
void add_rows(const Job *job, int64_t M, const real *da, int64_t m, bool fresh, real *db, real *twin = nullptr) {
    int64_t n = at_most(M - m, STRIP);
    if (fresh) memset(db + m, 0, size_t(n) * sizeof(real));
    if (fresh && twin) memset(twin + m, 0, size_t(n) * sizeof(real));
    for (int64_t t = job->T - 1; t >= 0; t--) {
        vec sums[STRIP / LANES] = {};
        const real *row = da + (start_of(job, t) - start_of(job, 0)) * M + m;
        for (int64_t b = 0; b < rows_at(job, t); b++, row += M)
            FLATTEN for (int i = 0; i < STRIP / LANES; i++)
                if (i * LANES < n) sums[i] += load(row + i * LANES, n - i * LANES);
        for (real *to : {db, twin})
            for (int i = 0; to && i * LANES < n; i++) {
                real *d = to + m + i * LANES;
                store(d, load(d, n - i * LANES) + sums[i], n - i * LANES);
            }
    }
}

/* A product split between threads: by the rows of dW or, where there are few of those, its columns. */
struct OuterTasks {
    Outer outer;
    int64_t threads;
    const bool by_rows = outer.M >= 4 * threads * Outer::R;
    const int64_t size = by_rows ? outer.M : ceil_div(outer.N, 2 * LANES), tasks = at_most(threads, size);

    bool run(int64_t i) const {
        int64_t first = size * i / tasks, last = size * (i + 1) / tasks;
        Outer part = by_rows ? outer : outer.columns(first * 2 * LANES, at_most(outer.N, last * 2 * LANES));
        Buffer<operand> a(part.a_size()), x(part.x_size());
        if (!a.ok() || !x.ok()) return false;
        part.run(by_rows ? first : 0, by_rows ? last : outer.M, a.data, x.data);
        return true;
    }
};

/* D_v = Σ da over the steps that read token v, in parts such that every token's share fits the second-level cache, if
 * the vocabulary allows. */
struct ByToken {
    const Job *job;
    const int64_t V = names_of(job), M = gates_of(job->cell) * job->H;
    const int64_t share = ceil_div(ceil_div(M, job->threads), LANES) * LANES;
    const int64_t fitting = (256 << 10) / int64_t(sizeof(real)) / V / LANES * LANES;
    const int64_t width = at_most(share, fitting < LANES ? LANES : fitting), tasks = job->ids ? ceil_div(M, width) : 0;
    const Buffer<real> sums{job->ids ? V * M : 0}; /* [part][token][m] */

    /* Part i of D goes on with steps [t0, t1), whose pulls are `da`. */
    void run(int64_t i, int64_t t0, int64_t t1, const real *da) const {
        int64_t m = i * width, n = at_most(width, M - m);
        real *D = sums.data + m * V;
        if (t1 == job->T) begin(m, n, D);
        for (int64_t t = t1 - 1; t >= t0; t--)
            for (int64_t b = 0; b < rows_at(job, t); b++) {
                if (job->lengths && t >= job->lengths[b]) continue;
                int64_t s = start_of(job, t) + b;
                const real *d = da + (s - start_of(job, t0)) * M + m;
                real *to = D + job->ids[s] * n;
                for (int64_t u = 0; u < n; u += LANES) store(to + u, load(to + u, n - u) + load(d + u, n - u), n - u);
            }
        if (t0 == 0 && !job->E) finish(m, n, D);
    }
    /* Of one-hot rows D is dW_ihᵀ, which may hold something already. */
    void begin(int64_t m, int64_t n, real *D) const {
        if (job->fresh || job->E) {
            memset(D, 0, size_t(V * n) * sizeof(real));
            return;
        }
        const real *dW = static_cast<const real *>(job->dW_ih) + m * V;
        for (int64_t v = 0; v < V; v++)
            for (int64_t u = 0; u < n; u++) D[v * n + u] = dW[u * V + v];
    }
    void finish(int64_t m, int64_t n, const real *D) const {
        real *dW = static_cast<real *>(job->dW_ih) + m * V;
        for (int64_t v = 0; v < V; v++)
            for (int64_t u = 0; u < n; u++) dW[u * V + v] = D[v * n + u];
    }
    /* D, a row for each token. */
    void copy(real *to) const {
        for (int64_t m = 0; m < M; m += width)
            for (int64_t v = 0, n = at_most(width, M - m); v < V; v++)
                memcpy(to + v * M + m, sums.data + m * V + v * n, size_t(n) * sizeof(real));
    }
};

} // namespace
