/* Counting, made incremental: what followed each context so far, bit by bit.
 *
 * A byte is eight binary decisions, the node of its tree being the bits known so far. For each context
 * (the last k bytes, the word being written, …) a hashed table has a slot for each node: a probability
 * that follows what was seen there at a rate 1/n, another that follows quickly, and a short history
 * (n_0, n_1, the last two bits), which a second, small table turns into what such histories led to. */
#pragma once
#include "numbers.h"
#include <cstdlib>

namespace {

struct Slot {
    uint16_t check, p, q;
    uint8_t history, n;
};

/* p ← p + rate (bit - p), in 16 bits; after n sightings at rate 1 / (n + 1.5) */
INLINE uint16_t toward(uint16_t p, int bit, int32_t rate) {
    int64_t difference = int64_t(bit ? 65535 : 0) - p;
    return uint16_t(p + ((difference * rate) >> 16));
}
INLINE int32_t slower(int n) { return 131072 / (2 * n + 3); }
constexpr int32_t QUICK = 6000; /* about an eleventh */
constexpr int SLOWEST = 255, LIMIT = 250;

/* history: n_0 (3 bits), n_1 (3 bits), last two bits */
INLINE uint8_t after(uint8_t history, int bit) {
    int n[2] = {history >> 5, (history >> 2) & 7};
    int last = ((history << 1) | bit) & 3;
    if (n[bit] < 7) n[bit]++;
    if (n[1 - bit] > 2) n[1 - bit] = n[1 - bit] / 2 + 1;
    return uint8_t(n[0] << 5 | n[1] << 2 | last);
}

/* A probability for each of many small contexts, learnt at rate 1/n. */
struct Learned {
    uint16_t p, n;
    void see(int bit) {
        p = toward(p, bit, slower(n));
        if (n < SLOWEST) n++;
    }
};

INLINE uint32_t hashed(uint32_t a, uint32_t b) {
    uint32_t h = a * 0x9E3779B1u ^ (b + 0x7F4A7C15u) * 0x85EBCA6Bu;
    h ^= h >> 15;
    h *= 0x2C1B3C6Du;
    return h ^ h >> 13;
}

/* One context's table. */
struct Counts {
    Slot *slots;
    uint32_t mask; /* of groups of 16 slots */
    Learned histories[256];
    uint32_t base, other, check;
    Slot *slot;

    void begin() {
        for (int h = 0; h < 256; h++) {
            int n0 = h >> 5, n1 = (h >> 2) & 7;
            histories[h] = {uint16_t((10 * n1 + 4) * 65535 / (10 * (n0 + n1) + 8)), 0};
        }
    }
    /* The 15 nodes of a nibble lie side by side. */
    void choose(uint32_t context) {
        base = (context & mask) << 4;
        other = base ^ 16;
        check = context >> 16;
        __builtin_prefetch(slots + base);
    }
    void find(uint32_t node) {
        uint16_t mark = uint16_t((check + node * 0x3D4Du) | 1);
        Slot *a = slots + base + node, *b = slots + other + node;
        if (a->check == mark) slot = a;
        else if (b->check == mark) slot = b;
        else {
            slot = a->n <= b->n ? a : b;
            *slot = {mark, 32768, 32768, 0, 0};
        }
    }
    void see(int bit) {
        histories[slot->history].see(bit);
        slot->p = toward(slot->p, bit, slower(slot->n));
        slot->q = toward(slot->q, bit, QUICK);
        slot->history = after(slot->history, bit);
        if (slot->n < LIMIT) slot->n++;
    }
};

} // namespace
