// h_1 … h_T of one layer, one launch.
//
//     tanh, relu   h = f(x + W h), and linear, without f
//     gru          r, z = σ(x + W h);  n = tanh(x_n + r (W_n h + b_n));  h = (1 - z) n + z h
//     lstm         i, f, o = σ(x + W h);  g = tanh(x + W h);  c = f c + i g;  h = o tanh(c)
//
// where x is the input's share, W_ih x_t + b, computed beforehand for all t in one matrix product, or
// a table whose row ids[t, b] is looked up here. A described cell's equations are in own.cuh.
#define TRANSPOSED 0
#if SINGLE
#include "single.cuh"
#elif PAIRED
#include "pairs.cuh"
#elif STRAIGHT
#include "straight.cuh"
#elif FAR
#include "far.cuh"
#else
#include "gather.cuh"
#endif

typedef Ring<INPUTS, RING_AT> Inputs;
constexpr int NUMBERS_AT = RING_AT + Inputs::SIZE_IN_BYTES;
static_assert(NUMBERS_AT + NUMBERS_BYTES == SHARED_BYTES, "the plan counts as the kernel does");

// New h (and c) of one item from a = W h and x; `kept` is what the backward pass will ask for.
#if CELL == OWN
typedef Values Kept[KEPT > 0 ? KEPT : 1];

DEVICE void act(const Item& it, const Values (&a)[GATES], const Values (&x)[INPUTS], Values& h, Values (&c)[C_STATES], Kept& kept) {
    Values own[NUMBERS > 0 ? NUMBERS : 1];
#pragma unroll
    for (int n = 0; n < NUMBERS; n++) load_shared_floats(own[n], number(NUMBERS_AT, n, it.unit));
#pragma unroll
    for (int v = 0; v < WIDE; v++) {
        own_step(v, a, x, own, h, c, kept);
        if (SIZE < HIDDEN && v >= it.real) h[v] = 0.0f;  // what units that do not exist compute may be no number
    }
}
#else
typedef Values Kept[5];

DEVICE void act(const Values (&a)[GATES], const Values (&x)[GATES], const Values& b_n, Values& h, Values& c, Kept& kept) {
#pragma unroll
    for (int v = 0; v < WIDE; v++) {
        if constexpr (CELL == TANH) h[v] = hyperbolic_tangent(a[0][v] + x[0][v]);
        if constexpr (CELL == RELU) h[v] = fmaxf(a[0][v] + x[0][v], 0.0f);
        if constexpr (CELL == LINEAR) h[v] = a[0][v] + x[0][v];
        if constexpr (CELL == GRU) {
            const float r = sigmoid(a[0][v] + x[0][v]), z = sigmoid(a[1][v] + x[1][v]), u = a[2][v] + b_n[v];
            const float n = hyperbolic_tangent(x[2][v] + r * u);
            kept[0][v] = r, kept[1][v] = z;  // and three derivatives, which rounded gates would not give as well
            kept[2][v] = (1.0f - z) * (1.0f - n * n), kept[3][v] = u * r * (1.0f - r), kept[4][v] = (h[v] - n) * z * (1.0f - z);
            h[v] = n + z * (h[v] - n);
        }
        if constexpr (CELL == LSTM) {
            const float i = sigmoid(a[0][v] + x[0][v]), f = sigmoid(a[1][v] + x[1][v]);
            const float g = hyperbolic_tangent(a[2][v] + x[2][v]), o = sigmoid(a[3][v] + x[3][v]);
            c[v] = f * c[v] + i * g;
            h[v] = o * hyperbolic_tangent(c[v]);
            kept[0][v] = i, kept[1][v] = f, kept[2][v] = g, kept[3][v] = o;
        }
    }
}
#endif

// Every block reads the whole of h_0 itself; none is zeros.
DEVICE void load_first_vector(const void* h_first, const Place& place, int batch) {
#if !FAR
    constexpr int PER_ROW = HIDDEN / WIDE;
    for (int i = threadIdx.x; i < ROWS * PER_ROW; i += THREADS) {
        const int row = i / PER_ROW, b = place.group * ROWS + row, unit = i % PER_ROW * WIDE;
        Stored h = load<WIDE>(h_first, (i64)b * COLUMNS + place.head * SIZE + unit, h_first && b < batch ? max(0, min(WIDE, SIZE - unit)) : 0);
#pragma unroll
        for (int j = 0; j < Stored::WORDS; j++) h.word[j] = operand(h.word[j]);
        store_words(vector(0, row) + unit * BYTES, h.word);
    }
#endif
}

extern "C" __global__ void __launch_bounds__(LAUNCHED, 1)
forward(TRACK_PARAMETER const void* W, const void* xs, const i64* ids, const float* b_hn, const i64* lengths, const void* h_first, const void* c_first, void* hs, void* cs, void* gates,
        void* h_last, void* c_last,
#if CELL == OWN
        const float* numbers, const void* drawn,
#endif
        int steps, int batch, int first_block) {
    const Place place = place_of(first_block + blockIdx.x);
    const int rank = place.rank;

#if SINGLE
    begin();
    if (is_carrier()) {
        const Item its = piece(0, place, batch);  // of its row
        const bool reads_ids = ids && its.has_row && is_first_of_row();
        auto fetch = [&](int t) {
            if (its.has_row && t < steps) {
                const i64 now = (i64)t * batch + its.batch_row, read = ids ? (i64)*word_of(t, its.row) : now;
#pragma unroll
                for (int q = 0; q < PIECES; q++) {
                    const Item it = piece(q, place, batch);
                    if (it.real == 0) continue;
#pragma unroll
                    for (int g = 0; g < GATES; g++) Inputs::fetch(t, g, q, xs, it.in(read, GATES, g), it.real);
#if CELL == OWN
#pragma unroll
                    for (int n = 0; n < DRAWN; n++) Inputs::fetch(t, GATES + n, q, drawn, it.in(now, DRAWN, n), it.real);
#endif
                }
                if (reads_ids && t + AHEAD < steps) start_copy<4>(word_of(t + AHEAD, its.row), ids + now + (i64)AHEAD * batch, true);
            }
            mark_copies();
        };
        auto send = [&](int t) {
            if (!its.has_row) return;
            const i64 now = (i64)t * batch + its.batch_row;
#pragma unroll
            for (int q = 0; q < PIECES; q++) {
                const Item it = piece(q, place, batch);
                if (it.real == 0) continue;
                ship(t, 0, q, hs, it.in(now + batch));
#pragma unroll
                for (int i = 0; i < EXTRA; i++) ship(t, 1 + i, q, cs, it.in(now + batch, EXTRA, i));
#pragma unroll
                for (int g = 0; g < KEPT; g++)
                    if (gates) ship(t, 1 + EXTRA + g, q, gates, it.in(now, KEPT, g));
            }
        };
        for (int t = 0; t < AHEAD && t < steps; t++)
            if (reads_ids) *word_of(t, its.row) = (u32)ids[(i64)t * batch + its.batch_row];
        carriers_meet();
        return carry(steps, fetch, send);
    }
#endif
#if CELL == OWN
    auto load_own = [&] { load_numbers(NUMBERS_AT, numbers, place); };
#else
    auto load_own = [] {};
#endif

    // The vectors that step t multiplies in a turn.
    auto exchange_at = [&](int t, int turn) {
        const int group = place.in_turn(turn).group;
        const char* vectors = t || PAIRED ? (const char*)hs + (i64)t * batch * (COLUMNS * BYTES) : (const char*)h_first;
        return Exchange{nullptr, vectors + (i64)group * ROWS * (COLUMNS * BYTES) + place.head * (SIZE * BYTES), COLUMNS * BYTES,
                        vectors ? batch - group * ROWS : 0, TRACK, group * ROWS, t, rank};
    };
#if TURNS > 1
    const int turns = live_turns(place.group, batch);
    if (!begin_turns(matrix_of(W, place), rank, steps, turns, exchange_at, load_own)) return;
#endif

    Values h[TURNS][ITEMS], c[TURNS][ITEMS][C_STATES], b_n[ITEMS];
    int length[TURNS][ITEMS];
#if !SINGLE
    int row[TURNS][ITEMS];  // of `xs`, with the next input to fetch

    // x_t lies in row ids[t, b] of the table, or in row (t, b) of the array.
    auto input_row = [&](const Item& it, int t) {
        const int place = t * batch + it.batch_row;
        return ids && it.real > 0 && t < steps ? (int)ids[place] : place;
    };
    auto fetch = [&](int t, int turn) {
        const int use = t * TURNS + turn;
#pragma unroll
        for (int q = 0; q < ITEMS; q++) {
            const Item it = item(q, place.in_turn(turn), batch);
            if (t < steps)
#pragma unroll
                for (int g = 0; g < GATES; g++) Inputs::fetch(use, g, q, xs, it.in(row[turn][q], GATES, g), it.real);
#if CELL == OWN
            if (t < steps)
#pragma unroll
                for (int n = 0; n < DRAWN; n++) Inputs::fetch(use, GATES + n, q, drawn, it.in((i64)t * batch + it.batch_row, DRAWN, n), it.real);
#endif
            row[turn][q] = input_row(it, t + 1);
        }
        mark_copies();
    };
#endif

#pragma unroll
    for (int turn = 0; turn < TURNS; turn++)
#pragma unroll
        for (int q = 0; q < ITEMS; q++) {
            const Item it = item(q, place.in_turn(turn), batch);
            const Stored first = load<WIDE>(h_first, it.in(it.batch_row), h_first ? it.real : 0);
            unpack(first, h[turn][q]);
            store(hs, it.in(it.batch_row), told_from_empty(first), it.real);
#pragma unroll
            for (int i = 0; i < EXTRA; i++) {
                const Stored before = load<WIDE>(c_first, it.in(it.batch_row, EXTRA, i), c_first ? it.real : 0);
                unpack(before, c[turn][q][i]);
                store(cs, it.in(it.batch_row, EXTRA, i), before, it.real);
            }
            if (turn == 0 && CELL == GRU) load_floats(b_n[q], b_hn, it.layer_unit, b_hn ? it.real : 0);
            length[turn][q] = lengths && it.real > 0 ? (int)lengths[it.batch_row] : steps;
#if !SINGLE
            row[turn][q] = input_row(it, 0);
#endif
        }
#if !SINGLE
    for (int t = 0; t < AHEAD / TURNS; t++)
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) fetch(t, turn);
#endif
#if TURNS == 1
    Matrix A;
    load_matrix(A, matrix_of(W, place), rank);
    open_exchange();
    load_first_vector(h_first, place, batch);
    load_own();
    meet();
#endif

    for (int t = 0; t < steps; t++)
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            const Exchange exchange = exchange_at(t, turn);
#if SINGLE
            const Sums sums = multiply(A, t);
#elif TURNS > 1
            if (turn >= turns) {  // no row of the batch is left for it
                mark_copies();
                continue;
            }
            const int use = t * turns + turn;
            collect(use, [&] { fetch(t + 1, turn); });
            copied<AHEAD>();
#else
            const int use = t;
            collect(A, t, exchange, [&] { fetch(t + AHEAD, 0); });
            copied<AHEAD>();
#endif
#pragma unroll
            for (int q = 0; q < ITEMS; q++) {
                const Item it = item(q, place.in_turn(turn), batch);
                if (!it.owned) continue;
                Values a[GATES], x[INPUTS], h_new, c_new[C_STATES];
                Kept kept = {};
#pragma unroll
                for (int g = 0; g < GATES; g++) {
#if SINGLE
                    take_sum(a[g], sums, g, q);
#else
                    sum(a[g], it, g, use, exchange);
#endif
                    Inputs::take(x[g], t * TURNS + turn, g, q);
                }
#pragma unroll
                for (int n = GATES; n < INPUTS; n++) Inputs::take(x[n], t * TURNS + turn, n, q);
#pragma unroll
                for (int v = 0; v < WIDE; v++) {
                    h_new[v] = h[turn][q][v];
#pragma unroll
                    for (int i = 0; i < C_STATES; i++) c_new[i][v] = c[turn][q][i][v];
                }
#if CELL == OWN
                if (t < length[turn][q]) act(it, a, x, h_new, c_new, kept);
#else
                if (t < length[turn][q]) act(a, x, b_n[q], h_new, c_new[0], kept);
#endif
                const Stored stored = told_from_empty(pack(h_new));
                if (t + 1 < steps) hand_on(stored, it, 0, t + 1, rank);
                unpack(stored, h[turn][q]);  // what was stored; c alone stays in fp32 from step to step
#pragma unroll
                for (int v = 0; v < WIDE; v++)
#pragma unroll
                    for (int i = 0; i < C_STATES; i++) c[turn][q][i][v] = c_new[i][v];
#if SINGLE
                leave_behind(t, 0, q, stored);
#pragma unroll
                for (int i = 0; i < EXTRA; i++) leave_behind(t, 1 + i, q, pack(c[turn][q][i]));
#pragma unroll
                for (int g = 0; g < KEPT; g++)
                    if (gates) leave_behind(t, 1 + EXTRA + g, q, pack(kept[g]));
#else
                const i64 now = (i64)t * batch + it.batch_row;
                store(hs, it.in(now + batch), stored, it.real);
#pragma unroll
                for (int i = 0; i < EXTRA; i++) store(cs, it.in(now + batch, EXTRA, i), pack(c[turn][q][i]), it.real);
#pragma unroll
                for (int g = 0; g < KEPT; g++)
                    if (gates) store(gates, it.in(now, KEPT, g), pack(kept[g]), it.real);
#endif
            }
#if TURNS > 1
            conclude(use, rank);
#else
            conclude(A, t + 1, rank, exchange);
#endif
        }
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++)
#pragma unroll
        for (int q = 0; q < ITEMS; q++) {
            const Item it = item(q, place.in_turn(turn), batch);
            store(h_last, it.in(it.batch_row), pack(h[turn][q]), h_last ? it.real : 0);
#pragma unroll
            for (int i = 0; i < EXTRA; i++) store(c_last, it.in(it.batch_row, EXTRA, i), pack(c[turn][q][i]), c_last ? it.real : 0);
        }
    leave();
}
