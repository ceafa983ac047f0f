/* One job of the CPU kernel from a file of doubles to another, for a processor that Python does not run on
 * (tests/test_arm64.py): sizes, then tensors in; everything that is found out. */
#include "../src/elman/kernels/cpu/job.h"
#include <cstdio>
#include <vector>

extern "C" {
int elman_forward(const Job *, int kind, int level);
int elman_backward(const Job *, int kind, int level);
int elman_head(const Head *, int kind, int level);
const char *elman_variant(int kind, int level);
}

namespace {

constexpr int FASTEST = 3;
FILE *in, *out;

template <class T> std::vector<T> take(int64_t n) {
    std::vector<double> numbers(static_cast<size_t>(n));
    if (fread(numbers.data(), sizeof(double), numbers.size(), in) != numbers.size()) throw "the file is too short";
    return std::vector<T>(numbers.begin(), numbers.end());
}
template <class T> void give(const std::vector<T> &found) {
    std::vector<double> numbers(found.begin(), found.end());
    fwrite(numbers.data(), sizeof(double), numbers.size(), out);
}

template <class real> int run(int kind, const std::vector<int64_t> &sizes) {
    int64_t cell = sizes[1], T = sizes[2], B = sizes[3], I = sizes[4], H = sizes[5], ids = sizes[6], V = sizes[7];
    int64_t S = T * B, M = gates_of(cell) * H, names = ids == 2 ? V : I, twice = cell == LSTM ? B * H : 0;
    auto tokens = take<int64_t>(ids ? S : 0);
    auto xs = take<real>(ids == 0 ? S * I : ids == 2 ? V * I : 0), W_ih = take<real>(M * I), W_hh = take<real>(M * H);
    auto b_ih = take<real>(M), b_hh = take<real>(M), h_0 = take<real>(B * H), c_0 = take<real>(twice);
    auto dh_T = take<real>(B * H), dc_T = take<real>(twice), W = take<real>(names * H), b = take<real>(names);
    auto targets = take<int64_t>(S);
    std::vector<real> hs(size_t((S + B) * H)), cs(size_t(cell == LSTM ? (S + B) * H : 0)), gates(size_t(S * 4 * H));
    std::vector<real> dhs(size_t(S * H)), dxs(xs.size()), dW_ih(W_ih.size()), dW_hh(W_hh.size()), db_ih(b_ih.size());
    std::vector<real> db_hh(b_hh.size()), dh_0(h_0.size()), dc_0(c_0.size()), dW(W.size()), db(b.size()), nats(1);
    Job job = {};
    job.cell = cell, job.T = T, job.B = B, job.I = I, job.H = H, job.threads = 2, job.fresh = 1;
    job.ids = ids ? tokens.data() : nullptr, job.xs = ids ? nullptr : xs.data();
    if (ids == 2) job.V = V, job.E = xs.data(), job.dE = dxs.data();
    if (ids == 0) job.dxs = dxs.data();
    job.W_ih = W_ih.data(), job.W_hh = W_hh.data(), job.b_ih = b_ih.data(), job.b_hh = b_hh.data();
    job.h_0 = h_0.data(), job.hs = hs.data(), job.gates = gates_of(cell) > 1 ? gates.data() : nullptr;
    job.dhs = dhs.data(), job.dh_T = dh_T.data(), job.dh_0 = dh_0.data();
    if (twice) job.c_0 = c_0.data(), job.cs = cs.data(), job.dc_T = dc_T.data(), job.dc_0 = dc_0.data();
    job.dW_ih = dW_ih.data(), job.dW_hh = dW_hh.data(), job.db_ih = db_ih.data(), job.db_hh = db_hh.data();
    Head head = {};
    head.T = T, head.B = B, head.H = H, head.V = names, head.threads = 2, head.hs = hs.data() + B * H;
    head.W = W.data(), head.b = b.data(), head.targets = targets.data(), head.nats = nats.data();
    head.dhs = dhs.data(), head.dW = dW.data(), head.db = db.data();
    int status = elman_forward(&job, kind, FASTEST);
    if (!status) status = elman_head(&head, kind, FASTEST);
    if (!status) status = elman_backward(&job, kind, FASTEST);
    for (const auto *found : {&nats, &hs, &cs, &dxs, &dW_ih, &dW_hh, &db_ih, &db_hh, &dh_0, &dc_0, &dW, &db}) give(*found);
    return status;
}

} // namespace

int main(int, char **files) {
    in = fopen(files[1], "rb"), out = fopen(files[2], "wb");
    if (!in || !out) return 9;
    printf("%s\n", elman_variant(0, FASTEST));
    int status = 0;
    while (!status) {
        double more = 0;
        if (fread(&more, sizeof more, 1, in) != 1 || !more) break;
        auto sizes = take<int64_t>(8);
        status = sizes[0] ? run<double>(1, sizes) : run<float>(0, sizes);
    }
    return fclose(out) ? 8 : status;
}
