/* What a variant offers: the same model compiled for one instruction set. */
#pragma once
#include <cstdint>

/* As in library.py; all numbers are 64 bits wide. */
struct Options {
    int64_t length;             /* of the whole text in bytes */
    int64_t contexts;           /* counted, of those that model.h lists */
    int64_t table_bits;         /* slots of each context's table: 2^bits */
    int64_t hidden, window, lanes;
    double rate, last_rate;     /* of the network's learning */
    double mixing;              /* rate of the mixers' learning */
};

struct Variant {
    const char *name;
    void *(*make)(const Options *, const float *weights);
    void (*free)(void *);
    void (*prime)(void *, const uint8_t *in, int64_t n);
    /* The odds of a 1 before each bit of `in`, eight for every byte; nothing is coded. */
    void (*predict)(void *, const uint8_t *in, int64_t n, uint32_t *odds);
    /* Both return the bytes written, -1 where there is no room; see compressor.h. */
    int64_t (*encode)(void *, const uint8_t *in, int64_t n, uint8_t *out, int64_t room, int last);
    int64_t (*decode)(void *, const uint8_t *in, int64_t n, int64_t *used, uint8_t *out, int64_t room, int last);
};
