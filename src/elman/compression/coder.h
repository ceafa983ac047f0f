/* Arithmetic coding: the numbers of an interval share their leading bytes with its two ends.
 *
 * [low, high] is cut in proportion to the odds (24 bits) for every bit; bytes on which both ends agree are
 * done with. 64 bits leave more than 2^32 numbers to cut almost always; where both ends straddle a byte
 * for long the cut gets coarser, never wrong. */
#pragma once
#include <cstdint>

namespace {

struct Coder {
    uint64_t low = 0, high = ~uint64_t(0), code = 0;

    uint64_t cut(uint32_t odds) const { return low + ((high - low) >> 24) * odds; }

    /* Narrow to what the bit says; the bytes that are certain now leave at the front. */
    template <class Emit> void narrow(int bit, uint32_t odds, Emit emit) {
        uint64_t middle = cut(odds);
        if (bit) high = middle;
        else low = middle + 1;
        while (((low ^ high) >> 56) == 0) {
            emit(uint8_t(high >> 56));
            low <<= 8;
            high = high << 8 | 255;
        }
    }
};

} // namespace
