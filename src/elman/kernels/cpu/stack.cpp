/* Layers that read one another, both directions of each, over a piece of time: one call forward, one back.
 *
 * Between layers there is dropout, where it is asked for; rows may be packed, as torch packs them. The bits are those of
 * the layers one by one: each is handed to `Variant::forward` and `backward` as it is. */
#include "dispatch.h"
#include "subnormals.h"
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
 * them its gates. Who keeps nothing has two layers at a time, the one that is read and the one that is written, and of
 * memories the last alone. */
struct Places {
    const Stack &stack;
    bool keeps;
    int64_t S; /* rows of time and batch */
    const Job &first = stack.layers[0];
    const int64_t D = stack.directions, layers = stack.count / D;
    const int64_t real = stack.kind == DOUBLE ? 8 : 4, row = first.H * real, state = first.B * row;
    const bool lstm = first.cell == LSTM, gated = lstm || first.cell == GRU;
    const bool whole = !stack.copies; /* the last layer's states are what the caller asked for */
    const int64_t track = rounded(state + S * row), between = rounded(S * D * row);
    const int64_t gates_size = keeps && gated ? rounded(S * kept_of(first.cell) * row) : 0;
    const int64_t cs_size = !lstm ? 0 : keeps ? track : rounded(state), each_size = cs_size + gates_size + track;

    int64_t held() const { return keeps || layers < 2 ? layers : 2; }
    int64_t held_between() const { return D == 1 ? 0 : keeps || layers < 4 ? layers - 1 : 2; }
    int64_t size() const { return held() * D * each_size + held_between() * between - (whole && !alternates() ? track : 0); }
    bool alternates() const { return !keeps && layers > 1; }

    /* The layer's states come last, so that the last layer's may be missing. */
    int64_t start(int64_t i) const { return held_between() * between + (i / D % held() * D + i % D) * each_size; }
    int64_t cs(int64_t i) const { return start(i); }
    int64_t gates(int64_t i) const { return start(i) + cs_size; }
    int64_t hs(int64_t i) const { return gates(i) + gates_size; }
    int64_t ys(int64_t layer) const { return layer % held_between() * between; }
    bool top(int64_t i) const { return i / D == layers - 1; }
    int64_t inputs(int64_t i) const { /* bytes of a row that layer i reads */
        return i < D && stack.reads_ids ? 8 : stack.layers[i].I * real;
    }
    int64_t widest() const { return inputs(0) > inputs(stack.count - 1) ? inputs(0) : inputs(stack.count - 1); }

    /* Zeros between what ends and the next whole line: what is kept then has no byte that nobody wrote. */
    void fill(char *memory) const {
        auto gap = [&](int64_t start, int64_t bytes) { memset(memory + start + bytes, 0, size_t(rounded(bytes) - bytes)); };
        for (int64_t layer = 0; layer < held_between(); layer++) gap(ys(layer), S * D * row);
        for (int64_t i = 0; i < stack.count; i++) {
            if (cs_size) gap(cs(i), state + S * row);
            if (gates_size) gap(gates(i), S * kept_of(first.cell) * row);
            if (!top(i) || !whole) gap(hs(i), state + S * row);
        }
    }
};

/* The rows of a call: the same at every step or, packed, ever fewer of them. */
struct Rows {
    const int64_t T, B;
    const bool packed; /* not of one length all, which is the same as not packed */
    Scratch memory;
    int64_t *const sizes = packed ? reinterpret_cast<int64_t *>(memory.data) + 1 : nullptr; /* as in `Job`, */
    int64_t *const starts = packed ? sizes + T : nullptr, *const lengths = packed ? starts + T + 1 : nullptr;

    Rows(const Job &first, const Use *use)
        : T(first.T), B(first.B), packed(use && use->sizes && use->sizes[T - 1] < B),
          memory(packed ? (1 + T + T + 1 + B) * int64_t(sizeof(int64_t)) : 0) {
        if (!memory.data) return;
        int64_t b = B;
        sizes[-1] = B, starts[0] = 0;
        for (int64_t t = 0; t < T; t++) {
            sizes[t] = use->sizes[t], starts[t + 1] = starts[t] + sizes[t];
            while (b > sizes[t]) lengths[--b] = t;
        }
        while (b > 0) lengths[--b] = T;
    }
    int64_t at(int64_t t) const { return packed ? sizes[t] : B; }
    int64_t start(int64_t t) const { return packed ? starts[t] : t * B; }
    int64_t length(int64_t b) const { return packed ? lengths[b] : T; }
    /* Which row a direction meets as its t-th of row b. */
    int64_t met(int64_t d, int64_t t, int64_t b) const { return start(d ? length(b) - 1 - t : t) + b; }

    /* Every row's last step first. */
    void reverse(const char *from, int64_t bytes, char *to) const {
        for (int64_t t = 0; t < T; t++) {
            if (!packed) memcpy(to + t * B * bytes, from + (T - 1 - t) * B * bytes, size_t(B * bytes));
            for (int64_t b = 0; packed && b < sizes[t]; b++)
                memcpy(to + (starts[t] + b) * bytes, from + met(1, t, b) * bytes, size_t(bytes));
        }
    }
};

/* The caller's states in the order of a pack's rows, and back: in room of our own, where there is such an order. */
struct Order {
    const Places &at;
    const int64_t *const order, *const back;
    const int64_t all = at.stack.count * at.state;
    Scratch room;

    Order(const Places &at, const Use *use)
        : at(at), order(use ? use->order : nullptr), back(use ? use->back : nullptr), room(order ? 4 * all : 0) {}
    void pick(const int64_t *index, const char *from, char *to) const {
        for (int64_t i = 0; i < at.stack.count; i++, from += at.state)
            for (int64_t b = 0; b < at.first.B; b++, to += at.row) memcpy(to, from + index[b] * at.row, size_t(at.row));
    }
    /* What is read, */
    const void *in(const void *states, int64_t place) const {
        if (!order || !states) return states;
        pick(order, static_cast<const char *>(states), room.data + place * all);
        return room.data + place * all;
    }
    /* where to write, and to whom that is then handed. */
    void *out(void *states, int64_t place) const { return order && states ? room.data + place * all : states; }
    void hand(void *states, int64_t place) const {
        if (order && states) pick(back, room.data + place * all, static_cast<char *>(states));
    }
};

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
    const Places &at;
    const Rows &rows;
    const Use *use;
    const char *x;
    char *memory;    /* as `Places` says */
    char *y;         /* of a call that does not copy: the last layer's states */
    char *backwards; /* inputs read from the end, of a layer in both directions */
    char *dropped;   /* what a layer reads of the one below, null: all of it */
    const Variant *v = variant(int(at.stack.kind), int(at.stack.level));

    char *hs(int64_t i) const { return at.top(i) && at.whole ? y : memory + at.hs(i); }

    /* What the layer wrote, both directions side by side. */
    const char *outputs(int64_t layer) const { return at.D > 1 ? memory + at.ys(layer) : hs(layer) + at.state; }

    /* Masks between `layer` and the next: `Dropout` of recurrence/strand.py says how they are drawn. */
    void drop(int64_t layer, const char *from, char *to) const {
        constexpr int64_t GRAIN = 16;
        int64_t T = rows.T, width = at.D * at.first.H, step = rows.B * width, grains = (T + GRAIN - 1) / GRAIN;
        each(worth_two(32 * T * step) ? at.first.threads : 1, grains, [&](int64_t grain) {
            int64_t start = grain * GRAIN, steps = T - start < GRAIN ? T - start : GRAIN;
            uint32_t seed = uint32_t(use->seed) + uint32_t(layer) * 0x9E3779B1u + uint32_t(grain) * 0x85EBCA6Bu;
            int64_t first = rows.start(start) * width * at.real;
            v->drop(seed, from + first, to + first, steps, step, rows.packed ? rows.sizes + start : nullptr, width,
                    uint32_t(use->below), use->scale);
        });
    }
    /* Before the jobs of a layer. */
    void begin(int64_t layer) const {
        if (dropped && layer) drop(layer - 1, outputs(layer - 1), dropped);
    }
    /* Layer i with its weights and inputs. */
    Job job(int64_t i, int64_t threads) const {
        int64_t layer = i / at.D;
        Job job = at.stack.layers[i];
        const char *in = !layer ? x : dropped ? dropped : outputs(layer - 1);
        if (i % at.D) {
            rows.reverse(in, at.inputs(i), backwards);
            in = backwards;
        }
        bool ids = !layer && at.stack.reads_ids;
        job.xs = ids ? nullptr : in, job.ids = ids ? reinterpret_cast<const int64_t *>(in) : nullptr;
        job.hs = hs(i), job.cs = at.lstm ? memory + at.cs(i) : nullptr;
        job.gates = at.gates_size ? memory + at.gates(i) : nullptr, job.c_in_place = at.lstm && !at.keeps;
        job.sizes = rows.sizes, job.starts = rows.starts, job.threads = threads;
        return job;
    }
    /* h_1 … h_T of one direction beside the other's, time running forwards again. */
    void lay_out(int64_t d, const char *hs, char *to) const {
        if (at.D == 1) return void(memcpy(to, hs + at.state, size_t(at.S * at.row)));
        const char *from = hs + at.state;
        for (int64_t t = 0; t < rows.T; t++)
            for (int64_t b = 0; b < rows.at(t); b++, from += at.row)
                memcpy(to + (rows.met(d, t, b) * at.D + d) * at.row, from, size_t(at.row));
    }
    /* Every row's last state. */
    void end(const void *states, char *to) const {
        const char *from = static_cast<const char *>(states);
        if (!rows.packed) memcpy(to, from + at.S * at.row, size_t(at.state));
        for (int64_t b = 0; rows.packed && b < rows.B; b++)
            memcpy(to + b * at.row, from + (rows.B + rows.met(0, rows.lengths[b] - 1, b)) * at.row, size_t(at.row));
    }
    int forward(int64_t i, int64_t threads, const char *h_0, const char *c_0, char *h, char *c) const {
        Job one = job(i, threads);
        one.h_0 = h_0, one.c_0 = c ? c_0 : nullptr;
        if (int status = v->forward(&one)) return status;
        end(one.hs, h);
        if (c && at.keeps) end(one.cs, c);
        if (c && !at.keeps) memcpy(c, one.cs, size_t(at.state));
        if (at.top(i) ? !at.whole : at.D > 1)
            lay_out(i % at.D, static_cast<char *>(one.hs), at.top(i) ? y : memory + at.ys(i / at.D));
        return OK;
    }
};

/* The pulls on a layer's outputs of one direction, as that direction meets them. */
void take_half(const Places &at, const Rows &rows, int64_t d, const char *dy, char *to) {
    for (int64_t t = 0; t < rows.T; t++)
        for (int64_t b = 0; b < rows.at(t); b++, to += at.row)
            memcpy(to, dy + (rows.met(d, t, b) * at.D + d) * at.row, size_t(at.row));
}

/* a += b, rows of n numbers, every row's last step first in b. */
template <class real> void add_reversed(const Rows &rows, char *a, const char *b, int64_t n) {
    real *to = reinterpret_cast<real *>(a);
    for (int64_t t = 0; t < rows.T; t++)
        for (int64_t row = 0; row < rows.at(t); row++, to += n) {
            const real *from = reinterpret_cast<const real *>(b) + rows.met(1, t, row) * n;
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

/* How many bytes `elman_call` wants to keep for `elman_call_back`, of S rows of time and batch. */
PUBLIC int64_t elman_kept(const Stack *stack, int64_t S) { return Places{*stack, true, S}.size(); }

/* Where in there, in numbers, it keeps the memories, the gates and the states of every layer and direction. */
PUBLIC void elman_places(const Stack *stack, int64_t S, int64_t *places) {
    Places at{*stack, true, S};
    for (int64_t i = 0; i < stack->count; i++, places += 3)
        places[0] = at.cs(i) / at.real, places[1] = at.gates(i) / at.real, places[2] = at.hs(i) / at.real;
}

/* How many rows there are in a pack of N inputs, `sizes` of them at each of T steps, in an `order` of `count` rows
 * (null: as they come) that `back` undoes; 0 where this is no pack. */
PUBLIC int64_t elman_packed_rows(const int64_t *sizes, int64_t T, int64_t N, const int64_t *order, const int64_t *back,
                                 int64_t count) {
    int64_t B = T ? sizes[0] : 0, sum = 0;
    for (int64_t t = 0; t < T; sum += sizes[t++])
        if (sizes[t] < 1 || sizes[t] > N - sum || (t && sizes[t] > sizes[t - 1])) return 0;
    if (sum != N || (order && count != B)) return 0;
    for (int64_t b = 0; order && b < B; b++)
        if (order[b] < 0 || order[b] >= B || back[order[b]] != b) return 0;
    return B;
}

/* y, the outputs of the last layer, and the last h (and c) of every layer and direction, stacked, from x and
 * the first h (and c), stacked (null: zeros). `kept`, if there is to be a gradient, takes what it needs. */
PUBLIC int elman_call(const Stack *stack, const Use *use, const void *x, const void *h_0, const void *c_0, void *y, void *h,
                      void *c, void *kept) {
    NoSubnormals here;
    Rows rows(stack->layers[0], use);
    if (!rows.memory.ok()) return NO_MEMORY;
    Places at{*stack, kept != nullptr, rows.start(rows.T)};
    Order order(at, use);
    bool drops = use && use->below && at.layers > 1;
    Scratch own(kept ? 0 : at.size()), zeros(h_0 ? 0 : at.state), backwards(at.D > 1 ? at.S * at.widest() : 0);
    Scratch dropped(drops ? at.between : 0);
    for (Scratch *s : {&order.room, &own, &zeros, &backwards, &dropped})
        if (!s->ok()) return NO_MEMORY;
    if (zeros.data) memset(zeros.data, 0, size_t(at.state));
    char *memory = static_cast<char *>(kept ? kept : own.data);
    if (kept) at.fill(memory);
    Call call{at, rows, use, static_cast<const char *>(x), memory, static_cast<char *>(y), backwards.data, dropped.data};
    const void *first_h = order.in(h_0, 0), *first_c = order.in(c_0, 1);
    void *last_h = order.out(h, 2), *last_c = order.out(c, 3);
    for (int64_t layer = 0; layer < at.layers; layer++) {
        call.begin(layer);
        int status = each_direction(at, [&](int64_t d, int64_t threads) {
            int64_t i = layer * at.D + d;
            return call.forward(i, threads, place(first_h, i, at, zeros.data), place(first_c, i, at, zeros.data),
                                place(last_h, i, at), place(last_c, i, at));
        });
        if (status) return status;
    }
    order.hand(h, 2), order.hand(c, 3);
    return OK;
}

/* The pulls on x (null: not wanted), on the first h (and c; null: not wanted) and, in `dw`, on W_ih, W_hh, b_ih and b_hh of every
 * layer and direction (null where it has none, or all: not wanted), from those on y and on the last h and c (null: none). */
PUBLIC int elman_call_back(const Stack *stack, const Use *use, const void *x, const void *kept, const void *y, const void *dy,
                           const void *dh, const void *dc, void *dx, void *dh_0, void *dc_0, void *const *dw) {
    NoSubnormals here;
    Rows rows(stack->layers[0], use);
    if (!rows.memory.ok()) return NO_MEMORY;
    Places at{*stack, true, rows.start(rows.T)};
    Order order(at, use);
    bool drops = use && use->below && at.layers > 1;
    int64_t half = at.D > 1 ? rounded(at.S * at.row) : 0, read = at.S * at.widest();
    Scratch zeros(at.state), backwards(at.D > 1 ? read : 0), halves(at.D * half);
    Scratch below(at.layers > 1 ? 2 * at.between : 0), other(at.D > 1 ? read : 0), dropped(drops ? at.between : 0);
    for (Scratch *s : {&order.room, &zeros, &backwards, &halves, &below, &other, &dropped})
        if (!s->ok()) return NO_MEMORY;
    memset(zeros.data, 0, size_t(at.state));
    const char *pull = static_cast<const char *>(dy);
    char *memory = static_cast<char *>(const_cast<void *>(kept)), *track = static_cast<char *>(const_cast<void *>(y));
    Call call{at, rows, use, static_cast<const char *>(x), memory, track, backwards.data, dropped.data};
    const void *last_h = order.in(dh, 0), *last_c = order.in(dc, 1);
    void *first_h = order.out(dh_0, 2), *first_c = order.out(dc_0, 3);
    for (int64_t layer = at.layers - 1; layer >= 0; layer--) {
        char *to = layer ? below.data + layer % 2 * at.between : static_cast<char *>(dx);
        call.begin(layer);
        int status = each_direction(at, [&](int64_t d, int64_t threads) {
            int64_t i = layer * at.D + d;
            Job job = call.job(i, threads);
            if (job.ids)
                for (int64_t s = 0; s < at.S; s++)
                    if (job.ids[s] < 0 || job.ids[s] >= job.I) return int(BAD_ID);
            char *part = halves.data + d * half;
            if (pull && at.D > 1) take_half(at, rows, d, pull, part);
            job.dhs = pull && at.D > 1 ? part : pull;
            job.dh_T = place(last_h, i, at, zeros.data), job.dc_T = at.lstm ? place(last_c, i, at, zeros.data) : nullptr;
            job.dh_0 = place(first_h, i, at), job.dc_0 = at.lstm ? place(first_c, i, at) : nullptr;
            job.dxs = to && d ? other.data : to;
            job.dW_ih = dw[4 * i], job.dW_hh = dw[4 * i + 1], job.db_ih = dw[4 * i + 2], job.db_hh = dw[4 * i + 3];
            job.fresh = 1;
            return call.v->backward(&job);
        });
        if (status) return status;
        if (to && at.D > 1)
            (at.real == 8 ? add_reversed<double> : add_reversed<float>)(rows, to, other.data, stack->layers[layer * at.D].I);
        if (drops && layer) call.drop(layer - 1, to, to);
        pull = to;
    }
    order.hand(dh_0, 2), order.hand(dc_0, 3);
    return OK;
}
