/* Layers that read one another, both directions of each, over a piece of time: one call forward, one back.
 *
 * The bits are those of the layers one by one: each is handed to `Variant::forward` and `backward` as it is. */
#include "dispatch.h"
#include <atomic>
#include <cstring>
#include <initializer_list>

#define PUBLIC extern "C" __attribute__((visibility("default")))

namespace {

/* Memory for one call, or none. */
struct Scratch {
    int64_t bytes;
    char *data;
    explicit Scratch(int64_t n) : bytes(n), data(n ? static_cast<char *>(borrow(n)) : nullptr) {}
    ~Scratch() {
        if (data) give_back(data, bytes);
    }
    Scratch(const Scratch &) = delete;
    bool ok() const { return data || !bytes; }
};

int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* What a call holds of every layer, and where: its states, of an lstm its memories, and for a call that keeps
 * them its gates. Who keeps nothing has two layers at a time, the one that is read and the one that is written. */
struct Places {
    const Stack &stack;
    bool keeps;
    const Job &first = stack.layers[0];
    const int64_t D = stack.directions, layers = stack.count / D, S = first.T * first.B;
    const int64_t real = stack.kind == DOUBLE ? 8 : 4, row = first.H * real, state = first.B * row;
    const bool lstm = first.cell == LSTM, gated = lstm || first.cell == GRU;
    const bool whole = !stack.copies; /* the last layer's states are what the caller asked for */
    const int64_t track = rounded(state + S * row), between = rounded(S * D * row);
    const int64_t gates_size = keeps && gated ? rounded(S * kept_of(first.cell) * row) : 0;
    const int64_t each_size = track * (lstm ? 2 : 1) + gates_size;

    int64_t held() const { return keeps || layers < 2 ? layers : 2; }
    int64_t held_between() const { return D == 1 ? 0 : keeps || layers < 4 ? layers - 1 : 2; }
    int64_t size() const { return held() * D * each_size + held_between() * between - (whole && !alternates() ? track : 0); }
    bool alternates() const { return !keeps && layers > 1; }

    /* The layer's states come last, so that the last layer's may be missing. */
    int64_t start(int64_t i) const { return held_between() * between + (i / D % held() * D + i % D) * each_size; }
    int64_t cs(int64_t i) const { return start(i); }
    int64_t gates(int64_t i) const { return start(i) + (lstm ? track : 0); }
    int64_t hs(int64_t i) const { return gates(i) + gates_size; }
    int64_t ys(int64_t layer) const { return layer % held_between() * between; }
    bool top(int64_t i) const { return i / D == layers - 1; }
    int64_t inputs(int64_t i) const { /* bytes of a row that layer i reads */
        return i < D && stack.reads_ids ? 8 : stack.layers[i].I * real;
    }
    int64_t widest() const { return inputs(0) > inputs(stack.count - 1) ? inputs(0) : inputs(stack.count - 1); }
};

/* Rows of `bytes` for every step, the last step first. */
void reverse(const char *from, int64_t steps, int64_t bytes, char *to) {
    for (int64_t t = 0; t < steps; t++) memcpy(to + t * bytes, from + (steps - 1 - t) * bytes, size_t(bytes));
}

/* Runs the directions of a layer: side by side where there are two threads, each then with one to itself. */
template <class F> int each_direction(const Places &at, F &&body) {
    int64_t threads = at.first.threads;
    if (at.D == 1 || threads != 2 || !worth_two(2 * work_of(&at.first))) {
        for (int64_t d = 0; d < at.D; d++)
            if (int status = body(d, threads)) return status;
        return OK;
    }
    std::atomic<int> failed{OK};
    each(2, 2, [&](int64_t d) {
        if (int status = body(d, int64_t(1))) failed = status;
    });
    return failed;
}

struct Call {
    const Places at;
    const char *x;
    char *memory;    /* as `Places` says */
    char *y;         /* of a call that does not copy: the last layer's states */
    char *backwards; /* inputs read from the end, of a layer in both directions */
    const Variant *v = variant(int(at.stack.kind), int(at.stack.level));

    char *hs(int64_t i) const { return at.top(i) && at.whole ? y : memory + at.hs(i); }

    /* Layer i with its weights and inputs. */
    Job job(int64_t i, int64_t threads) const {
        int64_t layer = i / at.D;
        Job job = at.stack.layers[i];
        const char *in = !layer ? x : at.D > 1 ? memory + at.ys(layer - 1) : hs(i - 1) + at.state;
        if (i % at.D) {
            reverse(in, job.T, job.B * at.inputs(i), backwards);
            in = backwards;
        }
        bool ids = !layer && at.stack.reads_ids;
        job.xs = ids ? nullptr : in, job.ids = ids ? reinterpret_cast<const int64_t *>(in) : nullptr;
        job.hs = hs(i), job.cs = at.lstm ? memory + at.cs(i) : nullptr;
        job.gates = at.gates_size ? memory + at.gates(i) : nullptr;
        job.threads = threads;
        return job;
    }
    /* h_1 … h_T of one direction beside the other's, time running forwards again. */
    void lay_out(int64_t d, const char *hs, char *to) const {
        int64_t T = at.first.T, B = at.first.B;
        for (int64_t t = 0; t < T; t++)
            for (int64_t b = 0; b < B; b++) {
                int64_t s = (d ? T - 1 - t : t) * B + b;
                memcpy(to + (s * at.D + d) * at.row, hs + ((t + 1) * B + b) * at.row, size_t(at.row));
            }
    }
    int forward(int64_t i, int64_t threads, const char *h_0, const char *c_0, char *h, char *c) const {
        Job one = job(i, threads);
        one.h_0 = h_0, one.c_0 = c ? c_0 : nullptr;
        if (int status = v->forward(&one)) return status;
        int64_t last = at.S * at.row;
        memcpy(h, static_cast<char *>(one.hs) + last, size_t(at.state));
        if (c) memcpy(c, static_cast<char *>(one.cs) + last, size_t(at.state));
        if (at.top(i) ? !at.whole : at.D > 1)
            lay_out(i % at.D, static_cast<char *>(one.hs), at.top(i) ? y : memory + at.ys(i / at.D));
        return OK;
    }
};

/* The pulls on a layer's outputs of one direction, as that direction meets them. */
void take_half(const Places &at, int64_t d, const char *dy, char *to) {
    int64_t T = at.first.T, B = at.first.B;
    for (int64_t t = 0; t < T; t++)
        for (int64_t b = 0; b < B; b++) {
            int64_t s = (d ? T - 1 - t : t) * B + b;
            memcpy(to + (t * B + b) * at.row, dy + (s * at.D + d) * at.row, size_t(at.row));
        }
}

/* a += b, whose steps come the last first. */
template <class real> void add_reversed(char *a, const char *b, int64_t steps, int64_t n) {
    for (int64_t t = 0; t < steps; t++) {
        real *to = reinterpret_cast<real *>(a) + t * n;
        const real *from = reinterpret_cast<const real *>(b) + (steps - 1 - t) * n;
        for (int64_t i = 0; i < n; i++) to[i] += from[i];
    }
}

const char *place(const void *states, int64_t i, const Places &at, const char *zeros) {
    return states ? static_cast<const char *>(states) + i * at.state : zeros;
}
char *place(void *states, int64_t i, const Places &at) {
    return states ? static_cast<char *>(states) + i * at.state : nullptr;
}

} // namespace

/* How many bytes `elman_call` wants to keep for `elman_call_back`. */
PUBLIC int64_t elman_kept(const Stack *stack) { return Places{*stack, true}.size(); }

/* y, the outputs of the last layer, and the last h (and c) of every layer and direction, stacked, from x and
 * the first h (and c), stacked (null: zeros). `kept`, if there is to be a gradient, takes what it needs. */
PUBLIC int elman_call(const Stack *stack, const void *x, const void *h_0, const void *c_0, void *y, void *h, void *c,
                      void *kept) {
    Places at{*stack, kept != nullptr};
    Scratch own(kept ? 0 : at.size()), zeros(h_0 ? 0 : at.state), backwards(at.D > 1 ? at.S * at.widest() : 0);
    if (!own.ok() || !zeros.ok() || !backwards.ok()) return NO_MEMORY;
    if (zeros.data) memset(zeros.data, 0, size_t(at.state));
    char *memory = static_cast<char *>(kept ? kept : own.data);
    Call call{at, static_cast<const char *>(x), memory, static_cast<char *>(y), backwards.data};
    for (int64_t layer = 0; layer < at.layers; layer++) {
        int status = each_direction(at, [&](int64_t d, int64_t threads) {
            int64_t i = layer * at.D + d;
            return call.forward(i, threads, place(h_0, i, at, zeros.data), place(c_0, i, at, zeros.data), place(h, i, at),
                                place(c, i, at));
        });
        if (status) return status;
    }
    return OK;
}

/* The pulls on x (null: not wanted), on the first h (and c) and, in `dw`, on W_ih, W_hh, b_ih and b_hh of every
 * layer and direction (null where it has none), from those on y and on the last h and c (null: none). */
PUBLIC int elman_call_back(const Stack *stack, const void *x, const void *kept, const void *y, const void *dy,
                           const void *dh, const void *dc, void *dx, void *dh_0, void *dc_0, void *const *dw) {
    Places at{*stack, true};
    int64_t half = at.D > 1 ? rounded(at.S * at.row) : 0, read = at.S * at.widest();
    Scratch zeros(at.state), backwards(at.D > 1 ? read : 0), halves(at.D * half);
    Scratch below(at.layers > 1 ? 2 * at.between : 0), other(at.D > 1 ? read : 0);
    for (Scratch *s : {&zeros, &backwards, &halves, &below, &other})
        if (!s->ok()) return NO_MEMORY;
    memset(zeros.data, 0, size_t(at.state));
    char *memory = static_cast<char *>(const_cast<void *>(kept)), *track = static_cast<char *>(const_cast<void *>(y));
    Call call{at, static_cast<const char *>(x), memory, track, backwards.data};
    const char *pull = static_cast<const char *>(dy);
    for (int64_t layer = at.layers - 1; layer >= 0; layer--) {
        char *to = layer ? below.data + layer % 2 * at.between : static_cast<char *>(dx);
        int status = each_direction(at, [&](int64_t d, int64_t threads) {
            int64_t i = layer * at.D + d;
            Job job = call.job(i, threads);
            if (job.ids)
                for (int64_t s = 0; s < at.S; s++)
                    if (job.ids[s] < 0 || job.ids[s] >= job.I) return int(BAD_ID);
            char *part = halves.data + d * half;
            if (pull && at.D > 1) take_half(at, d, pull, part);
            job.dhs = pull && at.D > 1 ? part : pull;
            job.dh_T = place(dh, i, at, zeros.data), job.dc_T = at.lstm ? place(dc, i, at, zeros.data) : nullptr;
            job.dh_0 = place(dh_0, i, at), job.dc_0 = at.lstm ? place(dc_0, i, at) : nullptr;
            job.dxs = to && d ? other.data : to;
            job.dW_ih = dw[4 * i], job.dW_hh = dw[4 * i + 1], job.db_ih = dw[4 * i + 2], job.db_hh = dw[4 * i + 3];
            job.fresh = 1;
            return call.v->backward(&job);
        });
        if (status) return status;
        int64_t width = at.first.B * stack->layers[layer * at.D].I;
        if (to && at.D > 1)
            (at.real == 8 ? add_reversed<double> : add_reversed<float>)(to, other.data, at.first.T, width);
        pull = to;
    }
    return OK;
}
