/* What Python calls: the variant for this processor. All of them compute the same bits. */
#include "api.h"

#define PUBLIC extern "C" __attribute__((visibility("default")))

extern const Variant elman_portable;
#if defined(__x86_64__)
extern const Variant elman_avx2, elman_avx512;
#endif

namespace {

enum Level : int { PORTABLE, AVX2, AVX512 };

int processor() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return AVX512;
    if (__builtin_cpu_supports("avx2")) return AVX2;
#endif
    return PORTABLE;
}

const Variant &variant(int level) {
    if (level > processor()) level = processor();
#if defined(__x86_64__)
    if (level >= AVX512) return elman_avx512;
    if (level == AVX2) return elman_avx2;
#endif
    return elman_portable;
}

} // namespace

/* What Python checks when it loads this: the sources it was built from (setup.py). */
#ifndef ELMAN_SOURCES
#define ELMAN_SOURCES "unknown"
#endif
PUBLIC const char *elman_sources() { return ELMAN_SOURCES; }
PUBLIC const char *elman_compressor_variant(int level) { return variant(level).name; }
PUBLIC void *elman_compressor_make(const Options *options, const float *weights, int level) {
    return variant(level).make(options, weights);
}
PUBLIC void elman_compressor_free(void *handle, int level) { variant(level).free(handle); }
PUBLIC void elman_compressor_prime(void *handle, int level, const uint8_t *in, int64_t n) {
    variant(level).prime(handle, in, n);
}
PUBLIC void elman_compressor_predict(void *handle, int level, const uint8_t *in, int64_t n, uint32_t *odds) {
    variant(level).predict(handle, in, n, odds);
}
PUBLIC int64_t elman_compressor_encode(void *handle, int level, const uint8_t *in, int64_t n, uint8_t *out,
                                       int64_t room, int last) {
    return variant(level).encode(handle, in, n, out, room, last);
}
PUBLIC int64_t elman_compressor_decode(void *handle, int level, const uint8_t *in, int64_t n, int64_t *used,
                                       uint8_t *out, int64_t room, int last) {
    return variant(level).decode(handle, in, n, used, out, room, last);
}
