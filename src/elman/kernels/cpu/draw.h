/* What follows in a text, from the scores o of every token. Drawn by a chance u:
 *
 *     p ∝ exp((o - max o) / temperature) of what top-k and then top-p leave,   the first v with Σ_{i ≤ v} p_i > u
 *
 * or by a beam, the texts of the highest Σ log p of all that continue those of the step before. Python's own way is in
 * generation/ (`sampling.Sampling`, `beams`), and is what this one is tested against. Of equal scores the lower id counts
 * as the higher. All in double, so only such variants have it. */
#pragma once
#include "product.h"
#include <algorithm>
#include <atomic>
#include <cmath>

namespace {

struct Token {
    real score;
    int64_t id;
    bool operator<(const Token &other) const { return score > other.score || (score == other.score && id < other.id); }
};

struct Draw {
    const Rules &rules;
    int64_t V;
    int64_t room = ceil_div(V, LANES) * LANES;
    bool chooses = rules.temperature > 0, cuts = chooses && rules.top_k < V, shares = chooses && rules.top_p < 1;
    Buffer<real> scores{room}, weights{chooses ? room : 0};
    Buffer<Token> best{cuts ? 2 * rules.top_k : shares ? V : 0};
    Buffer<int64_t> ids{cuts ? rules.top_k : 0};
    Buffer<int32_t> shelves{shares ? room : 0};

    static constexpr int64_t SHELVES = 1024, BLOCK = 8 * LANES;

    bool ok() const { return scores.ok() && weights.ok() && best.ok() && ids.ok() && shelves.ok(); }

    /* The token, or -1 where scores are none that one can draw from. */
    template <class number> int64_t operator()(const number *from, double chance) const {
        real *o = scores.data;
        for (int64_t v = 0; v < V; v++) o[v] = real(from[v]);
        for (int64_t i = 0; i < rules.excluded; i++) o[rules.exclude[i]] = -INFINITY;
        int64_t n = V;
        fill_up(o, n);
        real top = highest(o, n);
        if (!(top > -INFINITY && top < INFINITY)) return -1;
        if (!chooses) return std::find(o, o + n, top) - o;
        if (cuts) n = cut(o, n);
        real total = weigh(o, n, top);
        if (shares) share(o, n, top, total);
        int64_t chosen = at(n, real(chance));
        return cuts ? ids.data[chosen] : chosen;
    }

    /* The likeliest tokens that top-k leaves, in the order of their ids, and their log p: how many; -1 as above. */
    template <class number> int64_t likeliest(const number *from, real *log_p, int64_t *tokens) const {
        real *o = scores.data;
        for (int64_t v = 0; v < V; v++) o[v] = real(from[v]);
        int64_t n = V;
        fill_up(o, n);
        real top = highest(o, n);
        if (!(top > -INFINITY && top < INFINITY)) return -1;
        real log_total = top + std::log(weigh(o, n, top));
        for (int64_t i = 0; i < rules.excluded; i++) o[rules.exclude[i]] = -INFINITY;
        if (cuts) n = cut(o, n);
        int64_t count = 0;
        for (int64_t i = 0; i < n; i++)
            if (o[i] > -INFINITY) log_p[count] = o[i] - log_total, tokens[count++] = cuts ? ids.data[i] : i;
        return count > 0 ? count : -1;
    }

  private:
    static void fill_up(real *o, int64_t n) {
        for (; n % LANES; n++) o[n] = -INFINITY;
    }
    static real highest(const real *o, int64_t n) {
        vec top = splat(-INFINITY);
        for (int64_t v = 0; v < n; v += LANES) {
            vec x = load(o + v);
            top = (x > top) | (x != x) ? x : top; /* a NaN stays: nothing is above it */
        }
        real found = top[0];
        for (int i = 1; i < LANES; i++) found = top[i] > found || top[i] != top[i] ? top[i] : found;
        return found;
    }

    /* The k highest scores move to the front, in the order of their ids; how many there are. */
    int64_t cut(real *o, int64_t n) const {
        int64_t k = rules.top_k, count = 0;
        Token *kept = best.data;
        real least = -INFINITY; /* of k that are known */
        for (int64_t v = 0; v < n; v += LANES) {
            if (v + LANES <= n && !any(load(o + v) > splat(least))) continue;
            for (int64_t i = v; i < at_most(n, v + LANES); i++) {
                if (!(o[i] > least)) continue;
                if (count == 2 * k) {
                    std::nth_element(kept, kept + k - 1, kept + count);
                    count = k, least = kept[k - 1].score;
                    if (!(o[i] > least)) continue;
                }
                kept[count++] = {o[i], i};
            }
        }
        if (count > k) std::nth_element(kept, kept + k - 1, kept + count);
        count = at_most(count, k);
        std::sort(kept, kept + count, [](const Token &a, const Token &b) { return a.id < b.id; });
        for (int64_t i = 0; i < count; i++) o[i] = kept[i].score, ids.data[i] = kept[i].id;
        fill_up(o, count);
        return count;
    }
    static bool any(bits mask) {
        word found = 0;
        for (int i = 0; i < LANES; i++) found |= mask[i];
        return found;
    }

    /* exp((o - top) / temperature); their sum. */
    real weigh(const real *o, int64_t n, real top) const {
        vec total = {};
        for (int64_t v = 0; v < n; v += LANES) {
            vec p = exp_minus((top - load(o + v)) / real(rules.temperature));
            store(weights.data + v, p);
            total += p;
        }
        return sum(total);
    }

    /* The fewest of the highest scores that hold top-p of the total keep their weights. Scores are put on shelves, the
     * highest first: then only one shelf has to be sorted. */
    void share(const real *o, int64_t n, real top, real total) const {
        real low = top, *p = weights.data, goal = real(rules.top_p) * total, held[SHELVES] = {};
        for (int64_t v = 0; v < n; v++) low = p[v] > 0 && o[v] < low ? o[v] : low;
        real scale = top > low ? (SHELVES - 1) / (top - low) : real(0);
        if (!(scale < INFINITY)) scale = 0;
        int32_t *shelf = shelves.data;
        for (int64_t v = 0; v < n; v++) {
            real at = (top - o[v]) * scale;
            shelf[v] = at < SHELVES - 1 ? int32_t(at) : SHELVES - 1; /* what has no weight, wherever it is */
        }
        for (int64_t v = 0; v < n; v++) held[shelf[v]] += p[v];
        int32_t last = 0;
        real before = 0;
        while (last < SHELVES - 1 && before + held[last] < goal) before += held[last++];
        int64_t count = 0;
        for (int64_t v = 0; v < n; v++) {
            if (shelf[v] == last && p[v] > 0) best.data[count++] = {o[v], v};
            if (shelf[v] > last) p[v] = 0;
        }
        std::sort(best.data, best.data + count);
        for (int64_t i = 0; i < count; i++) {
            real &weight = p[best.data[i].id], own = weight;
            if (!(before < goal)) weight = 0;
            before += own;
        }
    }

    /* The first at which the sum of weights exceeds its share. */
    int64_t at(int64_t n, real chance) const {
        const real *p = weights.data;
        auto block = [&](int64_t v) {
            vec total = {};
            for (int64_t i = v; i < at_most(n, v + BLOCK); i += LANES) total += load(p + i);
            return sum(total);
        };
        real total = 0, reached = 0;
        int64_t found = 0; /* the block where it is, or else the last with any weight */
        for (int64_t v = 0; v < n; v += BLOCK) total += block(v);
        for (int64_t v = 0; v < n; v += BLOCK) {
            real after = reached + block(v);
            if (after > reached) found = v;
            if (after > chance * total) break;
            reached = after;
        }
        int64_t chosen = found;
        for (int64_t v = found; v < at_most(n, found + BLOCK); v++) {
            if (p[v] > 0) chosen = v;
            reached += p[v];
            if (reached > chance * total) break;
        }
        return chosen;
    }
};

/* A text of a beam: the sum of its log p, which text it continues, and with what. */
struct Text {
    double sum;
    int64_t row, token;
    bool operator<(const Text &other) const {
        return sum != other.sum ? sum > other.sum : row != other.row ? row < other.row : token < other.token;
    }
};

/* Continues the texts of a beam, B of them, whose sums of log p are `sums` (-∞: no text): which of them each new one continues,
 * and with what. What is no text repeats the best one. Of equals the first text, and the lower id. */
int widen(const Rules *rules, const void *scores, bool wide, int64_t B, int64_t V, double *sums, int64_t *rows, int64_t *tokens,
          int64_t threads) {
    const int64_t each_row = at_most(B, V);
    Buffer<Text> texts(B * each_row);
    Buffer<int64_t> counts(B);
    if (!texts.ok() || !counts.ok()) return NO_MEMORY;
    threads = worth_two(B * V * 16) ? at_most(threads, B) : 1;
    std::atomic<int> status{OK};
    each(threads, threads, [&](int64_t i) {
        Rules likeliest = {1, 1, each_row, rules->exclude, rules->excluded};
        Draw next{likeliest, V};
        Buffer<real> log_p(each_row);
        Buffer<int64_t> ids(each_row);
        if (!next.ok() || !log_p.ok() || !ids.ok()) return status.store(NO_MEMORY);
        for (int64_t b = B * i / threads; b < B * (i + 1) / threads; b++) {
            counts.data[b] = 0;
            if (!(sums[b] > -INFINITY)) continue;
            int64_t n = wide ? next.likeliest(static_cast<const double *>(scores) + b * V, log_p.data, ids.data)
                             : next.likeliest(static_cast<const float *>(scores) + b * V, log_p.data, ids.data);
            if (n < 0) return status.store(NO_NUMBERS);
            for (int64_t k = 0; k < n; k++) texts.data[b * each_row + k] = {sums[b] + log_p.data[k], b, ids.data[k]};
            counts.data[b] = n;
        }
    });
    if (status) return status;
    int64_t count = 0;
    for (int64_t b = 0; b < B; b++)
        for (int64_t k = 0; k < counts.data[b]; k++) texts.data[count++] = texts.data[b * each_row + k];
    std::partial_sort(texts.data, texts.data + at_most(B, count), texts.data + count);
    for (int64_t b = 0; b < B; b++) {
        const Text &text = texts.data[b < count ? b : 0];
        sums[b] = b < count ? text.sum : -INFINITY, rows[b] = text.row, tokens[b] = text.token;
    }
    return OK;
}

/* One token for each row of scores (rows, V), in double if `wide`, else in float. */
int draw(const Rules *rules, const void *scores, bool wide, int64_t rows, int64_t V, const double *chances, int64_t *tokens,
         int64_t threads) {
    threads = worth_two(rows * V * 16) ? at_most(threads, rows) : 1;
    std::atomic<int> status{OK};
    each(threads, threads, [&](int64_t i) {
        Draw next{*rules, V};
        if (!next.ok()) return status.store(NO_MEMORY);
        for (int64_t b = rows * i / threads; b < rows * (i + 1) / threads; b++) {
            double chance = chances ? chances[b] : 0;
            tokens[b] = wide ? next(static_cast<const double *>(scores) + b * V, chance)
                             : next(static_cast<const float *>(scores) + b * V, chance);
            if (tokens[b] < 0) return status.store(NO_NUMBERS);
        }
    });
    return status;
}

} // namespace
