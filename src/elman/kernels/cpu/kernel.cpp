/* What Python calls: the variant for this processor, on torch's own threads. */
#include "job.h"
#include <atomic>
#include <dlfcn.h>
#include <pthread.h>

#define PUBLIC extern "C" __attribute__((visibility("default")))

extern const Variant portable_float, portable_double;
#if defined(__x86_64__)
extern const Variant avx512_float, avx512_double, avx512_half, avx2_float, avx2_double;
#endif

namespace {

enum Kind : int { FLOAT, DOUBLE, HALF };
enum Level : int { PORTABLE, AVX2, AVX512, AVX512_BF16 };

int processor() {
#if defined(__x86_64__)
    bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool wide = fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (wide) return __builtin_cpu_supports("avx512bf16") ? AVX512_BF16 : AVX512;
    if (fma) return AVX2;
#endif
    return PORTABLE;
}

const Variant *variant(int kind, int level) {
    if (level > processor()) level = processor();
#if defined(__x86_64__)
    if (kind == HALF) return level == AVX512_BF16 ? &avx512_half : nullptr;
    if (level >= AVX512) return kind == DOUBLE ? &avx512_double : &avx512_float;
    if (level == AVX2) return kind == DOUBLE ? &avx2_double : &avx2_float;
#endif
    return kind == HALF ? nullptr : kind == DOUBLE ? &portable_double : &portable_float;
}

struct Work {
    void (*task)(void *, int64_t);
    void *data;
    int64_t tasks;
    std::atomic<int64_t> next{0};
};

void take(void *p) {
    Work &work = *static_cast<Work *>(p);
    for (int64_t i; (i = work.next.fetch_add(1)) < work.tasks;) work.task(work.data, i);
}

void *take_thread(void *p) {
    take(p);
    return nullptr;
}

/* The entry point compilers emit calls to for `#pragma omp parallel`: OpenMP's stable interface. */
using Team = void (*)(void (*)(void *), void *, unsigned, unsigned);

} // namespace

/* Torch's idle OpenMP workers spin, waiting for more: joining their team costs microseconds, where
 * threads of our own would have to fight them for the processor. Without OpenMP: fresh threads. */
void parallel(int64_t threads, int64_t tasks, void (*task)(void *, int64_t), void *data) {
    Work work{task, data, tasks};
    if (threads > tasks) threads = tasks;
    if (threads <= 1) return take(&work);
    static const Team team = reinterpret_cast<Team>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    if (team) return team(take, &work, unsigned(threads), 0);
    constexpr int64_t MOST = 256;
    pthread_t others[MOST];
    int64_t started = 0;
    while (started < threads - 1 && started < MOST && !pthread_create(&others[started], nullptr, take_thread, &work))
        started++;
    take(&work);
    for (int64_t i = 0; i < started; i++) pthread_join(others[i], nullptr);
}

PUBLIC int elman_forward(const Job *job, int kind, int level) { return variant(kind, level)->forward(job); }
PUBLIC int elman_backward(const Job *job, int kind, int level) { return variant(kind, level)->backward(job); }
PUBLIC int elman_head_forward(const Head *head, int kind, int level) { return variant(kind, level)->head_forward(head); }
PUBLIC int elman_head_backward(const Head *head, int kind, int level) { return variant(kind, level)->head_backward(head); }

/* y (rows, N) = x (rows, K) Wᵀ + b for a few rows, in float or double. */
PUBLIC void elman_linear(const void *x, const void *W, const void *b, void *y, int64_t rows, int64_t K, int64_t N,
                         int kind, int level) {
    variant(kind, level)->linear(x, W, b, y, rows, K, N);
}

PUBLIC void elman_tanh(const void *x, void *y, int64_t n, int kind, int level) { variant(kind, level)->tanh(x, y, n); }
PUBLIC void elman_sigmoid(const void *x, void *y, int64_t n, int kind, int level) { variant(kind, level)->sigmoid(x, y, n); }

/* The name of the variant that runs, or null where this processor has none of that kind. */
PUBLIC const char *elman_variant(int kind, int level) {
    const Variant *v = variant(kind, level);
    return v ? v->name : nullptr;
}
