/* An LSTM that learns while it reads: one layer, one-hot bytes in, the odds of every byte out.
 *
 *     a = W_x[byte] + h W_h,   i, f, g, o = σ, σ, tanh, σ of a's quarters
 *     c ← f c + i g,   h ← o tanh c,   p = softmax(h W_o + b_o)
 *
 * Every `window` bytes the gradient is carried back through them (truncated backpropagation through
 * time) and Adam takes a step; `lanes` - 1 readers go over the past again beside the one in front, so
 * that all that was read is learnt from several times. All sums are in the order written here. */
#pragma once
#include "numbers.h"
#include <cstdlib>

namespace {

constexpr int SYMBOLS = 256;

struct NetworkOptions {
    int hidden;      /* a multiple of 16 */
    int window;      /* steps between two updates */
    int lanes;       /* readers in all, at most MOST_LANES */
    float rate;      /* Adam's */
    float last_rate; /* what it falls to */
};
constexpr int MOST_LANES = 64, LONGEST_WINDOW = 255;
constexpr float HALF_WAY = 2000.0f; /* updates */
constexpr int WARM_UP = 100;        /* updates */

/* A reader's place, state and the trace of its window. */
struct Lane {
    int64_t at;
    float *h, *c;      /* before the window: hidden each */
    float *hs, *cs;    /* after each step: window × hidden */
    float *gates;      /* window × 4 hidden: i f g o */
    float *ps;         /* window × 256 */
    uint8_t *in, *out; /* window each */
};

struct Network {
    NetworkOptions o;
    int H, G;                   /* units, gates in all */
    float *Wx, *Wh, *Wo, *bo;   /* 256 × G (the bias is in it), H × G, H × 256, 256 */
    float *weights, *gradient, *first, *second; /* all four matrices one after the other */
    int64_t size;
    Lane *lanes;
    float *das, *dh, *dc; /* das: window × G */
    uint8_t *touched;
    int step;        /* of the window */
    int64_t updates;
    void *memory;

    float *take(int64_t n) {
        float *p = next;
        next += n;
        return p;
    }
    float *next;

    static int64_t floats(const NetworkOptions &o) {
        int64_t H = o.hidden, G = 4 * H, T = o.window;
        int64_t weights = SYMBOLS * G + H * G + H * SYMBOLS + SYMBOLS;
        int64_t lane = 2 * H + T * (2 * H + G + SYMBOLS);
        return 4 * weights + o.lanes * lane + T * G + 2 * H + 64;
    }

    /* With weights of its own, or, where they are given, a trained network's, in the same order. */
    bool make(const NetworkOptions &options, const float *trained) {
        o = options;
        step = 0, updates = 0;
        H = o.hidden, G = 4 * H;
        int64_t T = o.window;
        memory = calloc(floats(o) * sizeof(float) + o.lanes * (sizeof(Lane) + 2 * T) + SYMBOLS + 64, 1);
        if (!memory) return false;
        next = static_cast<float *>(memory);
        size = int64_t(SYMBOLS) * G + int64_t(H) * G + int64_t(H) * SYMBOLS + SYMBOLS;
        weights = take(size), gradient = take(size), first = take(size), second = take(size);
        Wx = weights, Wh = Wx + SYMBOLS * G, Wo = Wh + int64_t(H) * G, bo = Wo + int64_t(H) * SYMBOLS;
        das = take(T * G), dh = take(H), dc = take(H);
        struct {
            float *h, *c, *hs, *cs, *gates, *ps;
        } parts[MOST_LANES];
        for (int b = 0; b < o.lanes; b++)
            parts[b] = {take(H), take(H), take(T * H), take(T * H), take(T * G), take(T * SYMBOLS)};
        next += 16 - (next - static_cast<float *>(memory)) % 16;
        lanes = reinterpret_cast<Lane *>(next);
        uint8_t *bytes = reinterpret_cast<uint8_t *>(lanes + o.lanes);
        for (int b = 0; b < o.lanes; b++) {
            auto &p = parts[b];
            lanes[b] = {0, p.h, p.c, p.hs, p.cs, p.gates, p.ps, bytes, bytes + T};
            bytes += 2 * T;
        }
        touched = bytes;
        if (trained) memcpy(weights, trained, size * sizeof(float));
        else initialise();
        return true;
    }

    /* Uniform in ±√(1/H); forget gates begin open (+1). */
    void initialise() {
        uint32_t x = 1;
        float bound = 1.0f / __builtin_sqrtf(float(H));
        for (int64_t i = 0; i < size; i++) {
            x = x * 1664525u + 1013904223u;
            float u = float(int32_t(x >> 8)) * (1.0f / 8388608) - 1.0f;
            weights[i] = u * bound;
        }
        for (int s = 0; s < SYMBOLS; s++)
            for (int j = H; j < 2 * H; j++) Wx[s * G + j] = Wx[s * G + j] + 1.0f;
        for (int s = 0; s < SYMBOLS; s++) bo[s] = 0.0f;
    }

    /* y += x W, W n_in × n_out: for every output the inputs one after the other. */
    static void product(const float *x, const float *W, float *y, int n_in, int n_out) {
        int j = 0;
        for (; j + 64 <= n_out; j += 64) {
            vec a = load(y + j), b = load(y + j + 16), c = load(y + j + 32), d = load(y + j + 48);
            const float *w = W + j;
            for (int k = 0; k < n_in; k++, w += n_out) {
                a = a + load(w) * x[k];
                b = b + load(w + 16) * x[k];
                c = c + load(w + 32) * x[k];
                d = d + load(w + 48) * x[k];
            }
            store(y + j, a), store(y + j + 16, b), store(y + j + 32, c), store(y + j + 48, d);
        }
    }

    /* x += y Wᵀ: four rows at a time, so that no sum waits for its last addition. */
    static void transposed(const float *W, const float *y, float *x, int n_in, int n_out) {
        for (int k = 0; k < n_in; k += 4) {
            const float *w = W + int64_t(k) * n_out;
            vec sums[4] = {};
            for (int i = 0; i < 4; i++) sums[i] = load(w + int64_t(i) * n_out) * load(y);
            for (int j = LANES; j < n_out; j += LANES) {
                vec y_j = load(y + j);
                for (int i = 0; i < 4; i++) sums[i] = sums[i] + load(w + int64_t(i) * n_out + j) * y_j;
            }
            for (int i = 0; i < 4; i++) x[k + i] = x[k + i] + total(sums[i]);
        }
    }

    /* G += Σ_t x_tᵀ y_t, the latest step first: every sum stays in a register until it is done. */
    static void outer(const float *const *x, const float *y, float *g, int steps, int n_in, int n_out) {
        for (int k = 0; k < n_in; k += 2)
            for (int j = 0; j < n_out; j += 32) {
                float *g_k = g + int64_t(k) * n_out + j, *g_next = g_k + n_out;
                vec a = load(g_k), b = load(g_k + 16), c = load(g_next), d = load(g_next + 16);
                for (int t = steps - 1; t >= 0; t--) {
                    vec left = load(y + int64_t(t) * n_out + j), right = load(y + int64_t(t) * n_out + j + 16);
                    a = a + left * x[t][k], b = b + right * x[t][k];
                    c = c + left * x[t][k + 1], d = d + right * x[t][k + 1];
                }
                store(g_k, a), store(g_k + 16, b), store(g_next, c), store(g_next + 16, d);
            }
    }

    void forward(Lane &l, int t, uint8_t byte) {
        const float *h = t ? l.hs + (t - 1) * H : l.h, *c = t ? l.cs + (t - 1) * H : l.c;
        float *a = l.gates + int64_t(t) * G, *h_t = l.hs + t * H, *c_t = l.cs + t * H;
        l.in[t] = byte;
        memcpy(a, Wx + byte * G, G * sizeof(float));
        product(h, Wh, a, H, G);
        for (int j = 0; j < H; j += LANES) {
            vec i = vsigmoid(load(a + j)), f = vsigmoid(load(a + H + j));
            vec g = vtanh(load(a + 2 * H + j)), u = vsigmoid(load(a + 3 * H + j));
            vec c_j = f * load(c + j) + i * g;
            store(a + j, i), store(a + H + j, f), store(a + 2 * H + j, g), store(a + 3 * H + j, u);
            store(c_t + j, c_j);
            store(h_t + j, u * vtanh(c_j));
        }
        float *p = l.ps + t * SYMBOLS;
        memcpy(p, bo, SYMBOLS * sizeof(float));
        product(h_t, Wo, p, H, SYMBOLS);
        float most = p[0];
        for (int s = 1; s < SYMBOLS; s++) most = p[s] > most ? p[s] : most;
        vec sum = {};
        for (int s = 0; s < SYMBOLS; s += LANES) {
            vec e = vexp(load(p + s) - most);
            store(p + s, e);
            sum = sum + e;
        }
        float inverse = 1.0f / total(sum);
        for (int s = 0; s < SYMBOLS; s += LANES) store(p + s, load(p + s) * inverse);
    }

    /* Add the gradient of one lane's window: Σ_t -ln p_t[out_t]. */
    void backward(Lane &l) {
        float *gx = gradient, *gh = gx + SYMBOLS * G, *go = gh + int64_t(H) * G, *gb = go + int64_t(H) * SYMBOLS;
        const float *before[LONGEST_WINDOW], *after[LONGEST_WINDOW]; /* the states of each step */
        memset(dh, 0, H * sizeof(float));
        memset(dc, 0, H * sizeof(float));
        for (int t = o.window - 1; t >= 0; t--) {
            float *p = l.ps + t * SYMBOLS, *da = das + int64_t(t) * G;
            const float *c_t = l.cs + t * H, *a = l.gates + int64_t(t) * G;
            const float *c = t ? l.cs + (t - 1) * H : l.c;
            after[t] = l.hs + t * H, before[t] = t ? l.hs + (t - 1) * H : l.h;
            p[l.out[t]] = p[l.out[t]] - 1.0f;
            axpy(1.0f, p, gb, SYMBOLS);
            transposed(Wo, p, dh, H, SYMBOLS);
            for (int j = 0; j < H; j += LANES) {
                vec i = load(a + j), f = load(a + H + j), g = load(a + 2 * H + j), u = load(a + 3 * H + j);
                vec q = vtanh(load(c_t + j)), dh_j = load(dh + j);
                vec dc_j = load(dc + j) + dh_j * u * (1.0f - q * q);
                store(da + j, dc_j * g * i * (1.0f - i));
                store(da + H + j, dc_j * load(c + j) * f * (1.0f - f));
                store(da + 2 * H + j, dc_j * i * (1.0f - g * g));
                store(da + 3 * H + j, dh_j * q * u * (1.0f - u));
                store(dc + j, dc_j * f);
            }
            axpy(1.0f, da, gx + l.in[t] * G, G);
            touched[l.in[t]] = 1;
            memset(dh, 0, H * sizeof(float));
            transposed(Wh, da, dh, H, G);
        }
        outer(after, l.ps, go, o.window, H, SYMBOLS);
        outer(before, das, gh, o.window, H, G);
    }

    /* Adam's step for one stretch of weights; its gradient is zero afterwards. */
    void adam(int64_t from, int64_t n, float rate, float scale) {
        constexpr float B1 = 0.9f, B2 = 0.999f;
        for (int64_t i = from; i < from + n; i += LANES) {
            vec g = load(gradient + i) * scale;
            vec m = load(first + i) * B1 + g * (1.0f - B1);
            vec v = load(second + i) * B2 + (g * g) * (1.0f - B2);
            store(first + i, m), store(second + i, v), store(gradient + i, vec{});
            vec root = v;
            for (int j = 0; j < LANES; j++) root[j] = __builtin_sqrtf(v[j]);
            store(weights + i, load(weights + i) - (m * rate) / (root + 1e-6f));
        }
    }

    void update() {
        updates++;
        float k = float(updates < (1 << 20) ? int(updates) : 1 << 20);
        float rate = o.last_rate + (o.rate - o.last_rate) / (1.0f + k / HALF_WAY);
        if (updates < WARM_UP) rate = rate * (k * (1.0f / WARM_UP));
        float scale = 1.0f / float(o.window * o.lanes);
        for (int s = 0; s < SYMBOLS; s++)
            if (touched[s]) {
                adam(int64_t(s) * G, G, rate, scale);
                touched[s] = 0;
            }
        adam(SYMBOLS * G, size - SYMBOLS * G, rate, scale);
    }

    void carry_on(Lane &l) {
        memcpy(l.h, l.hs + (o.window - 1) * H, H * sizeof(float));
        memcpy(l.c, l.cs + (o.window - 1) * H, H * sizeof(float));
    }

    /* The byte in front is now known: learn at the end of a window, then predict the one after it.
     * `past` has the bytes so far, a ring of `mask` + 1 of which the newest is at `n` - 1. */
    const float *read(uint8_t byte, const uint8_t *past, int64_t mask, int64_t n) {
        Lane &l = lanes[0];
        if (step) l.out[step - 1] = byte;
        if (step == o.window) {
            learn(past, mask, n);
            step = 0;
        }
        forward(l, step, byte);
        return l.ps + SYMBOLS * step++;
    }

    void learn(const uint8_t *past, int64_t mask, int64_t n) {
        backward(lanes[0]);
        int64_t T = o.window, oldest = n > mask ? n - mask : 0;
        for (int b = 1; b < o.lanes; b++) {
            Lane &l = lanes[b];
            if (l.at + T + 1 > n || l.at < oldest) { /* at the front, or overtaken: to its own place in the past */
                l.at = oldest + (n - oldest) * (b - 1) / o.lanes;
                memset(l.h, 0, H * sizeof(float));
                memset(l.c, 0, H * sizeof(float));
            }
            if (l.at + T + 1 > n) continue;
            for (int t = 0; t < T; t++) {
                forward(l, t, past[(l.at + t) & mask]);
                l.out[t] = past[(l.at + t + 1) & mask];
            }
            backward(l);
            carry_on(l);
            l.at += T;
        }
        carry_on(lanes[0]);
        update();
    }
};

} // namespace
