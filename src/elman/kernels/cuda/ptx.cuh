// The few machine instructions the kernels are made of, each under a plain name.
//
// Nothing is included, so NVRTC needs no header files. An element is stored as fp16, bf16 or
// (TF32, FP32) fp32. Matrix tiles are counted in bytes: a tile is 16 rows (weights) or 8 rows (batch) by
// 32 bytes, which is 16 columns of fp16/bf16 or 8 of fp32, and the fragments of `mma` lie in the
// same places for all three.
#pragma once

#define FP16 0
#define BF16 1
#define TF32 2
#define FP32 3

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE static __device__ __forceinline__

constexpr int BYTES = DTYPE >= TF32 ? 4 : 2;  // of one stored element

// ---- elements -----------------------------------------------------------------------------------

// N consecutive stored elements, as the words they travel in.
template <int N>
struct Packed {
    static constexpr int WORDS = N * BYTES / 4;
    u32 word[WORDS];
};

DEVICE u32 pack2(float low, float high) {
    u32 word;
    if constexpr (DTYPE == FP16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

DEVICE float low_half(u32 word) {
    if constexpr (DTYPE == BF16) return __uint_as_float(word << 16);
    float x;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(x) : "r"(word));
    return x;
}

DEVICE float high_half(u32 word) {
    if constexpr (DTYPE == BF16) return __uint_as_float(word & 0xffff0000u);
    float x;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(x) : "r"(word));
    return x;
}

template <int N>
DEVICE Packed<N> pack(const float (&x)[N]) {
    Packed<N> p;
#pragma unroll
    for (int i = 0; i < Packed<N>::WORDS; i++) {
        if constexpr (BYTES == 4) p.word[i] = __float_as_uint(x[i]);
        else p.word[i] = pack2(x[2 * i], x[2 * i + 1]);
    }
    return p;
}

template <int N>
DEVICE void unpack(const Packed<N>& p, float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < Packed<N>::WORDS; i++) {
        if constexpr (BYTES == 4) x[i] = __uint_as_float(p.word[i]);
        else x[2 * i] = low_half(p.word[i]), x[2 * i + 1] = high_half(p.word[i]);
    }
}

// What multiply_add reads: TF32 rounded (not cut) to its 11 bits, all else as it is.
DEVICE u32 operand(u32 word) {
    if constexpr (DTYPE != TF32) return word;
    u32 rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(word)));
    return rounded;
}

// ---- memory -------------------------------------------------------------------------------------

template <int WORDS>
DEVICE void load_words(u32 (&w)[WORDS], const void* address) {
    static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "4, 8 or 16 bytes");
    if constexpr (WORDS == 1) w[0] = *(const u32*)address;
    if constexpr (WORDS == 2) { uint2 v = *(const uint2*)address; w[0] = v.x, w[1] = v.y; }
    if constexpr (WORDS == 4) { uint4 v = *(const uint4*)address; w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w; }
}

template <int WORDS>
DEVICE void store_words(void* address, const u32 (&w)[WORDS]) {
    if constexpr (WORDS == 1) *(u32*)address = w[0];
    if constexpr (WORDS == 2) *(uint2*)address = make_uint2(w[0], w[1]);
    if constexpr (WORDS == 4) *(uint4*)address = make_uint4(w[0], w[1], w[2], w[3]);
}

// Arrays in global memory have SIZE columns (of each head), the true hidden size; the kernel works on HIDDEN,
// rounded up. Where SIZE is not a multiple of N, elements go one by one.
template <int N>
constexpr bool WHOLE = SIZE % N == 0;

DEVICE u32 load_half(const void* base, i64 element) { return ((const unsigned short*)base)[element]; }

// N stored elements, of which the first `real` exist and the rest are zero.
template <int N>
DEVICE Packed<N> load(const void* base, i64 element, int real) {
    Packed<N> p = {};
    if (WHOLE<N> && real > 0) load_words(p.word, (const char*)base + element * BYTES);
    if (!WHOLE<N>) {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i < real) {
                if constexpr (BYTES == 4) p.word[i] = ((const u32*)base)[element + i];
                else p.word[i / 2] |= load_half(base, element + i) << (16 * (i % 2));
            }
    }
    return p;
}

template <int N>
DEVICE void store(void* base, i64 element, const Packed<N>& p, int real) {
    if (WHOLE<N> && real > 0) store_words((char*)base + element * BYTES, p.word);
    if (!WHOLE<N>) {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i < real) {
                if constexpr (BYTES == 4) ((u32*)base)[element + i] = p.word[i];
                else ((unsigned short*)base)[element + i] = p.word[i / 2] >> (16 * (i % 2));
            }
    }
}

template <int N>
DEVICE void load_floats(float (&x)[N], const float* base, i64 element, int real) {
    u32 w[N] = {};
    if (WHOLE<N> && real > 0) load_words(w, base + element);
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = WHOLE<N> ? __uint_as_float(w[i]) : i < real ? base[element + i] : 0.0f;
}

template <int N>
DEVICE void store_floats(float* base, i64 element, const float (&x)[N], int real) {
    u32 w[N];
#pragma unroll
    for (int i = 0; i < N; i++) w[i] = __float_as_uint(x[i]);
    if (WHOLE<N> && real > 0) store_words(base + element, w);
#pragma unroll
    for (int i = 0; i < N; i++)
        if (!WHOLE<N> && i < real) base[element + i] = x[i];
}

DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// Starts a copy of BYTES_ bytes from global to shared memory, or of zeros; `copied` waits for all but the
// last N batches that the thread has marked off.
template <int BYTES_>
DEVICE void start_copy(void* to, const void* from, bool real) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES_), "r"(real ? BYTES_ : 0) : "memory");
}
// The same for 16 bytes that another SM has written: past L1, which might hold an older value.
DEVICE void start_copy_past_l1(void* to, const void* from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(real ? 16 : 0) : "memory");
}
DEVICE void mark_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void copied() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// ---- arithmetic ---------------------------------------------------------------------------------

// Four 8-row by 16-byte blocks of shared memory, spread over the warp as `mma` wants its B operand.
DEVICE void load_fragments(u32 (&b)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address) : "memory");
}

#define MMA(SHAPE_AND_TYPES)                                                              \
    asm("mma.sync.aligned." SHAPE_AND_TYPES                                               \
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"       \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

DEVICE void multiply_add_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { MMA("m16n8k8.row.col.f32.tf32.tf32.f32"); }

// x = high + low, 11 bits each (Veltkamp's splitting): all but the last of x's 24.
DEVICE void split(u32 word, u32& high, u32& low) {
    const float x = __uint_as_float(word), far = __fmul_rn(x, 8193.0f), near = __fsub_rn(far, __fsub_rn(far, x));
    high = __float_as_uint(near), low = __float_as_uint(__fsub_rn(x, near)) & 0xffffe000u;
}

// d += a b for one tile: (16 units) x (32 bytes of the sum) times (32 bytes of the sum) x (8 rows). FP32 is
// three products in TF32, (high + low) (high + low) without low low.
DEVICE void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (DTYPE == FP16) MMA("m16n8k16.row.col.f32.f16.f16.f32");
    if constexpr (DTYPE == BF16) MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
    if constexpr (DTYPE == TF32) multiply_add_tf32(d, a, b0, b1);
    if constexpr (DTYPE == FP32) {
        u32 high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 word = a[i];
            asm volatile("" : "+r"(word));  // split anew each step: both halves of all weights would fit no registers
            split(word, high[i], low[i]);
        }
        u32 high0, high1, low0, low1;
        split(b0, high0, low0), split(b1, high1, low1);
        multiply_add_tf32(d, low, high0, high1);
        multiply_add_tf32(d, high, low0, low1);
        multiply_add_tf32(d, high, high0, high1);
    }
}
#undef MMA

DEVICE float exponential(float x) { return DTYPE == FP32 ? expf(x) : __expf(x); }

// 1 / (1 + e^x), at both infinities too. What the plain functions do for the sake of subnormal numbers, which make no
// difference to 1 + e^x, and to a reciprocal none beyond 1e-38, would be half of the instructions.
DEVICE float one_over_one_plus_exp(float x) {
    if constexpr (DTYPE == FP32) return __fdividef(1.0f, 1.0f + expf(x));
    float power, y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.44269504f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + power));
    return y;
}

DEVICE float sigmoid(float x) { return one_over_one_plus_exp(-x); }

// 1 - 2 / (1 + e^2x): right to an absolute 1e-7, and at both infinities.
DEVICE float hyperbolic_tangent(float x) { return DTYPE == FP32 ? tanhf(x) : 1.0f - 2.0f * one_over_one_plus_exp(2.0f * x); }

// ---- several SMs: a cluster of blocks that can write into each other's shared memory -------------

DEVICE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address of the same shared variable in block `rank` of the cluster.
DEVICE u32 in_block(u32 address, u32 rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

DEVICE void mailbox_open(u32 mailbox) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(mailbox) : "memory");
}

DEVICE void mailboxes_visible() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// The next phase ends when `bytes` have been delivered.
DEVICE void mailbox_expect(u32 mailbox, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mailbox), "r"(bytes) : "memory");
}

DEVICE bool mailbox_full(u32 mailbox, u32 parity) {
    u32 full;
    asm volatile("{.reg .pred p;\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;}" : "=r"(full) : "r"(mailbox), "r"(parity) : "memory");
    return full;
}

// A delivery that never comes ends the kernel with an error after PATIENCE cycles, not in a hang.
DEVICE void mailbox_wait(u32 mailbox, u32 parity) {
    if (mailbox_full(mailbox, parity)) return;
    long long start = clock64();
    while (!mailbox_full(mailbox, parity))
        if (clock64() - start > PATIENCE) asm volatile("trap;");
}

// Writes words into another block's shared memory and reports the bytes to its mailbox.
template <int WORDS>
DEVICE void deliver(u32 address, const u32 (&w)[WORDS], u32 mailbox) {
#define ST_ASYNC "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
    if constexpr (WORDS == 1)
        asm volatile(ST_ASYNC ".b32 [%0], %1, [%2];" ::"r"(address), "r"(w[0]), "r"(mailbox) : "memory");
    if constexpr (WORDS == 2)
        asm volatile(ST_ASYNC ".v2.b32 [%0], {%1, %2}, [%3];" ::"r"(address), "r"(w[0]), "r"(w[1]), "r"(mailbox) : "memory");
    if constexpr (WORDS == 4)
        asm volatile(ST_ASYNC ".v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(mailbox) : "memory");
#undef ST_ASYNC
}

// ---- blocks anywhere on the GPU: a word of device memory is EMPTY until its writer has stored it --------------

constexpr u32 EMPTY = 0xffffffffu;  // a NaN, but none that arithmetic makes

// A word as it may be stored where EMPTY means something: a NaN that came from outside becomes another.
DEVICE u32 not_empty(u32 word) { return word == EMPTY ? 0x7fffffffu : word; }

template <int WORDS>
DEVICE bool any_empty(const u32 (&w)[WORDS]) {
    bool any = false;
#pragma unroll
    for (int i = 0; i < WORDS; i++) any |= w[i] == EMPTY;
    return any;
}

// Words that another SM may be writing, or will read: from L2 and to L2. Two are there both or neither.
template <int WORDS>
DEVICE void load_words_past_l1(u32 (&w)[WORDS], const void* address) {
    if constexpr (WORDS == 1) asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(w[0]) : "l"(address) : "memory");
    if constexpr (WORDS == 2) {
        u64 both;
        asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(both) : "l"(address) : "memory");
        w[0] = (u32)both, w[1] = (u32)(both >> 32);
    }
    if constexpr (WORDS == 4)
        asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(address) : "memory");
}
template <int WORDS>
DEVICE void store_words_past_l1(void* address, const u32 (&w)[WORDS]) {
    if constexpr (WORDS == 2) asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(address), "l"((u64)w[1] << 32 | w[0]) : "memory");
    if constexpr (WORDS == 4)
        asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}

DEVICE void rest(int cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {}
}

// A word that is never stored ends the kernel with an error after PATIENCE cycles, not in a hang.
DEVICE void lose_patience(long long start) {
    if (clock64() - start > PATIENCE) asm volatile("trap;");
}
