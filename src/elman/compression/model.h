/* The odds of the next bit: counting and the network, mixed in the logistic domain.
 *
 * Several mixers, each with weights of its own for every value of some small context, are mixed again by
 * two last ones, and what those say is corrected by what such predictions led to. `reference/` is the
 * same model, file for file, in NumPy. */
#pragma once
#include "api.h"
#include "counts.h"
#include "mixing.h"
#include "network.h"

namespace {

constexpr int MOST_CONTEXTS = 24, PER_CONTEXT = 4, OTHER_INPUTS = 7, MIXERS = 8;
constexpr int SETS[MIXERS] = {256, 256, 2048, 64, 160, 256, 2048, 2048}; /* of weights: values of a mixer's context */
constexpr float FIRST_WEIGHT = 0.07f, LAST_MIXING = 0.002f;
constexpr int SHORTEST_MATCH = 6, LONGEST_LOOK = 64, MATCH_BUCKETS = 25;
constexpr uint32_t FAR = 255; /* columns are not told apart beyond it */

struct Model {
    Options o;
    float stretches[4096]; /* of 12-bit odds */
    uint8_t *past;         /* a ring of mask + 1 bytes */
    int64_t mask, n;       /* n: bytes read */
    uint32_t node;         /* 1, then the bits of the byte so far */
    int bit_at;
    uint64_t recent; /* the last eight bytes, the newest lowest */
    uint32_t word, word_before, word_two;
    uint32_t line, field, above[2]; /* column, separators before it, what stands in the line above */
    int64_t line_start, line_before; /* where this line began, and the one above */
    Counts counts[MOST_CONTEXTS];
    uint32_t contexts[MOST_CONTEXTS];
    uint32_t *last_seen; /* where each hash of a few bytes was last followed by something */
    int64_t match;
    int length, expected;
    Learned by_length[MATCH_BUCKETS * 2], *matched;
    Learned order0[256], order1[65536];
    Mixer mixers[MIXERS], last, other;
    Corrected corrected[2];
    Network net;
    float tree[2 * SYMBOLS];
    float x[MOST_CONTEXTS * PER_CONTEXT + 2 * LANES], y[LANES];
    int inputs;
    float probability; /* of a 1 */
    void *memory[5];

    /* As long as the text, at least 2^16 and at most 2^24. */
    static int64_t ring(int64_t length) {
        int64_t size = 1 << 16;
        while (size < length && size < (int64_t(1) << 24)) size *= 2;
        return size;
    }

    bool make(const Options &options, const float *trained) {
        memset(static_cast<void *>(this), 0, sizeof *this);
        o = options;
        mask = ring(o.length) - 1;
        inputs = (int(o.contexts) * PER_CONTEXT + OTHER_INPUTS + LANES - 1) / LANES * LANES;
        int64_t slots = int64_t(1) << o.table_bits, sets = 0;
        for (int size : SETS) sets += size;
        memory[0] = calloc(mask + 1, 1);
        memory[1] = calloc(slots * o.contexts, sizeof(Slot));
        memory[2] = calloc(mask + 1, sizeof(uint32_t));
        memory[3] = calloc(sets * inputs + 2 * SYMBOLS * LANES, sizeof(float));
        memory[4] = calloc(2 * Corrected::CONTEXTS * Corrected::POINTS, sizeof(uint16_t));
        for (void *m : memory)
            if (!m) return false;
        past = static_cast<uint8_t *>(memory[0]);
        last_seen = static_cast<uint32_t *>(memory[2]);
        for (int i = 0; i < o.contexts; i++) {
            counts[i].slots = static_cast<Slot *>(memory[1]) + i * slots;
            counts[i].mask = uint32_t(slots / 16 - 1);
            counts[i].begin();
        }
        begin_mixers(static_cast<float *>(memory[3]));
        corrected[0].points = static_cast<uint16_t *>(memory[4]);
        corrected[1].points = corrected[0].points + Corrected::CONTEXTS * Corrected::POINTS;
        corrected[0].begin(), corrected[1].begin();
        for (int i = 0; i < 4096; i++) stretches[i] = stretch((float(i) + 0.5f) * (1.0f / 4096));
        for (int i = 0; i < MATCH_BUCKETS * 2; i++) by_length[i] = {uint16_t(i & 1 ? 49152 : 16384), 0};
        for (Learned &l : order0) l = {32768, 0};
        for (Learned &l : order1) l = {32768, 0};
        NetworkOptions learning = {int(o.hidden), int(o.window), int(o.lanes), float(o.rate), float(o.last_rate)};
        if (!net.make(learning, trained)) return false;
        node = 1;
        look(0);
        predict();
        return true;
    }

    void begin_mixers(float *w) {
        for (int m = 0; m < MIXERS; m++) {
            mixers[m].weights = w, mixers[m].inputs = inputs;
            for (int64_t i = 0; i < int64_t(SETS[m]) * inputs; i++) *w++ = FIRST_WEIGHT;
        }
        last.weights = w, last.inputs = LANES;
        other.weights = w + SYMBOLS * LANES, other.inputs = LANES;
        for (int i = 0; i < 2 * SYMBOLS * LANES; i++) w[i] = i % LANES < MIXERS ? 1.0f / MIXERS : 0.0f;
    }

    void free_all() {
        for (void *m : memory) free(m);
        free(net.memory);
    }

    float stretched(uint16_t p) const { return stretches[p >> 4]; }

    /* A byte was read, or none yet: what the network expects after it, and where to look things up. */
    void look(uint8_t byte) {
        const float *p = net.read(byte, past, mask, n);
        for (int s = 0; s < SYMBOLS; s++) tree[SYMBOLS + s] = p[s] + 1e-6f;
        for (int i = SYMBOLS - 1; i > 0; i--) tree[i] = tree[2 * i] + tree[2 * i + 1];
        choose_contexts();
    }

    uint32_t newest(int from, int to) const { /* bytes, hashed */
        uint32_t h = uint32_t(to);
        for (int i = from; i < to; i++) h = hashed(h, uint32_t(recent >> (8 * i) & 0xff));
        return h;
    }

    /* What stands in the line above, in this column and in the next; 0: nothing. */
    void look_above() {
        for (int i = 0; i < 2; i++) {
            int64_t at = line_before + line + i;
            above[i] = line < FAR && at < line_start && n - at <= mask ? past[at & mask] : 0;
        }
    }

    void choose_contexts() {
        look_above();
        uint32_t c1 = recent & 0xff, c2 = recent >> 8 & 0xff;
        const uint32_t all[MOST_CONTEXTS] = {
            newest(0, 2),
            newest(0, 3),
            newest(0, 4),
            newest(0, 5),
            newest(0, 6),
            word,
            hashed(word, word_before),
            newest(0, 7),
            hashed(word, c1 << 8 | c2),
            newest(1, 3),
            newest(1, 4),
            hashed(word_before, c1),
            newest(0, 8),
            hashed(word, word_two),
            hashed(line, c1),
            c1,
            hashed(above[0], c1),
            hashed(above[0], line),
            c2,
            newest(2, 4),
            hashed(uint32_t(n & 3), c1),
            hashed(field, c1),
            newest(2, 5),
            hashed(above[0] << 8 | above[1], c1),
        };
        for (int i = 0; i < o.contexts; i++) {
            contexts[i] = hashed(all[i], uint32_t(i));
            counts[i].choose(contexts[i]);
        }
    }

    void predict() {
        uint32_t of_nibble = bit_at < 4 ? node : 1u << (bit_at - 4) | (node & ((1u << (bit_at - 4)) - 1));
        int k = 0, known = 0;
        for (int i = 0; i < o.contexts; i++, k += PER_CONTEXT) {
            counts[i].find(of_nibble);
            const Slot &s = *counts[i].slot;
            if (s.n == 0) {
                x[k] = x[k + 1] = x[k + 2] = x[k + 3] = 0.0f;
                continue;
            }
            uint16_t led_to = counts[i].histories[s.history].p;
            x[k] = stretched(s.p);
            x[k + 1] = stretched(s.q);
            x[k + 2] = stretched(led_to);
            x[k + 3] = (float(led_to) - 32768.0f) * (1.0f / 16384);
            known += i < 5 || i == 7; /* the orders 2 to 7 */
        }
        int bucket = follow_match(x + k);
        k += 2;
        uint32_t c1 = recent & 0xff, c2 = recent >> 8 & 0xff;
        x[k++] = stretched(order0[node].p);
        x[k++] = stretched(order1[c1 << 8 | node].p);
        float p = tree[2 * node + 1] / tree[node];
        p = p < 1e-4f ? 1e-4f : p;
        p = p > 0.9999f ? 0.9999f : p;
        float of_network = stretch(p);
        x[k++] = of_network;
        x[k++] = (p - 0.5f) * 4.0f;
        x[k++] = 0.3f;
        for (; k < inputs; k++) x[k] = 0.0f;
        int sets[MIXERS] = {
            int(node),
            int(c1),
            int(c2) << 3 | bit_at,
            known << 3 | bit_at,
            int(of_network + 9.5f) << 3 | bit_at,
            bucket << 3 | bit_at,
            int(above[0]) << 3 | bit_at,
            int(hashed(c1, c2) & 2047),
        };
        for (int m = 0; m < MIXERS; m++) {
            mixers[m].mix(x, sets[m]);
            y[m] = mixers[m].z;
        }
        last.mix(y, int(node));
        other.mix(y, int(c1));
        float z = (last.z + other.z) * 0.5f;
        float first = corrected[0].correct(z, c1 << 8 | node);
        float second = corrected[1].correct(z, hashed(c1 << 8 | c2, node) & 0xffff);
        probability = (squash(z) + first + second * 2.0f) * 0.25f;
    }

    /* What came after the last time that the past was like this; returns how long ago it began, coarsely. */
    int follow_match(float *into) {
        expected = -1;
        matched = nullptr;
        into[0] = into[1] = 0.0f;
        if (length == 0) return 0;
        uint32_t byte = past[match & mask] | 256u;
        if (byte >> (8 - bit_at) != node) {
            length = 0;
            return 0;
        }
        expected = byte >> (7 - bit_at) & 1;
        int bucket = length < 16 ? length : length < 32 ? 12 + length / 4 : length < 64 ? 16 + length / 8 : 24;
        matched = by_length + bucket * 2 + expected;
        into[0] = stretched(matched->p);
        into[1] = (float(matched->p) - 32768.0f) * (1.0f / 16384);
        return bucket;
    }

    /* The odds of a 1, in 24 bits. */
    uint32_t odds() const {
        int32_t p = int32_t(probability * 16777216.0f);
        return uint32_t(p < 1 ? 1 : p > 16777215 ? 16777215 : p);
    }

    void see(int bit) {
        for (int i = 0; i < o.contexts; i++) counts[i].see(bit);
        if (matched) matched->see(bit);
        order0[node].see(bit);
        order1[(recent & 0xff) << 8 | node].see(bit);
        float early = float(n < (1 << 24) ? n : 1 << 24) * (1.0f / 4096);
        float rate = float(o.mixing) * (1.0f + 8.0f / (1.0f + early));
        for (Mixer &m : mixers) m.learn(x, bit, rate);
        last.learn(y, bit, LAST_MIXING), other.learn(y, bit, LAST_MIXING);
        corrected[0].learn(bit), corrected[1].learn(bit);
        node = node << 1 | uint32_t(bit);
        bit_at++;
        if (bit_at == 8) end_byte(uint8_t(node));
        else if (bit_at == 4)
            for (int i = 0; i < o.contexts; i++) counts[i].choose(hashed(contexts[i], node));
        predict();
    }

    void end_byte(uint8_t byte) {
        node = 1, bit_at = 0;
        past[n++ & mask] = byte;
        recent = recent << 8 | byte;
        uint32_t letter = byte | 32u;
        if ((letter >= 'a' && letter <= 'z') || byte >= 128) word = hashed(word, letter);
        else if (word) word_two = word_before, word_before = word, word = 0;
        if (byte == '\n') {
            line_before = line_start, line_start = n;
            line = field = 0;
        } else {
            line = line < FAR ? line + 1 : FAR;
            field += byte == ',' || byte == ';' || byte == '\t';
        }
        find_match();
        look(byte);
    }

    void find_match() {
        if (length > 0) {
            match++;
            if (length < 65535) length++;
        }
        if (n < SHORTEST_MATCH) return;
        uint32_t &seen = last_seen[newest(0, SHORTEST_MATCH) & uint32_t(mask)];
        if (length == 0 && seen > 0) {
            match = seen;
            while (length < LONGEST_LOOK && match - 1 - length >= 0 && n - (match - 1 - length) <= mask &&
                   past[(match - 1 - length) & mask] == past[(n - 1 - length) & mask])
                length++;
            if (length < SHORTEST_MATCH) length = 0;
        }
        seen = uint32_t(n);
    }
};

} // namespace
