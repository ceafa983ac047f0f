/* A model and a coder: bytes to fewer bytes and back, a piece at a time. */
#pragma once
#include "api.h"
#include "coder.h"
#include "model.h"
#include <new>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

/* Whatever the caller's thread was told: round to nearest, keep what is subnormal. */
struct PlainRounding {
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();
    PlainRounding() { _mm_setcsr(0x1f80); }
    ~PlainRounding() { _mm_setcsr(before); }
#elif defined(__aarch64__)
    uint64_t before;
    PlainRounding() {
        asm volatile("mrs %0, fpcr" : "=r"(before));
        asm volatile("msr fpcr, %0" ::"r"(uint64_t(0)));
    }
    ~PlainRounding() { asm volatile("msr fpcr, %0" ::"r"(before)); }
#endif
};

struct Compressor {
    Model model;
    Coder coder;
    bool began = false;
    int beyond = 0; /* zeros that were read where the coded text had ended */
};

void *make(const Options *options, const float *weights) {
    PlainRounding plain;
    Compressor *c = new (std::nothrow) Compressor;
    if (!c) return nullptr;
    if (!c->model.make(*options, weights)) {
        c->model.free_all();
        delete c;
        return nullptr;
    }
    return c;
}

void release(void *handle) {
    Compressor *c = static_cast<Compressor *>(handle);
    c->model.free_all();
    delete c;
}

/* Read what both sides know before they begin. */
void prime(void *handle, const uint8_t *in, int64_t n) {
    PlainRounding plain;
    Model &model = static_cast<Compressor *>(handle)->model;
    for (int64_t i = 0; i < n; i++)
        for (int b = 7; b >= 0; b--) model.see(in[i] >> b & 1);
}

/* As priming, with what was expected of every bit before it was read. */
void predict(void *handle, const uint8_t *in, int64_t n, uint32_t *odds) {
    PlainRounding plain;
    Model &model = static_cast<Compressor *>(handle)->model;
    for (int64_t i = 0; i < n; i++)
        for (int b = 7; b >= 0; b--) {
            *odds++ = model.odds();
            model.see(in[i] >> b & 1);
        }
}

/* A byte makes at most 64 bytes: eight bits, each of which empties the interval at worst. */
constexpr int64_t MOST = 64;

int64_t encode(void *handle, const uint8_t *in, int64_t n, uint8_t *out, int64_t room, int last) {
    PlainRounding plain;
    Compressor *c = static_cast<Compressor *>(handle);
    int64_t written = 0;
    auto emit = [&](uint8_t byte) { out[written++] = byte; };
    for (int64_t i = 0; i < n; i++) {
        if (room - written < MOST) return -1;
        for (int b = 7; b >= 0; b--) {
            int bit = in[i] >> b & 1;
            c->coder.narrow(bit, c->model.odds(), emit);
            c->model.see(bit);
        }
    }
    if (last) { /* enough of a number inside the interval; what is missing reads as zeros */
        if (room - written < MOST) return -1;
        uint64_t low = c->coder.low;
        if (low) {
            int bytes = 1; /* the shortest that lies inside with zeros after it */
            uint64_t number = 0;
            for (; bytes <= 8; bytes++) {
                uint64_t unit = bytes == 8 ? 1 : uint64_t(1) << (64 - 8 * bytes);
                number = (low + (unit - 1)) / unit * unit;
                if (number >= low && number <= c->coder.high) break;
            }
            for (int i = 0; i < bytes; i++) emit(uint8_t(number >> (56 - 8 * i)));
        }
    }
    return written;
}

/* A coded text ends no earlier than the last byte that left the coder, and eight more are read ahead: who has
 * to read more zeros than that reads what no encoder wrote, and gets fewer bytes than there is room for. */
constexpr int AHEAD = 8;

int64_t decode(void *handle, const uint8_t *in, int64_t n, int64_t *used, uint8_t *out, int64_t room, int last) {
    PlainRounding plain;
    Compressor *c = static_cast<Compressor *>(handle);
    int64_t at = 0, written = 0;
    auto next = [&]() -> uint8_t {
        if (at < n) return in[at++];
        c->beyond++;
        return 0;
    };
    auto shift = [&](uint8_t) { c->coder.code = c->coder.code << 8 | next(); };
    while (written < room && (last || n - at >= MOST)) {
        if (!c->began) {
            c->began = true;
            for (int i = 0; i < AHEAD; i++) shift(0);
        }
        uint32_t byte = 1;
        while (byte < 256) {
            uint32_t odds = c->model.odds();
            int bit = c->coder.code <= c->coder.cut(odds);
            c->coder.narrow(bit, odds, shift);
            c->model.see(bit);
            byte = byte << 1 | uint32_t(bit);
        }
        if (c->beyond > AHEAD) break;
        out[written++] = uint8_t(byte);
    }
    *used = at;
    return written;
}

} // namespace

extern const Variant VARIANT;
const Variant VARIANT = {NAME, make, release, prime, predict, encode, decode};
