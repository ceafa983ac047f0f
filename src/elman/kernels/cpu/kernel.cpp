/* What Python calls: the variant for this processor, on torch's own threads. Whole stacks are in stack.cpp. */
#include "dispatch.h"
#include "subnormals.h"
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#define PUBLIC extern "C" __attribute__((visibility("default")))

extern const Variant portable_float, portable_double;
#if defined(__x86_64__)
extern const Variant avx512_float, avx512_double, avx512_half, avx2_float, avx2_double;
#endif

namespace {

enum Level : int { PORTABLE, AVX2, AVX512, AVX512_BF16 };

/* What the processor can, and no more than torch's own switch allows. */
int found() {
    const char *most = getenv("ATEN_CPU_CAPABILITY");
    if (most && !strcmp(most, "default")) return PORTABLE;
#if defined(__x86_64__)
    bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool wide = fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (most && !strcmp(most, "avx2")) wide = false;
    if (wide) return __builtin_cpu_supports("avx512bf16") ? AVX512_BF16 : AVX512;
    if (fma) return AVX2;
#endif
    return PORTABLE;
}

int processor() {
    static const int level = found();
    return level;
}

} // namespace

const Variant *variant(int kind, int level) {
    if (level > processor()) level = processor();
#if defined(__x86_64__)
    if (kind == HALF) return level == AVX512_BF16 ? &avx512_half : nullptr;
    if (level >= AVX512) return kind == DOUBLE ? &avx512_double : &avx512_float;
    if (level == AVX2) return kind == DOUBLE ? &avx2_double : &avx2_float;
#endif
    return kind == HALF ? nullptr : kind == DOUBLE ? &portable_double : &portable_float;
}

namespace {

/* A few blocks of memory between calls, the newest. Whoever finds it in use does without. */
struct Pool {
    static constexpr int BLOCKS = 32;
    static constexpr int64_t LEAST = 1 << 12, MOST = 64 << 20; /* bytes worth keeping, and kept in all */
    struct Block {
        void *memory;
        int64_t bytes;
        uint64_t since;
    } blocks[BLOCKS];
    int64_t kept;
    uint64_t puts;
    std::atomic_flag busy;

    void *take(int64_t bytes) {
        if (busy.test_and_set(std::memory_order_acquire)) return nullptr;
        void *found = nullptr;
        for (Block &b : blocks)
            if (b.memory && b.bytes == bytes) {
                found = b.memory;
                kept -= bytes;
                b.memory = nullptr;
                break;
            }
        busy.clear(std::memory_order_release);
        return found;
    }
    /* Keeps the memory in place of the oldest blocks, or frees it. */
    void put(void *memory, int64_t bytes) {
        if (bytes < LEAST || bytes > MOST * 3 / 4 || busy.test_and_set(std::memory_order_acquire)) return free(memory);
        Block *place = make_room(bytes);
        *place = {memory, bytes, puts++};
        kept += bytes;
        busy.clear(std::memory_order_release);
    }

  private:
    Block *make_room(int64_t bytes) {
        for (;;) {
            Block *empty = nullptr, *oldest = nullptr;
            for (Block &b : blocks)
                if (!b.memory)
                    empty = &b;
                else if (!oldest || b.since < oldest->since)
                    oldest = &b;
            if (empty && kept + bytes <= MOST) return empty;
            free(oldest->memory);
            kept -= oldest->bytes;
            oldest->memory = nullptr;
        }
    }
};

Pool pool;

} // namespace

void *borrow(int64_t bytes) {
#ifndef __SANITIZE_ADDRESS__ /* which is to see every block's own edges */
    if (void *found = bytes >= Pool::LEAST ? pool.take(bytes) : nullptr) return found;
#endif
    void *fresh = nullptr;
    return posix_memalign(&fresh, 64, size_t(bytes)) == 0 ? fresh : nullptr;
}

void give_back(void *memory, int64_t bytes) {
#ifndef __SANITIZE_ADDRESS__
    return pool.put(memory, bytes);
#endif
    free(memory);
}

/* The states and gates of a training step are torch's, given back after every step. glibc returns large
 * blocks to the system, and fresh pages made up to a fifth of a step, until the program has freed one
 * as large: so one is freed here, untouched. Who sets glibc's thresholds (MALLOC_…) keeps them. */
__attribute__((constructor)) static void free_a_large_block() {
    void *volatile block = malloc((32 << 20) - (64 << 10)); /* volatile: or the compiler sees no use for it */
    free(block);
}

/* What Python checks when it loads this: the sources it was built from (setup.py), and the sizes of its structs. */
#ifndef ELMAN_SOURCES
#define ELMAN_SOURCES "unknown"
#endif
PUBLIC const char *elman_sources() { return ELMAN_SOURCES; }

PUBLIC int64_t elman_size(int which) {
    const int64_t sizes[] = {sizeof(Job), sizeof(Head), sizeof(Stack), sizeof(Travel), sizeof(Use), sizeof(Seen), sizeof(Twice),
                             sizeof(Rules)};
    return which >= 0 && which < 8 ? sizes[which] : -1;
}

PUBLIC int elman_forward(const Job *job, int kind, int level) {
    NoSubnormals here;
    return variant(kind, level)->forward(job);
}

/* The forward pass has refused ids out of range, but whoever calls may have changed them since. */
PUBLIC int elman_backward(const Job *job, int kind, int level) {
    NoSubnormals here;
    for (int64_t s = 0; job->ids && s < job->T * job->B; s++)
        if (job->ids[s] < 0 || job->ids[s] >= names_of(job)) return BAD_ID;
    return variant(kind, level)->backward(job);
}

PUBLIC int elman_head(const Head *head, int kind, int level) {
    NoSubnormals here;
    return variant(kind, level)->head(head);
}

PUBLIC int elman_travel(const Travel *job, int kind, int level) {
    NoSubnormals here;
    return variant(kind, level)->travel(job);
}

PUBLIC int elman_along(const Twice *job, int kind, int level) {
    NoSubnormals here;
    return variant(kind, level)->along(job);
}

PUBLIC int elman_back_twice(const Twice *job, int kind, int level) {
    NoSubnormals here;
    return variant(kind, level)->back_twice(job);
}

/* g ← min(1, θ/‖g‖) g over `count` arrays together; returns ‖g‖ as it was, or -1 without memory. */
PUBLIC double elman_clip(void *const *arrays, const int64_t *sizes, int64_t count, double theta, int64_t threads, int kind,
                         int level) {
    NoSubnormals here;
    const Variant *v = variant(kind, level);
    constexpr int64_t PIECE = 1 << 14; /* numbers summed together, on any number of threads */
    int64_t pieces = 0, all = 0, width = kind == DOUBLE ? 8 : 4;
    for (int64_t i = 0; i < count; i++) pieces += (sizes[i] + PIECE - 1) / PIECE, all += sizes[i];
    double *squares = static_cast<double *>(borrow((pieces + 1) * int64_t(sizeof(double))));
    if (!squares) return -1;
    auto visit = [&](auto &&body) { /* the pieces, each as its number, where it starts and how long it is */
        each(all < 4 * PIECE ? 1 : threads, pieces, [&](int64_t p) {
            int64_t i = 0, first = p;
            for (int64_t n; first >= (n = (sizes[i] + PIECE - 1) / PIECE); i++) first -= n;
            int64_t left = sizes[i] - first * PIECE;
            body(p, static_cast<char *>(arrays[i]) + first * PIECE * width, left < PIECE ? left : PIECE);
        });
    };
    visit([&](int64_t p, void *x, int64_t n) { squares[p] = v->sum_of_squares(x, n); });
    double total = 0;
    for (int64_t p = 0; p < pieces; p++) total += squares[p];
    give_back(squares, (pieces + 1) * int64_t(sizeof(double)));
    double norm = std::sqrt(total);
    if (norm > theta) visit([&](int64_t, void *x, int64_t n) { v->scale(x, n, theta / norm); });
    return norm;
}

namespace {

/* One step of the lowest layer, of those that read it, and of the output layer: y = h Wᵀ + b. */
int step(const Job *lowest, const Job *others, int64_t count, const void *W, const void *b, void *y, int64_t V, int kind, int level) {
    const Variant *v = variant(kind, level);
    const Job *last = lowest;
    int status = v->forward(lowest);
    for (int64_t i = 0; i < count && !status; i++) status = v->forward(last = &others[i]);
    if (status) return status;
    const char *h_1 = static_cast<const char *>(last->hs) + last->B * last->H * (kind == DOUBLE ? 8 : 4);
    v->linear(h_1, W, b, y, last->B, last->H, V, last->threads);
    return OK;
}

} // namespace

/* One step of layers that read one another, then the output layer of V rows: y = h Wᵀ + b (float or double). */
PUBLIC int elman_step(const Job *layers, int64_t count, const void *W, const void *b, void *y, int64_t V, int kind, int level) {
    NoSubnormals here;
    return step(layers, layers + 1, count - 1, W, b, y, V, kind, level);
}

namespace {

/* Reads tokens with such a step: the first layer reads ids, or rows of E, of which there are V. */
struct Reader {
    const Job *layers;
    int64_t count;
    const void *W, *b;
    void *y;
    int64_t V;
    const void *E;
    int kind, level;
    Job lowest = layers[0];
    int64_t B = lowest.B, width = kind == DOUBLE ? 8 : 4, row = lowest.I * width;
    char *xs = E ? static_cast<char *>(borrow(B * row)) : nullptr;

    ~Reader() {
        if (xs) give_back(xs, B * row);
    }
    bool ok() const { return xs || !E; }
    int operator()(const int64_t *tokens) {
        for (int64_t s = 0; xs && s < B; s++) memcpy(xs + s * row, static_cast<const char *>(E) + tokens[s] * row, size_t(row));
        lowest.xs = xs, lowest.ids = xs ? nullptr : tokens;
        return step(&lowest, layers + 1, count - 1, W, b, y, V, kind, level);
    }
    /* Go on from these of the states of all layers. */
    int take(const int64_t *rows) const {
        for (int64_t i = 0; i < count; i++)
            for (void *track : {layers[i].hs, layers[i].cs}) {
                int64_t bytes = layers[i].H * width;
                if (!track) continue;
                char *before = static_cast<char *>(borrow(B * bytes)), *now = static_cast<char *>(track) + B * bytes;
                if (!before) return NO_MEMORY;
                memcpy(before, now, size_t(B * bytes));
                for (int64_t s = 0; s < B; s++) memcpy(now + s * bytes, before + rows[s] * bytes, size_t(bytes));
                give_back(before, B * bytes);
            }
        return OK;
    }
};

} // namespace

/* `length` tokens (length, B), one after the other: each is drawn from the scores y (B, V) by a row of `chances` (length, B), then
 * read, which leaves the next scores in y; not the last ones, which the next call reads first, as its `last` (null: none). */
PUBLIC int elman_write(const Job *layers, int64_t count, const void *W, const void *b, void *y, int64_t V, const void *E,
                       const Rules *rules, const int64_t *last, int64_t length, const double *chances, int64_t *tokens, int kind,
                       int level) {
    NoSubnormals here;
    Reader read{layers, count, W, b, y, V, E, kind, level};
    if (!read.ok()) return NO_MEMORY;
    auto draw = variant(DOUBLE, level)->draw;
    int status = OK;
    for (int64_t t = 0; t < length && !status; t++, last = tokens, tokens += read.B) {
        if (last) status = read(last);
        const double *chance = chances ? chances + t * read.B : nullptr;
        if (!status) status = draw(rules, y, kind == DOUBLE, read.B, V, chance, tokens, read.lowest.threads);
    }
    return status;
}

/* The same for a beam of B texts: which text of the step before each new one continues, and with what; `sums` (B) of log p. */
PUBLIC int elman_search(const Job *layers, int64_t count, const void *W, const void *b, void *y, int64_t V, const void *E,
                        const Rules *rules, const int64_t *last_rows, const int64_t *last, int64_t length, double *sums, int64_t *rows,
                        int64_t *tokens, int kind, int level) {
    NoSubnormals here;
    Reader read{layers, count, W, b, y, V, E, kind, level};
    if (!read.ok()) return NO_MEMORY;
    auto widen = variant(DOUBLE, level)->widen;
    int status = OK;
    for (int64_t t = 0; t < length && !status; t++, last_rows = rows, last = tokens, rows += read.B, tokens += read.B) {
        if (last) status = read.take(last_rows);
        if (last && !status) status = read(last);
        if (!status) status = widen(rules, y, kind == DOUBLE, read.B, V, sums, rows, tokens, read.lowest.threads);
    }
    return status;
}

/* A mask of `value` with probability p, else 0, from the state of a torch.Generator, which moves on. */
PUBLIC void elman_keep(void *generator, void *mask, int64_t n, double p, double value, int kind, int level) {
    variant(kind, level)->keep(generator, mask, n, p, value);
}

/* `from` times a mask of `scale`, or of 0 with probability `below` · 2⁻²⁴, from a torch.Generator of this seed. */
PUBLIC void elman_drop(int64_t seed, const void *from, void *to, int64_t n, int64_t below, double scale, int kind, int level) {
    NoSubnormals here;
    variant(kind, level)->drop(uint32_t(seed), from, to, 1, n, nullptr, 0, uint32_t(below), scale);
}

PUBLIC void elman_tanh(const void *x, void *y, int64_t n, int kind, int level) { variant(kind, level)->tanh(x, y, n); }
PUBLIC void elman_sigmoid(const void *x, void *y, int64_t n, int kind, int level) { variant(kind, level)->sigmoid(x, y, n); }

/* Whether torch's threads were lately kept waiting by other programs. */
PUBLIC int elman_is_busy() { return is_busy(); }

/* The name of the variant that runs, or null where this processor has none of that kind. */
PUBLIC const char *elman_variant(int kind, int level) {
    const Variant *v = variant(kind, level);
    return v ? v->name : nullptr;
}
