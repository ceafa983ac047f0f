/* float32 arithmetic that is the same to the last bit on every processor.
 *
 * Only +, -, ×, ÷ and √ of IEEE 754, each rounded by itself (-ffp-contract=off), in an order that is
 * written down here: never a library's exp, never a fused product. A vector has 16 lanes whatever
 * the processor's registers hold, so a sum over lanes adds the same numbers in the same order. */
#pragma once
#include <cfloat>
#include <cstdint>
#include <cstring>

#define INLINE inline __attribute__((always_inline))

static_assert(FLT_EVAL_METHOD == 0, "float32 must be computed in float32");

namespace {

constexpr int LANES = 16;
typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(64), aligned(4), may_alias));

INLINE vec load(const float *p) { return *reinterpret_cast<const vec *>(p); }
INLINE void store(float *p, vec v) { *reinterpret_cast<vec *>(p) = v; }
INLINE vec splat(float x) { return x - vec{}; }

constexpr float LOG2E = 1.44269504f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;

/* e^x = 2^n e^r, |r| ≤ ln 2 / 2, by Taylor's polynomial; x is held within ±80. */
INLINE vec vexp(vec x) {
    x = x > 80.0f ? splat(80.0f) : x;
    x = x < -80.0f ? splat(-80.0f) : x;
    vec near = x * LOG2E;
    near = near + (x < 0.0f ? splat(-0.5f) : splat(0.5f));
    ints n = __builtin_convertvector(near, ints);
    vec whole = __builtin_convertvector(n, vec);
    vec r = x - whole * LN2_HIGH;
    r = r - whole * LN2_LOW;
    vec p = r * (1.0f / 720) + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    ints power = (n + 127) << 23;
    return p * (vec)power;
}
INLINE vec vsigmoid(vec x) { return 1.0f / (1.0f + vexp(-x)); }
INLINE vec vtanh(vec x) { return 1.0f - 2.0f / (1.0f + vexp(x + x)); }

INLINE float sexp(float x) {
    x = x > 80.0f ? 80.0f : x;
    x = x < -80.0f ? -80.0f : x;
    float near = x * LOG2E;
    near = near + (x < 0.0f ? -0.5f : 0.5f);
    int32_t n = int32_t(near);
    float whole = float(n);
    float r = x - whole * LN2_HIGH;
    r = r - whole * LN2_LOW;
    float p = r * (1.0f / 720) + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    int32_t power = (n + 127) << 23;
    float scale;
    memcpy(&scale, &power, 4);
    return p * scale;
}
/* 1 / (1 + e^-x) */
INLINE float squash(float x) { return 1.0f / (1.0f + sexp(-x)); }

/* ln x of a positive, normal x = 2^e m: 2 artanh((m - 1) / (m + 1)) by its series. */
INLINE float slog(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    int32_t e = (bits >> 23) - 127;
    bits = (bits & 0x7fffff) | 0x3f800000;
    float m;
    memcpy(&m, &bits, 4);
    if (m > 1.41421356f) {
        m = m * 0.5f;
        e++;
    }
    float f = (m - 1.0f) / (m + 1.0f);
    float s = f * f;
    float p = s * (1.0f / 9) + (1.0f / 7);
    p = p * s + (1.0f / 5);
    p = p * s + (1.0f / 3);
    p = p * s + 1.0f;
    p = (f + f) * p;
    return p + float(e) * 0.693147182f;
}
/* ln(p / (1 - p)), the inverse of squash */
INLINE float stretch(float p) { return slog(p / (1.0f - p)); }

/* The sum of 16 lanes: halves onto halves. */
INLINE float total(vec v) {
    float a[16], b[8], c[4];
    store(a, v);
    for (int i = 0; i < 8; i++) b[i] = a[i] + a[i + 8];
    for (int i = 0; i < 4; i++) c[i] = b[i] + b[i + 4];
    return (c[0] + c[2]) + (c[1] + c[3]);
}

/* Σ x_i y_i, n a multiple of 16 */
INLINE float dot(const float *x, const float *y, int n) {
    vec sum = load(x) * load(y);
    for (int i = LANES; i < n; i += LANES) sum = sum + load(x + i) * load(y + i);
    return total(sum);
}

/* y_i ← y_i + a x_i */
INLINE void axpy(float a, const float *x, float *y, int n) {
    for (int i = 0; i < n; i += LANES) store(y + i, load(y + i) + load(x + i) * a);
}

} // namespace
