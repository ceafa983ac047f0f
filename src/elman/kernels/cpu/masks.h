/* Masks of dropout from torch's generator of a CPU, the Mersenne Twister (Matsumoto and Nishimura, 1998): `keep` with
 * the bits of `tensor.bernoulli_(p)`, two words to a number, u = their low 53 bits · 2⁻⁵³, kept where u < p; `drop` with
 * those of `torch.rand(…) >= p` in float32, a word to a number, u = its low 24 bits · 2⁻²⁴. */
#pragma once
#include "vector.h"
#include <cmath>

namespace {

/* The first part of `torch.Generator.get_state()`. */
struct Twister {
    static constexpr int WORDS = 624, APART = 397;
    uint64_t seed;
    int32_t left, seeded; /* words of `state` that are not drawn yet, and one */
    uint64_t next;
    uint64_t state[WORDS];
};

INLINE uint32_t twist(uint32_t word, uint32_t after, uint32_t far) {
    uint32_t y = (word & 0x80000000u) | (after & 0x7fffffffu);
    return far ^ (y >> 1) ^ (-(after & 1u) & 0x9908b0dfu);
}
/* Loops over words that do not depend on one another, for the compiler to take many at a time. */
void renew(uint32_t *word) {
    constexpr int N = Twister::WORDS, M = Twister::APART, FIRST = N - M;
    for (int i = 0; i < FIRST; i++) word[i] = twist(word[i], word[i + 1], word[i + M]);
    for (int from = FIRST; from < N - 1; from += FIRST)
        for (int i = from; i < from + FIRST && i < N - 1; i++) word[i] = twist(word[i], word[i + 1], word[i - FIRST]);
    word[N - 1] = twist(word[N - 1], word[0], word[M - 1]);
}
void temper(const uint32_t *word, int64_t n, uint32_t *out) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t y = word[i];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        out[i] = y ^ (y >> 18);
    }
}

/* What torch.Generator.manual_seed(seed) leaves, all of it drawn. */
void begin(uint32_t seed, uint32_t *word) {
    word[0] = seed;
    for (uint32_t i = 1; i < Twister::WORDS; i++) word[i] = 1812433253u * (word[i - 1] ^ (word[i - 1] >> 30)) + i;
}

/* to = from · scale, or · 0 where the number drawn for it is below `below` · 2⁻²⁴, by a generator of this seed. Numbers are
 * drawn for every `step` of a step, though only `rows` of `row` numbers of it may be there (null: all). */
void drop(uint32_t seed, const void *from, void *to, int64_t steps, int64_t step, const int64_t *rows, int64_t row,
          uint32_t below, double scale) {
    const real *in = static_cast<const real *>(from);
    real *out = static_cast<real *>(to), kept = real(scale);
    uint32_t word[Twister::WORDS], drawn[Twister::WORDS];
    begin(seed, word);
    for (int64_t t = 0, end = 0; t < steps; t++)
        for (int64_t i = t * step, stop = i + (rows ? rows[t] * row : step); i < stop;) {
            if (i >= end) {
                for (; i >= end; end += Twister::WORDS) renew(word);
                temper(word, Twister::WORDS, drawn);
            }
            const uint32_t *numbers = drawn + i - (end - Twister::WORDS);
            int64_t n = (stop < end ? stop : end) - i;
            for (int64_t j = 0; j < n; j++) out[j] = in[j] * ((numbers[j] & 0xffffffu) < below ? real(0) : kept);
            i += n, in += n, out += n;
        }
}

/* `value` with probability p, else 0; `generator` moves on. */
void keep(void *generator, void *to, int64_t n, double p, double value) {
    Twister &from = *static_cast<Twister *>(generator);
    real *out = static_cast<real *>(to), kept = real(value);
    constexpr int64_t AT_ONCE = 512;
    uint32_t word[Twister::WORDS], drawn[2 * AT_ONCE];
    for (int i = 0; i < Twister::WORDS; i++) word[i] = uint32_t(from.state[i]);
    int64_t left = from.left - 1, next = int64_t(from.next);
    const uint64_t limit = uint64_t(std::ceil(std::ldexp(p, 53)));
    for (int64_t first = 0; first < n; first += AT_ONCE) {
        int64_t numbers = n - first < AT_ONCE ? n - first : AT_ONCE;
        for (int64_t have = 0; have < 2 * numbers;) {
            if (left == 0) renew(word), left = Twister::WORDS, next = 0;
            int64_t wanted = 2 * numbers - have, taken = wanted < left ? wanted : left;
            temper(word + next, taken, drawn + have);
            have += taken, next += taken, left -= taken;
        }
        for (int64_t i = 0; i < numbers; i++) {
            uint64_t u = uint64_t(drawn[2 * i] & 0x1fffffu) << 32 | drawn[2 * i + 1];
            out[first + i] = u < limit ? kept : real(0);
        }
    }
    for (int i = 0; i < Twister::WORDS; i++) from.state[i] = word[i];
    from.left = int32_t(left + 1), from.next = uint64_t(next);
}

} // namespace
