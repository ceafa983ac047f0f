// Instructions that only Hopper GPUs have (sm_90a), each under a plain name: products of warpgroups, which read shared
// memory themselves, and the copy engine.
#pragma once
#include "recurrence.cuh"

// ---- arithmetic: a warpgroup's 64 rows at a time ---------------------------------------------------

// Where an operand lies in shared memory, as wgmma is told: `at` so many bytes further on.
struct Operand {
    u32 low, high;

    // Rows of 128 bytes, 8 rows to 1024 bytes, the 16-byte pieces of row r at piece ^ r % 8.
    static __device__ __forceinline__ Operand swizzled(const void* place) { return Operand(shared_address(place), 16, 1024, 1u << 30); }
    // Blocks of 8 rows by 16 bytes, `along` bytes apart along the sum, 128 from 8 rows to the next.
    static __device__ __forceinline__ Operand in_blocks(const void* place, u32 along) { return Operand(shared_address(place), along, 128, 0); }

    __device__ __forceinline__ u64 at(int bytes) const { return (u64)high << 32 | (low + bytes / 16); }

  private:  // (bits of an address beyond the 18th are the block's place in its cluster)
    __device__ __forceinline__ Operand(u32 address, u32 along, u32 down, u32 kind) : low((address & 0x3ffff) / 16 | along / 16 << 16), high(down / 16 | kind) {
        asm volatile("" : "+r"(low));  // found once: the compiler would find it anew for each product, one slow instruction after the other
    }
};

// Sums are written before sums_begin, and read after sums_wait: the compiler sees no other link between them.
DEVICE void settle(float (&d)[ROWS / 8][4]) {
#pragma unroll
    for (int r = 0; r < ROWS / 8; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(d[r][i])::"memory");
}
DEVICE void sums_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void sums_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
DEVICE void sums_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

#if DTYPE == FP16
#define HALVES "f16.f16"
#else
#define HALVES "bf16.bf16"
#endif
#define FOUR(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define WGMMA(N, SUMS, LEFT, RIGHT, TRANSPOSES) \
    "{.reg .pred p; setp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" N "k16.f32." HALVES " {" SUMS "}, " LEFT ", " RIGHT ", p, 1, 1, " TRANSPOSES ";}"
#if ROWS == 8
#define SUMS4 "%0, %1, %2, %3"
#define FROM_REGISTERS WGMMA("8", SUMS4, "{%4, %5, %6, %7}", "%8", "0")
#define FROM_SHARED WGMMA("8", SUMS4, "%4", "%5", "0, 0")
#define ALL_SUMS FOUR(0)
#elif ROWS == 16
#define SUMS8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FROM_REGISTERS WGMMA("16", SUMS8, "{%8, %9, %10, %11}", "%12", "0")
#define FROM_SHARED WGMMA("16", SUMS8, "%8", "%9", "0, 0")
#define ALL_SUMS FOUR(0), FOUR(1)
#elif ROWS == 32
#define SUMS16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FROM_REGISTERS WGMMA("32", SUMS16, "{%16, %17, %18, %19}", "%20", "0")
#define FROM_SHARED WGMMA("32", SUMS16, "%16", "%17", "0, 0")
#define ALL_SUMS FOUR(0), FOUR(1), FOUR(2), FOUR(3)
#elif ROWS == 64
#define SUMS32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FROM_REGISTERS WGMMA("64", SUMS32, "{%32, %33, %34, %35}", "%36", "0")
#define FROM_SHARED WGMMA("64", SUMS32, "%32", "%33", "0, 0")
#define ALL_SUMS FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)
#endif

// d += a b for 64 rows of W by 32 bytes of the sum, times 32 bytes of the sum by ROWS rows: a from registers, as in
// multiply_add (each warp has 16 of the rows), or from shared memory. d is defined after sums_wait.
DEVICE void multiply_64(float (&d)[ROWS / 8][4], const u32 (&a)[4], u64 b) {
    asm volatile(FROM_REGISTERS : ALL_SUMS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
DEVICE void multiply_64(float (&d)[ROWS / 8][4], u64 a, u64 b) { asm volatile(FROM_SHARED : ALL_SUMS : "l"(a), "l"(b)); }

// ---- the copy engine ------------------------------------------------------------------------------

// What this thread has written to shared memory, before wgmma or the engine reads it; what it has read elsewhere, before
// the engine does.
DEVICE void order_before_engines() { asm volatile("fence.proxy.async;" ::: "memory"); }
// The first of these alone: nobody waits until what the thread has stored in device memory is there.
DEVICE void order_shared_before_engines() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void mailbox_open(u32 mailbox, u32 arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mailbox), "r"(arrivals) : "memory"); }
DEVICE void mailbox_arrive(u32 mailbox) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mailbox) : "memory"); }
// The same at another block's, by its cluster address. (Released to the cluster, it would wait for all that was stored in
// device memory; what was read is read.)
DEVICE void mailbox_arrive_at(u32 mailbox) { asm volatile("mbarrier.arrive.release.cta.shared::cluster.b64 _, [%0];" ::"r"(mailbox) : "memory"); }

// As mailbox_full and mailbox_wait, for what arrives from this block's own threads and from the copy engine.
DEVICE bool mailbox_full_here(u32 mailbox, u32 parity) {
    u32 full;
    asm volatile("{.reg .pred p;\n"
                 "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;}" : "=r"(full) : "r"(mailbox), "r"(parity) : "memory");
    return full;
}
DEVICE void mailbox_wait_here(u32 mailbox, u32 parity) {
    if (mailbox_full_here(mailbox, parity)) return;
    const long long start = clock64();
    while (!mailbox_full_here(mailbox, parity)) lose_patience(start);
}

// Starts copying the map's box at (column, row, step) to shared memory and reports its bytes; zeros beyond the array.
DEVICE void start_box(u32 to, const TensorMap* map, int column, int row, int step, u32 mailbox) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to), "l"(map), "r"(column),
                 "r"(row), "r"(step), "r"(mailbox) : "memory");
}

// The same in both blocks of a cluster of two.
DEVICE void start_box_for_both(u32 to, const TensorMap* map, int column, int row, int step, u32 mailbox) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(column),
                 "r"(row), "r"(step), "r"(mailbox), "h"((unsigned short)3) : "memory");
}

// Copies a block of this shared memory to another's and reports its bytes there.
DEVICE void send_block(u32 to, u32 from, u32 bytes, u32 mailbox) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "r"(from), "r"(bytes), "r"(mailbox) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until what this thread has sent is read.
DEVICE void blocks_sent() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// ---- warps with tasks of their own ----------------------------------------------------------------

// `threads` threads, whole warps, wait for each other at barrier `number`: whether any of them says so.
DEVICE bool any_of(int number, int threads, bool one) {
    u32 any;
    asm volatile("{.reg .pred p, q;\n"
                 "setp.ne.u32 p, %1, 0;\n"
                 "barrier.cta.red.or.pred.aligned q, %2, %3, p;\n"
                 "selp.u32 %0, 1, 0, q;}" : "=r"(any) : "r"((u32)one), "r"(number), "r"(threads) : "memory");
    return any;
}

// From here on a thread of this warpgroup has N registers, where each had BEFORE at the launch.
template <int N, int BEFORE>
DEVICE void have_registers() {
    if constexpr (N > BEFORE) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
    if constexpr (N < BEFORE) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
