/* Odds weighed in the logistic domain, and corrected by what such odds led to.
 *
 *     stretch(p) = ln(p / (1 - p));   p = squash(Σ_i w_i x_i),   w_i ← w_i + rate (bit - p) x_i
 *
 * where the x are stretched odds. */
#pragma once
#include "counts.h"

namespace {

struct Mixer {
    float *weights; /* sets × inputs */
    int inputs, chosen;
    float p, z;

    void mix(const float *x, int set) {
        chosen = set;
        z = dot(weights + int64_t(set) * inputs, x, inputs);
        z = z > 12.0f ? 12.0f : z;
        z = z < -12.0f ? -12.0f : z;
        p = squash(z);
    }
    void learn(const float *x, int bit, float rate) {
        axpy((float(bit) - p) * rate, x, weights + int64_t(chosen) * inputs, inputs);
    }
};

/* What predictions like this one led to: 33 points of stretch(p) for each context, interpolated. */
struct Corrected {
    static constexpr int64_t CONTEXTS = 65536, POINTS = 33;
    static constexpr int32_t RATE = 2000;
    uint16_t *points;
    int64_t at;
    float share;

    void begin() {
        for (int i = 0; i < POINTS; i++) {
            uint16_t p = uint16_t(int32_t(squash(float(i - 16) * 0.5f) * 65535.0f));
            for (int64_t c = 0; c < CONTEXTS; c++) points[c * POINTS + i] = p;
        }
    }
    float correct(float z, uint32_t context) {
        float place = (z + 8.0f) * 2.0f;
        place = place < 0.0f ? 0.0f : place;
        place = place > 31.999f ? 31.999f : place;
        int below = int(place);
        share = place - float(below);
        at = int64_t(context) * POINTS + below;
        return (float(points[at]) * (1.0f - share) + float(points[at + 1]) * share) * (1.0f / 65536);
    }
    void learn(int bit) {
        int64_t nearer = share > 0.5f ? at + 1 : at;
        points[nearer] = toward(points[nearer], bit, RATE);
    }
};

} // namespace
