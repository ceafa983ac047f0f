/* Vectors of `real`, and the two squashing functions on them.
 *
 * A variant defines REAL (float or double), VECTOR_BYTES and REGISTERS before including this. The
 * compiler's vector extension does the rest, so the same lines become AVX-512, AVX2, NEON or SSE2. */
#pragma once
#include <cstdint>
#include <cstring>
#if VECTOR_BYTES == 64
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define FLATTEN _Pragma("GCC unroll 16")

namespace {

using real = REAL;
constexpr int LANES = VECTOR_BYTES / sizeof(real);
constexpr bool DOUBLE = sizeof(real) == 8;

template <bool> struct Bits { using type = uint32_t; };
template <> struct Bits<true> { using type = uint64_t; };
using word = Bits<DOUBLE>::type;

typedef real vec __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(real)), may_alias));
typedef word bits __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(real)), may_alias));

INLINE vec splat(real x) { return x - vec{}; }

/* Keeps a vector in its register, where a compiler would read it anew for everything that it meets. */
template <class V> INLINE void hold(V &v) {
#if defined(__x86_64__)
    asm("" : "+v"(v));
#else
    (void)v;
#endif
}

INLINE vec load(const real *p) { return *reinterpret_cast<const vec *>(p); }
INLINE void store(real *p, vec v) { *reinterpret_cast<vec *>(p) = v; }

/* Past all caches, to the start of a line, where the processor can; before others read it, `end_streams`. */
#if VECTOR_BYTES == 64
INLINE void stream(real *p, vec v) { _mm512_stream_si512(reinterpret_cast<__m512i *>(p), (__m512i)v); }
INLINE void end_streams() { _mm_sfence(); }
#else
INLINE void stream(real *p, vec v) { store(p, v); }
INLINE void end_streams() {}
#endif

#if VECTOR_BYTES == 64
INLINE vec load_some(const real *p, int64_t n) {
    if constexpr (DOUBLE) return (vec)_mm512_maskz_loadu_pd(__mmask8((1u << n) - 1), p);
    return (vec)_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p);
}
INLINE void store_some(real *p, vec v, int64_t n) {
    if constexpr (DOUBLE) return _mm512_mask_storeu_pd(p, __mmask8((1u << n) - 1), (__m512d)v);
    _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), (__m512)v);
}
#else
__attribute__((noinline)) vec load_some(const real *p, int64_t n) {
    real lanes[LANES];
    for (int64_t i = 0; i < LANES; i++) lanes[i] = i < n ? p[i] : real(0);
    return load(lanes);
}
__attribute__((noinline)) void store_some(real *p, vec v, int64_t n) {
    for (int64_t i = 0; i < n; i++) p[i] = v[i];
}
#endif

/* The first n lanes (n ≥ LANES: all of them); the others are 0. */
INLINE vec load(const real *p, int64_t n) { return __builtin_expect(n < LANES, 0) ? load_some(p, n) : load(p); }
INLINE void store(real *p, vec v, int64_t n) {
    if (__builtin_expect(n < LANES, 0)) return store_some(p, v, n);
    store(p, v);
}

template <int N> struct Lanes {
    typedef real type __attribute__((vector_size(N * sizeof(real))));
};

/* The sum of N lanes: halves are added until two numbers are left. */
template <int N> INLINE real sum_lanes(typename Lanes<N>::type v) {
    if constexpr (N == 2) {
        return v[0] + v[1];
    } else {
        typename Lanes<N / 2>::type half[2];
        memcpy(half, &v, sizeof v);
        return sum_lanes<N / 2>(half[0] + half[1]);
    }
}
INLINE real sum(vec v) { return sum_lanes<LANES>(v); }

/* The largest of N lanes, in the same way. */
template <int N> INLINE real largest_of(typename Lanes<N>::type v) {
    if constexpr (N == 2) {
        return v[1] > v[0] ? v[1] : v[0];
    } else {
        typename Lanes<N / 2>::type half[2];
        memcpy(half, &v, sizeof v);
        return largest_of<N / 2>(half[1] > half[0] ? half[1] : half[0]);
    }
}
INLINE real largest(vec v) { return largest_of<LANES>(v); }

INLINE vec magnitude(vec x) { return (vec)((bits)x & ~(bits)splat(real(-0.0))); }
INLINE vec with_sign_of(vec x, vec sign) { return (vec)((bits)x | ((bits)sign & (bits)splat(real(-0.0)))); }

/* x = n ln 2 + r with |r| ≤ ln 2 / 2; returns e^r - 1 and 2ⁿ. Holds while 2ⁿ is a normal number.
 *
 * The Taylor series of e^r - 1 to degree 7 (float) or 13 (double) leaves less than half an ulp.
 * Adding 1.5·2^p rounds to an integer and leaves it in the low bits: no conversion, so a NaN
 * passes through arithmetic only and stays a NaN. */
INLINE vec expm1_reduced(vec x, vec &power) {
    constexpr int mantissa = DOUBLE ? 52 : 23;
    constexpr word bias = DOUBLE ? 1023 : 127;
    constexpr real magic = real(3) * real(word(1) << (mantissa - 1));
    constexpr real log2e = real(1.4426950408889634074);
    constexpr real ln2_high = DOUBLE ? real(0x1.62e42fefa38p-1) : real(0x1.62e4p-1);
    constexpr real ln2_low = DOUBLE ? real(0x1.ef35793c7673p-45) : real(0x1.7f7d1cf79abcap-20);
    vec shifted = x * log2e + magic, n = shifted - magic;
    power = (vec)(((bits)shifted + bias) << mantissa);
    vec r = (x - n * ln2_high) - n * ln2_low;
    constexpr double c[] = {1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,
                            1.0 / 720,    1.0 / 5040,    1.0 / 40320,    1.0 / 362880,
                            1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
    constexpr int degree = DOUBLE ? 12 : 6;
    vec p = splat(real(c[degree - 1]));
    FLATTEN for (int k = degree - 2; k >= 0; k--) p = p * r + real(c[k]);
    return r + r * r * p;
}

/* tanh x = E / (E + 2), E = e^{2|x|} - 1, under the sign of x. */
INLINE vec vtanh(vec x) {
    const vec flat = splat(DOUBLE ? real(20) : real(10)), a = magnitude(x); /* tanh rounds to 1 */
    vec power, e = expm1_reduced(real(2) * (a > flat ? flat : a), power);
    e = power * e + (power - real(1));
    return with_sign_of(e / (e + real(2)), x);
}

/* e^{-a} for a ≥ 0; 0 where it is below the normal numbers. */
INLINE vec exp_minus(vec a) {
    const vec tiny = splat(DOUBLE ? real(708.3964185) : real(87.33654));
    vec power, p = expm1_reduced(-(a > tiny ? tiny : a), power);
    return a > tiny ? vec{} : power * p + power;
}

/* σ(x) = (1 or E) / (1 + E), E = e^{-|x|}. */
INLINE vec vsigmoid(vec x) {
    vec e = exp_minus(magnitude(x));
    return (x < 0 ? e : splat(1)) / (e + real(1));
}

} // namespace
