/* Runs the CPU kernel under the compiler's sanitizers (`make sanitize`): every cell, many shapes,
 * every instruction set this processor has, tensors in memory of exactly their own size.
 * The variants must also agree with one another. */
#include "../src/elman/kernels/cpu/job.h"
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

extern "C" {
int elman_forward(const Job *, int kind, int level);
int elman_backward(const Job *, int kind, int level);
const char *elman_variant(int kind, int level);
}

namespace {

std::mt19937 random_bits(0);

template <class real> std::vector<real> normal(int64_t n, double scale = 0.5) {
    std::normal_distribution<double> draw(0, scale);
    std::vector<real> v(static_cast<size_t>(n));
    for (auto &x : v) x = static_cast<real>(draw(random_bits));
    return v;
}

struct Case {
    int64_t cell, T, B, I, H, threads;
    bool ids, bias, lengths, xi_per_row;
};

/* Everything one variant computes, one number after another. */
template <class real> struct Run {
    std::vector<real> xs, W_ih, W_hh, b_ih, b_hh, h_0, c_0, dhs, dh_T, dc_T, xi;
    std::vector<int64_t> ids, lengths;
    Case c;
    int64_t S, M;

    explicit Run(const Case &given) : c(given), S(c.T * c.B), M(gates_of(c.cell) * c.H) {
        xs = normal<real>(c.ids ? 0 : S * c.I);
        W_ih = normal<real>(M * c.I);
        W_hh = normal<real>(M * c.H, 0.5 / std::sqrt(double(c.H)));
        b_ih = normal<real>(M), b_hh = normal<real>(M);
        h_0 = normal<real>(c.B * c.H), c_0 = normal<real>(c.B * c.H);
        dhs = normal<real>(S * c.H), dh_T = normal<real>(c.B * c.H), dc_T = normal<real>(c.B * c.H);
        xi = normal<real>(c.xi_per_row ? S : c.T, 1);
        for (int64_t s = 0; c.ids && s < S; s++) ids.push_back(int64_t(random_bits() % uint64_t(c.I)));
        for (int64_t b = 0; c.lengths && b < c.B; b++) lengths.push_back(int64_t(random_bits() % uint64_t(c.T + 1)));
    }

    std::vector<double> results(int kind, int level) const {
        bool lstm = c.cell == LSTM, gated = gates_of(c.cell) > 1;
        size_t state = size_t(c.B * c.H), track = size_t((c.T + 1) * c.B * c.H);
        std::vector<real> hs(track), cs(lstm ? track : 0), gates(gated ? size_t(4 * S * c.H) : 0);
        std::vector<real> dxs(xs.size()), dW_ih(W_ih.size()), dW_hh(W_hh.size()), db_ih(b_ih.size());
        std::vector<real> db_hh(b_hh.size()), dh_0(state), dc_0(lstm ? state : 0);
        Job job = {};
        job.cell = c.cell, job.T = c.T, job.B = c.B, job.I = c.I, job.H = c.H, job.threads = c.threads;
        job.xs = c.ids ? nullptr : xs.data(), job.ids = c.ids ? ids.data() : nullptr;
        job.W_ih = W_ih.data(), job.W_hh = W_hh.data();
        if (c.bias) job.b_ih = b_ih.data(), job.b_hh = b_hh.data(), job.db_ih = db_ih.data(), job.db_hh = db_hh.data();
        job.lengths = c.lengths ? lengths.data() : nullptr;
        job.h_0 = h_0.data(), job.c_0 = lstm ? c_0.data() : nullptr;
        job.hs = hs.data(), job.cs = lstm ? cs.data() : nullptr, job.gates = gated ? gates.data() : nullptr;
        job.dhs = dhs.data(), job.dh_T = dh_T.data(), job.dc_T = lstm ? dc_T.data() : nullptr;
        job.xi = xi.data(), job.xi_per_row = c.xi_per_row, job.dxs = c.ids ? nullptr : dxs.data();
        job.dW_ih = dW_ih.data(), job.dW_hh = dW_hh.data();
        job.dh_0 = dh_0.data(), job.dc_0 = lstm ? dc_0.data() : nullptr;
        if (elman_forward(&job, kind, level) != OK || elman_backward(&job, kind, level) != OK) abort();
        std::vector<double> all;
        for (auto *v : {&hs, &cs, &dxs, &dW_ih, &dW_hh, &db_ih, &db_hh, &dh_0, &dc_0})
            all.insert(all.end(), v->begin(), v->end());
        return all;
    }
};

double distance(const std::vector<double> &a, const std::vector<double> &b) {
    double off = 0, size = 0;
    for (size_t i = 0; i < a.size(); i++) off += (a[i] - b[i]) * (a[i] - b[i]), size += b[i] * b[i];
    return std::sqrt(off / size);
}

template <class real> int check(const Case &c, int kind, double tolerance) {
    Run<real> run(c);
    int wrong = 0;
    std::vector<double> portable = run.results(sizeof(real) == 8, 0);
    for (int level = 1; level <= 3; level++) {
        if (!elman_variant(kind, level)) continue;
        double off = distance(run.results(kind, level), portable);
        if (!(off < tolerance)) {
            printf("cell %ld T %ld B %ld I %ld H %ld, kind %d, %s: off by %g\n", long(c.cell), long(c.T), long(c.B),
                   long(c.I), long(c.H), kind, elman_variant(kind, level), off);
            wrong++;
        }
    }
    return wrong;
}

} // namespace

int main() {
    int wrong = 0, cases = 0;
    const int64_t sizes[][4] = {{1, 1, 1, 1}, {2, 3, 5, 7}, {3, 4, 28, 16}, {4, 17, 3, 33}, {3, 70, 9, 40}, {2, 5, 40, 65}};
    for (int64_t cell = TANH; cell <= LSTM; cell++)
        for (auto &s : sizes)
            for (int choice = 0; choice < 16; choice++) {
                Case c = {cell, s[0], s[1], s[2], s[3], 3, bool(choice & 1), bool(choice & 2), bool(choice & 4), bool(choice & 8)};
                wrong += check<double>(c, 1, 1e-13) + check<float>(c, 0, 1e-5);
                if (cell != RELU) wrong += check<float>(c, 2, 0.1); /* at a kink a rounding may choose sides */
                cases++;
            }
    printf("%d cases, %d wrong\n", cases, wrong);
    return wrong != 0;
}
