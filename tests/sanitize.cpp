/* Runs the CPU kernel under the compiler's sanitizers (`make sanitize`): every cell, many shapes,
 * every instruction set this processor has, tensors in memory of exactly their own size; then the output
 * layer with its loss, the clipping of all gradients found, a step of two layers, tokens that they write, beams, and calls of stacks,
 * packed and dropped.
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
int elman_head(const Head *, int kind, int level);
int elman_step(const Job *, int64_t count, const void *W, const void *b, void *y, int64_t V, int kind, int level);
int elman_write(const Job *, int64_t count, const void *W, const void *b, void *y, int64_t V, const void *E, const Rules *,
                const int64_t *last, int64_t length, const double *chances, int64_t *tokens, int kind, int level);
int elman_search(const Job *, int64_t count, const void *W, const void *b, void *y, int64_t V, const void *E, const Rules *,
                 const int64_t *last_rows, const int64_t *last, int64_t length, double *sums, int64_t *rows, int64_t *tokens, int kind,
                 int level);
int elman_call(const Stack *, const Use *, const void *x, const void *h_0, const void *c_0, void *y, void *h, void *c, void *kept);
int elman_call_back(const Stack *, const Use *, const void *x, const void *kept, const void *y, const void *dy, const void *dh,
                    const void *dc, void *dx, void *dh_0, void *dc_0, void *const *dw);
int64_t elman_packed_rows(const int64_t *sizes, int64_t T, int64_t N, const int64_t *order, const int64_t *back, int64_t count);
int64_t elman_kept(const Stack *, int64_t S);
double elman_clip(void *const *, const int64_t *sizes, int64_t count, double theta, int64_t threads, int kind, int level);
int elman_travel(const Travel *, int kind, int level);
int elman_along(const Twice *, int kind, int level);
int elman_back_twice(const Twice *, int kind, int level);
void elman_keep(void *generator, void *mask, int64_t n, double p, double value, int kind, int level);
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
    bool ids, bias, lengths, xi_per_row, fresh;
};

int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

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
        real none = c.fresh ? real(NAN) : real(0); /* what is in a gradient that holds nothing yet */
        std::vector<real> dxs(xs.size()), dW_ih(W_ih.size(), none), dW_hh(W_hh.size(), none);
        std::vector<real> db_ih(c.bias ? b_ih.size() : 0, none), db_hh(db_ih), dh_0(state), dc_0(lstm ? state : 0);
        Job job = {};
        job.fresh = c.fresh;
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
        first_unasked(job, kind, level, all);
        read_out(hs, kind, level, all);
        read_out_on_the_way(job, kind, level, all);
        if (kind != 2 && c.ids) step(job, kind, level, all);
        if (!c.ids) embedded(job, kind, level, all);
        if (kind != 2) travel(kind, level, all);
        if (kind != 2 && !c.ids && !c.lengths) twice(job, S, kind, level, all), packed(job, kind, level, all);
        return all;
    }

    /* The same gradients where nobody asks what pulls on the first states. */
    void first_unasked(Job job, int kind, int level, std::vector<double> &all) const {
        std::vector<real> dW_ih(W_ih.size(), NAN), dW_hh(W_hh.size(), NAN), db_ih(c.bias ? b_ih.size() : 0, NAN), db_hh(db_ih);
        job.fresh = 1, job.dh_0 = job.dc_0 = job.dxs = nullptr, job.dW_ih = dW_ih.data(), job.dW_hh = dW_hh.data();
        if (c.bias) job.db_ih = db_ih.data(), job.db_hh = db_hh.data();
        if (elman_backward(&job, kind, level) != OK) abort();
        for (auto *v : {&dW_ih, &dW_hh, &db_ih, &db_hh}) all.insert(all.end(), v->begin(), v->end());
    }

    /* Gradients of its gradients where ever fewer rows go on. */
    void packed(Job job, int kind, int level, std::vector<double> &all) const {
        bool lstm = c.cell == LSTM, gated = gates_of(c.cell) > 1;
        std::vector<int64_t> sizes{c.B}, starts{0};
        for (int64_t t = 0; t < c.T; t++) {
            sizes.push_back(at_most(sizes.back(), 1 + c.B * (c.T - t) / c.T)), starts.push_back(starts.back() + sizes.back());
        }
        size_t rows = size_t(starts.back()), H = size_t(c.H), track = (size_t(c.B) + rows) * H;
        std::vector<real> x(xs.begin(), xs.begin() + int64_t(rows) * c.I), d(dhs.begin(), dhs.begin() + int64_t(rows * H));
        std::vector<real> hs(track, NAN), cs(lstm ? track : 0, NAN), gates(gated ? 4 * rows * H : 0, NAN);
        job.xs = x.data(), job.dhs = d.data(), job.sizes = sizes.data() + 1, job.starts = starts.data();
        job.hs = hs.data(), job.cs = lstm ? cs.data() : nullptr, job.gates = gated ? gates.data() : nullptr;
        if (elman_forward(&job, kind, level) != OK) abort();
        twice(job, int64_t(rows), kind, level, all);
    }

    /* Gradients of its gradients, along a change of everything and along one of the inputs alone. */
    void twice(Job job, int64_t S, int kind, int level, std::vector<double> &all) const {
        bool lstm = c.cell == LSTM, gated = gates_of(c.cell) > 1;
        size_t state = size_t(c.B * c.H), track = size_t((c.B + S) * c.H);
        std::vector<real> x(xs.begin(), xs.begin() + S * c.I), d(dhs.begin(), dhs.begin() + S * c.H);
        for (bool every : {true, false}) {
            std::vector<real> hs(track, NAN), cs(lstm ? track : 0, NAN), as(gated ? size_t(4 * S * c.H) : 0, NAN);
            std::vector<real> dxs(x.size(), NAN), ddxs(dxs), dW_ih(W_ih.size(), NAN), dW_hh(W_hh.size(), NAN);
            std::vector<real> db_ih(b_ih.size(), NAN), db_hh(db_ih), dh_0(state, NAN), dc_0(lstm ? state : 0, NAN);
            Twice way = {};
            way.job = &job, way.xs_u = x.data(), job.dxs = dxs.data(), way.ddxs = ddxs.data();
            if (every) {
                way.W_ih_u = W_ih.data(), way.W_hh_u = W_hh.data(), way.b_ih_u = b_hh.data(), way.b_hh_u = b_ih.data();
                way.h_0_u = dh_T.data(), way.c_0_u = lstm ? dc_T.data() : nullptr, way.ddhs = d.data();
                way.ddW_ih = dW_ih.data(), way.ddW_hh = dW_hh.data(), way.ddb_ih = db_ih.data(), way.ddb_hh = db_hh.data();
                way.ddh_0 = dh_0.data(), way.ddc_0 = lstm ? dc_0.data() : nullptr;
            }
            way.hs_u = hs.data(), way.cs_u = lstm ? cs.data() : nullptr, way.as_u = gated ? as.data() : nullptr;
            if (elman_along(&way, kind, level) != OK || elman_back_twice(&way, kind, level) != OK) abort();
            for (auto *v : {&hs, &cs, &dxs, &ddxs}) all.insert(all.end(), v->begin(), v->end());
            for (auto *v : {&dW_ih, &dW_hh, &db_ih, &db_hh, &dh_0, &dc_0})
                if (every) all.insert(all.end(), v->begin(), v->end());
        }
    }

    /* The backward pass of the losses of a cell of that many states and gates. */
    void travel(int kind, int level, std::vector<double> &all) const {
        int64_t states = c.cell == LSTM ? 2 : 1, gates = gates_of(c.cell), first = (c.T + 1) / 2, lags = first;
        if (c.T < 2) return;
        std::vector<real> slopes, before, pulls, norms(size_t((c.T - first) * (lags + 1)), NAN);
        for (int64_t i = 0; i < c.T * states * gates * c.H; i++) slopes.push_back(W_ih[size_t(i) % W_ih.size()]);
        for (int64_t i = 0; i < c.T * states * states * c.H; i++) before.push_back(b_ih[size_t(i) % b_ih.size()]);
        for (int64_t i = 0; i < c.T * c.H; i++) pulls.push_back(dhs[size_t(i)]);
        Travel way = {c.T, c.H, states, gates, first, lags, c.threads, pulls.data(), slopes.data(), before.data(), W_hh.data(), norms.data()};
        if (elman_travel(&way, kind, level) != OK) abort();
        all.insert(all.end(), norms.begin(), norms.end());
    }

    /* The same layer reading rows of an embedding; and a mask for all of its states. */
    void embedded(Job job, int kind, int level, std::vector<double> &all) const {
        int64_t V = at_most(S, 5);
        std::vector<int64_t> tokens;
        for (int64_t s = 0; s < S; s++) tokens.push_back(s * 7 % V);
        std::vector<real> E(xs.begin(), xs.begin() + V * c.I), dE(E.size(), NAN), dW(W_ih.size(), NAN), mask(size_t(S * c.H), NAN);
        job.xs = job.dxs = nullptr, job.ids = tokens.data(), job.fresh = 1;
        job.V = V, job.E = E.data(), job.dE = dE.data(), job.dW_ih = dW.data();
        if (elman_forward(&job, kind, level) != OK || elman_backward(&job, kind, level) != OK) abort();
        std::vector<uint64_t> generator(632, 1); /* one word left: none to draw before new ones are made */
        generator[1] = 1, generator[2] = 0;
        elman_keep(generator.data(), mask.data(), int64_t(mask.size()), 0.3, 2, kind, level);
        for (auto *v : {&dE, &dW, &mask}) all.insert(all.end(), v->begin(), v->end());
    }

    /* The same layer back from the loss of an output layer that is found piece by piece. */
    void read_out_on_the_way(Job job, int kind, int level, std::vector<double> &all) const {
        int64_t V = at_most(S, c.I);
        std::vector<real> b(size_t(V), 0), dW(size_t(V * c.H), NAN), db(b.size(), NAN), nats(1);
        std::vector<int64_t> targets;
        for (int64_t s = 0; s < S; s++) targets.push_back(s % V);
        const real *hs = static_cast<const real *>(job.hs) + c.B * c.H;
        Head head = {S, 1, c.H, V, c.threads, hs, dhs.data(), b.data(), targets.data(), nats.data(), nullptr, nullptr, dW.data(), db.data()};
        job.head = &head, job.dhs = nullptr;
        if (elman_backward(&job, kind, level) != OK) abort();
        targets.back() = V;
        if (elman_backward(&job, kind, level) != BAD_TARGET) abort();
        for (auto *v : {&nats, &dW, &db}) all.insert(all.end(), v->begin(), v->end());
        const real *dW_hh = static_cast<const real *>(job.dW_hh);
        all.insert(all.end(), dW_hh, dW_hh + W_hh.size());
    }

    /* The loss of an output layer of I rows, its gradients, and those clipped. */
    void read_out(const std::vector<real> &hs, int kind, int level, std::vector<double> &all) const {
        std::vector<real> h(hs.end() - S * c.H, hs.end()), W(dhs.begin(), dhs.begin() + at_most(S, c.I) * c.H), b(W.size() / size_t(c.H));
        std::vector<real> dh(h.size(), NAN), dW(W.size(), NAN), db(b.size(), NAN), nats(1), each(size_t(S), NAN);
        std::vector<int64_t> targets;
        for (int64_t s = 0; s < S; s++) targets.push_back(s % int64_t(b.size()));
        Head head = {c.T, c.B, c.H, int64_t(b.size()), c.threads, h.data(), W.data(), c.bias ? b.data() : nullptr,
                     targets.data(), nats.data(), each.data(), dh.data(), dW.data(), db.data()};
        if (elman_head(&head, kind, level) != OK) abort();
        head.dhs = head.dW = head.db = nullptr;
        if (elman_head(&head, kind, level) != OK) abort();
        void *arrays[] = {dh.data(), dW.data(), db.data()};
        int64_t sizes[] = {int64_t(dh.size()), int64_t(dW.size()), int64_t(db.size())};
        nats.push_back(real(elman_clip(arrays, sizes, 3, 1e-3, c.threads, sizeof(real) == 8, level)));
        for (auto *v : {&nats, &each, &dh, &dW, &db}) all.insert(all.end(), v->begin(), v->end());
    }

    /* One step of this layer and another on top of it, and an output layer of M rows. */
    void step(Job job, int kind, int level, std::vector<double> &all) const {
        size_t track = size_t(2 * c.B * c.H);
        std::vector<real> hs(2 * track), cs(2 * track), W_above = normal_like(M * c.H), y(size_t(c.B * M));
        job.T = 1, job.lengths = nullptr, job.gates = nullptr;
        job.hs = hs.data(), job.cs = job.cs ? cs.data() : nullptr;
        Job above = job;
        above.ids = nullptr, above.I = c.H, above.xs = hs.data() + c.B * c.H, above.W_ih = W_above.data();
        above.hs = hs.data() + track, above.cs = job.cs ? cs.data() + track : nullptr;
        Job jobs[] = {job, above};
        if (elman_step(jobs, 2, W_hh.data(), c.bias ? b_ih.data() : nullptr, y.data(), M, kind, level) != OK) abort();
        for (auto *v : {&hs, &y}) all.insert(all.end(), v->begin(), v->end());
        write(jobs, kind, level);
        call(jobs, kind, level, all);
    }
    /* Tokens that the same two layers write, by every kind of rules, ids or rows of E being read. */
    void write(const Job *jobs, int kind, int level) const {
        int64_t V = c.I, exclude[] = {V - 1};
        std::vector<real> W = normal_like(V * c.H), E = normal_like(V * c.I), y(size_t(c.B * V));
        std::vector<double> chances(size_t(3 * c.B), 0.6);
        for (int which = 0; which < 10; which++) {
            Rules rules = {which % 5 ? 0.7 : 0, which % 5 > 2 ? 0.8 : 1, which % 5 % 2 ? V + 1 : (V + 1) / 2, exclude, V > 1};
            std::vector<int64_t> tokens(size_t(6 * c.B), -1);
            const int64_t *last = nullptr;
            for (int64_t *to = tokens.data(); to < tokens.data() + tokens.size(); to += 3 * c.B, last = to - c.B)
                if (elman_write(jobs, 2, W.data(), c.bias ? W.data() : nullptr, y.data(), V, which < 5 ? E.data() : nullptr, &rules, last, 3, chances.data(), to, kind, level) != OK)
                    abort();
            for (int64_t token : tokens)
                if (token < 0 || token > V - 1 - (V > 1)) abort();
        }
        search(jobs, kind, level);
    }
    /* A beam of as many texts as there are rows. */
    void search(const Job *jobs, int kind, int level) const {
        int64_t V = c.I, exclude[] = {V - 1}, n = 3 * c.B;
        std::vector<real> W = normal_like(V * c.H), E = normal_like(V * c.I), y(size_t(c.B * V));
        Rules rules = {1, 1, V, exclude, V > 1};
        for (bool rows_of_E : {false, true}) {
            std::vector<double> sums(size_t(c.B), -INFINITY);
            std::vector<int64_t> rows(size_t(2 * n), -1), tokens(size_t(2 * n), -1);
            sums[0] = 0;
            for (int64_t at : {int64_t(0), n})
                if (elman_search(jobs, 2, W.data(), nullptr, y.data(), V, rows_of_E ? E.data() : nullptr, &rules, at ? rows.data() + at - c.B : nullptr,
                                 at ? tokens.data() + at - c.B : nullptr, 3, sums.data(), rows.data() + at, tokens.data() + at, kind, level) != OK)
                    abort();
            for (int64_t i = 0; i < 2 * n; i++)
                if (rows[size_t(i)] < 0 || rows[size_t(i)] >= c.B || tokens[size_t(i)] < 0 || tokens[size_t(i)] > V - 1 - (V > 1)) abort();
        }
    }
    /* The same two layers, called from given states and from zeros. */
    void call(const Job *jobs, int kind, int level, std::vector<double> &all) const {
        Job layers[] = {jobs[0], jobs[1]};
        for (Job &layer : layers) layer.T = c.T, layer.hs = layer.cs = nullptr, layer.xs = nullptr, layer.ids = nullptr;
        Stack stack = {layers, 2, 1, 1, 1, kind, level};
        bool lstm = c.cell == LSTM;
        size_t states = size_t(2 * c.B * c.H);
        std::vector<real> y(size_t(S * c.H)), h(states), m(lstm ? states : 0), from = normal_like(int64_t(states));
        for (bool zeros : {false, true}) {
            const void *h_0 = zeros ? nullptr : from.data(), *c_0 = lstm ? h_0 : nullptr;
            if (elman_call(&stack, nullptr, ids.data(), h_0, c_0, y.data(), h.data(), lstm ? m.data() : nullptr, nullptr) != OK) abort();
            for (auto *v : {&y, &h, &m}) all.insert(all.end(), v->begin(), v->end());
        }
        stack.copies = 0;
        std::vector<real> track(size_t((c.T + 1) * c.B * c.H));
        if (elman_call(&stack, nullptr, ids.data(), nullptr, nullptr, track.data(), h.data(), lstm ? m.data() : nullptr, nullptr) != OK) abort();
        all.insert(all.end(), track.begin(), track.end());
        /* The first layer in both directions. */
        Job both[] = {layers[0], layers[0]};
        Stack two_ways = {both, 2, 2, 1, 1, kind, level};
        std::vector<real> ys(size_t(2 * S * c.H));
        if (elman_call(&two_ways, nullptr, ids.data(), from.data(), lstm ? from.data() : nullptr, ys.data(), h.data(), lstm ? m.data() : nullptr, nullptr) != OK) abort();
        for (auto *v : {&ys, &h, &m}) all.insert(all.end(), v->begin(), v->end());
        gradient(stack, nullptr, all);
        gradient(two_ways, nullptr, all);
        Use drops = {nullptr, nullptr, nullptr, 7, 1 << 22, 4.0 / 3};
        gradient(stack, &drops, all);
        packed(stack, all);
        packed(two_ways, all);
    }
    /* Rows of every length, the longest first, whose states come the last row first; and dropout. */
    void packed(Stack stack, std::vector<double> &all) const {
        std::vector<int64_t> sizes, order;
        for (int64_t t = 0; t < c.T; t++) sizes.push_back(t ? (sizes.back() + 1) / 2 : c.B);
        for (int64_t b = 0; b < c.B; b++) order.push_back(c.B - 1 - b);
        int64_t N = 0;
        for (int64_t n : sizes) N += n;
        if (elman_packed_rows(sizes.data(), c.T, N, order.data(), order.data(), c.B) != c.B) abort();
        if (elman_packed_rows(sizes.data(), c.T, N + 1, nullptr, nullptr, 0)) abort();
        stack.copies = 1;
        Use use = {sizes.data(), order.data(), order.data(), 7, 1 << 22, 4.0 / 3};
        gradient(stack, &use, all, N);
    }
    /* The same stacks once more, keeping what the backward pass needs, and the backward pass; of N rows, if packed. */
    void gradient(const Stack &stack, const Use *use, std::vector<double> &all, int64_t N = 0) const {
        bool lstm = c.cell == LSTM;
        N = N ? N : S;
        size_t states = size_t(2 * c.B * c.H), outputs = size_t((stack.copies ? N : N + c.B) * stack.directions * c.H);
        std::vector<real> kept(size_t(elman_kept(&stack, N)) / sizeof(real)), y(outputs), h(states), m(lstm ? states : 0);
        std::vector<int64_t> read(ids.begin(), ids.begin() + N);
        void *memories = lstm ? m.data() : nullptr;
        if (elman_call(&stack, use, read.data(), nullptr, nullptr, y.data(), h.data(), memories, kept.data()) != OK) abort();
        for (auto *v : {&y, &h, &m}) all.insert(all.end(), v->begin(), v->end());
        std::vector<real> dy = normal_like(N * stack.directions * c.H), dh = normal_like(int64_t(states)), dW[8];
        void *dw[8];
        for (int i = 0; i < 8; i++) {
            dW[i].resize(size_t(i % 4 > 1 ? M : M * (i % 4 ? c.H : stack.layers[i / 4].I)));
            dw[i] = i % 4 > 1 && !c.bias ? nullptr : dW[i].data();
        }
        const void *track = stack.copies ? nullptr : y.data();
        if (elman_call_back(&stack, use, read.data(), kept.data(), track, dy.data(), dh.data(), nullptr, nullptr, h.data(), memories, dw) != OK)
            abort();
        for (int i = 0; i < 8; i++)
            if (dw[i]) all.insert(all.end(), dW[i].begin(), dW[i].end());
        all.insert(all.end(), h.begin(), h.end());
    }
    std::vector<real> normal_like(int64_t n) const { /* the same numbers for every variant */
        std::vector<real> v;
        for (int64_t i = 0; i < n; i++) v.push_back(W_hh[size_t(i) % W_hh.size()]);
        return v;
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

/* All cases, or every so many: threads that wait for each other take hours under ThreadSanitizer where cores are few. */
int main(int count, char **words) {
    int wrong = 0, cases = 0, met = 0;
    const int every = count > 1 ? atoi(words[1]) : 1;
    const int64_t sizes[][4] = {{1, 1, 1, 1}, {2, 3, 5, 7}, {3, 4, 28, 16}, {4, 17, 3, 33}, {3, 70, 9, 40}, {2, 5, 40, 65}, {2, 1, 2, 363}, {3, 3, 2, 420}, {13, 4, 3, 37}, {12, 1, 20, 19}};
    for (int64_t cell = TANH; cell <= LSTM; cell++)
        for (auto &s : sizes)
            for (int choice = 0; choice < 16; choice++) {
                if (met++ % every) continue;
                Case c = {cell, s[0], s[1], s[2], s[3], 3, bool(choice & 1), bool(choice & 2), bool(choice & 4), bool(choice & 8), choice % 3 == 0};
                wrong += check<double>(c, 1, 1e-13) + check<float>(c, 0, 1e-5);
                if (cell != RELU) wrong += check<float>(c, 2, 0.1); /* at a kink a rounding may choose sides */
                cases++;
            }
    printf("%d cases, %d wrong\n", cases, wrong);
    return wrong != 0;
}
