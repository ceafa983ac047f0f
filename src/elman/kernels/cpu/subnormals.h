/* Numbers that are too small to be normal count as zero on this thread, in what is read and in what is written, for as
 * long as one of these lives.
 *
 * A gradient that vanishes passes through them on its way back (float: from 1.2e-38 down to 1.4e-45), and where it is
 * only ever multiplied by a gate of more than a half it stays there, since the least of them times 0.6 is rounded to itself.
 * An operation on one takes a hundred times as long. */
#pragma once
#include <cstdint>

struct NoSubnormals {
#if defined(__x86_64__)
    static constexpr uint32_t ZERO = 1 << 15 | 1 << 6; /* written, read */
    const uint32_t before = __builtin_ia32_stmxcsr();
    NoSubnormals() { __builtin_ia32_ldmxcsr(before | ZERO); }
    ~NoSubnormals() { __builtin_ia32_ldmxcsr(before); }
#elif defined(__aarch64__)
    static constexpr uint64_t ZERO = 1 << 24;
    uint64_t before;
    NoSubnormals() {
        asm volatile("mrs %0, fpcr" : "=r"(before));
        asm volatile("msr fpcr, %0" ::"r"(before | ZERO));
    }
    ~NoSubnormals() { asm volatile("msr fpcr, %0" ::"r"(before)); }
#else
    NoSubnormals() {}
    ~NoSubnormals() {}
#endif
    NoSubnormals(const NoSubnormals &) = delete;
};
