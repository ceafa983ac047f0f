/* How far back losses reach: ‖∂L_t/∂S_{t+1-k}‖ of one layer, for many losses t and lags k.
 *
 * At step s all losses that have come so far go back through one Jacobian together,
 *
 *     ∂S_{s+1}/∂h_s = diag(before) + Σ_g diag(slope_g) W_hh[g],
 *
 * which is made a panel of columns at a time and used while it is in the cache: of a gru that is a third of the
 * multiplications of carrying every gate's pull through W_hh. */
#pragma once
#include "product.h"
#include <cmath>

namespace {

#ifdef HALF
constexpr decltype(Variant::travel) travel = nullptr;
#else
struct Journey {
    const Travel *job;
    int64_t H, N, gates; /* S has N = states · H numbers */
    const real *W;

    /* Two vectors of columns of ∂S_{s+1}/∂h_s. */
    void panel(int64_t s, int64_t column, real *out) const {
        const real *slope = static_cast<const real *>(job->slopes) + s * N * gates;
        const real *before = static_cast<const real *>(job->before) + s * N * job->states;
        for (int64_t state = 0; state < job->states; state++, slope += gates * H, before += job->states * H) {
            real *to = out + state * H * 2 * LANES;
            for (int64_t k = 0; k < H; k++)
                for (int64_t c = 0, n = H - column; c < 2; c++, n -= LANES) {
                    vec sums = {};
                    for (int64_t g = 0; n > 0 && g < gates; g++)
                        sums += load(W + (g * H + k) * H + column + c * LANES, n) * slope[g * H + k];
                    store(to + (2 * k + c) * LANES, sums);
                }
            for (int64_t k = column; k < at_most(H, column + 2 * LANES); k++) to[2 * k * LANES + k - column] += before[k];
        }
    }

    /* Pulls on h_s from those on S_{s+1}, for two vectors of its units. */
    void pull(int64_t rows, const real *G, const real *jacobian, int64_t column, real *next) const {
        groups(rows, ROWS<2>, [&](int64_t from, int64_t to) {
            real out[SUMS * LANES];
            two_vectors(H - column, int(to - from), G + from * N, N, jacobian, N, out);
            for (int64_t r = from; r < to; r++)
                for (int64_t c = 0, n = H - column; c < 2 && n > 0; c++, n -= LANES)
                    store(next + r * N + column + c * LANES, load(out + (2 * (r - from) + c) * LANES), n);
        });
    }

    /* Those on the states beside h, unit by unit. */
    void pull_others(int64_t s, int64_t rows, const real *G, real *next) const {
        const real *before = static_cast<const real *>(job->before) + s * N * job->states;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t to = 1; to < job->states; to++)
                for (int64_t k = 0; k < H; k++) {
                    real sum = 0;
                    for (int64_t from = 0; from < job->states; from++)
                        sum += G[r * N + from * H + k] * before[(from * job->states + to) * H + k];
                    next[r * N + to * H + k] = sum;
                }
    }

    real norm(const real *G) const {
        vec squares = {};
        for (int64_t k = 0; k < N; k += LANES) {
            vec g = load(G + k, N - k);
            squares += g * g;
        }
        return std::sqrt(sum(squares));
    }
};

int travel(const Travel *job) {
    int64_t H = job->H, N = job->states * H, first = job->first, lags = job->lags, losses = job->T - first;
    Journey way{job, H, N, job->gates, static_cast<const real *>(job->W)};
    int64_t panels = ceil_div(H, 2 * LANES), threads = worth_two(at_most(losses, lags) * N * H) ? job->threads : 1;
    Buffer<real> now(losses * N), then(losses * N), jacobians(threads * 2 * LANES * N);
    if (!now.ok() || !then.ok() || !jacobians.ok()) return NO_MEMORY;
    real *G = now.data, *next = then.data, *norms = static_cast<real *>(job->norms);
    for (int64_t s = job->T - 1; s >= first - lags; s--) { /* G: the pulls on S_{s+1} */
        if (s >= first) {
            memcpy(G + (s - first) * N, static_cast<const real *>(job->pulls) + s * H, size_t(H) * sizeof(real));
            memset(G + (s - first) * N + H, 0, size_t(N - H) * sizeof(real));
        }
        int64_t lo = s > first ? s - first : 0, hi = at_most(losses, s + lags - first + 1);
        for (int64_t i = lo; i < hi; i++) norms[i * (lags + 1) + first + i - s] = way.norm(G + i * N);
        hi = at_most(losses, s + lags - first); /* the others have arrived */
        if (lo >= hi) continue;
        each(threads, threads, [&](int64_t i) {
            real *jacobian = jacobians.data + i * 2 * LANES * N;
            for (int64_t p = panels * i / threads; p < panels * (i + 1) / threads; p++) {
                way.panel(s, p * 2 * LANES, jacobian);
                way.pull(hi - lo, G + lo * N, jacobian, p * 2 * LANES, next + lo * N);
            }
        });
        way.pull_others(s, hi - lo, G + lo * N, next + lo * N);
        real *done = G;
        G = next, next = done;
    }
    return OK;
}
#endif

} // namespace
