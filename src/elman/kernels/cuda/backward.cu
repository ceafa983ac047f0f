// The gradient of one layer carried back through time, one launch.
//
//     dh_t = dhs_t + ξ_{t+1} (∂h_{t+1}/∂h_t)' dh_{t+1}
//
// and da_t, the gradient of every gate's pre-activation, stored for all t: the gradients of weights,
// biases and inputs are single matrix products with it afterwards.
//
//     tanh   da = dh (1 - h²)          relu   da = dh where h > 0          linear   da = dh
//     gru    dn = dh (1 - z) (1 - n²),  dr = dn u r (1 - r),  dz = dh (h' - n) z (1 - z),  du = dn r
//            with u = W_n h' + b_n; stored as dr dz dn du, since n sees u only through r; the forward
//            pass has kept r, z, (1 - z) (1 - n²), u r (1 - r) and (h' - n) z (1 - z)
//     lstm   dc += dh o (1 - tanh² c);  di df dg do;  dc' = dc f
//
// A row that has ended hands its gradient on untouched. Cells with one gate broadcast da, cells with
// more scatter shares of dh, whichever is less; beyond a cluster either goes by way of device memory.
#define TRANSPOSED 1
#if SINGLE
#include "single.cuh"
#elif PAIRED
#include "pairs.cuh"
#elif CROWDED
#include "crowds.cuh"
#elif HOPPER
#include "teams.cuh"
#elif FAR && PARTNERS
#include "spread.cuh"
#elif STRAIGHT
#include "straight.cuh"
#elif FAR
#include "far.cuh"
#elif CELL == 2 || CELL == 3 || CELL == 5 && OWN_GATES > 1
#include "scatter.cuh"
#else
#include "gather.cuh"
#endif

// What step t left behind, by place in the ring: the loss's direct pull; the gates; h_t, or of an lstm
// c_{t-1} (a gru has all it needs in the gates), or whichever states a described cell looks at; its noise.
#if CELL != OWN
constexpr int LOOKS = CELL == GRU ? 0 : 1;
#endif
enum { DIRECT, FIRST_GATE, STATE = FIRST_GATE + KEPT, NOISE = STATE + LOOKS, FIELDS = NOISE + DRAWN };

typedef Ring<FIELDS, RING_AT> Past;
constexpr int NUMBERS_AT = RING_AT + Past::SIZE_IN_BYTES;
static_assert(NUMBERS_AT + NUMBERS_BYTES == SHARED_BYTES, "the plan counts as the kernel does");

// f(q, item) for all items of a thread.
template <class F>
DEVICE void each_item(const Place& place, int batch, F f) {
#pragma unroll
    for (int q = 0; q < ITEMS; q++) {
        const Item it = item(q, place, batch);
        if (it.owned) f(q, it);
    }
}

// ξ d; a cut (ξ = 0) gives 0 even where d has overflowed.
DEVICE float scale(float d, float xi) { return xi == 0.0f ? 0.0f : xi * d; }

// From dh (complete) to da; `pass` is what dh hands back beside W' da, dc what it hands to c_{t-1}.
#if CELL == OWN
typedef Values Down[PARAMETERS > 0 ? PARAMETERS : 1];  // the pulls on its parameters, summed over time

DEVICE void act(const Item& it, const Values (&past)[FIELDS], float xi, const Values& dh, Values& pass, Values (&dc)[C_STATES], Values (&da)[STORED_DA], Down& down) {
    Values own[NUMBERS > 0 ? NUMBERS : 1], dbefore[EXTRA + 1];
#pragma unroll
    for (int n = 0; n < NUMBERS; n++) load_shared_floats(own[n], number(NUMBERS_AT, n, it.unit));
#pragma unroll
    for (int v = 0; v < WIDE; v++) {
        own_step_back(v, past, own, dh, dc, da, dbefore, down);
        pass[v] = hands_back(0) ? scale(dbefore[0][v], xi) : 0.0f;
#pragma unroll
        for (int i = 0; i < EXTRA; i++) dc[i][v] = hands_back(i + 1) ? scale(dbefore[i + 1][v], xi) : 0.0f;
#pragma unroll
        for (int g = 0; g < STORED_DA; g++)
            if (SIZE < HIDDEN && v >= it.real) da[g][v] = 0.0f;  // of a unit that does not exist
    }
}
#else
DEVICE void act(const Values (&past)[FIELDS], float xi, const Values& dh, Values& pass, Values& dc, const Values& c, Values (&da)[STORED_DA]) {
    const Values &h = past[STATE % FIELDS], &c_before = past[STATE % FIELDS];
    const Values* gate = &past[FIRST_GATE];
#pragma unroll
    for (int v = 0; v < WIDE; v++) {
        pass[v] = 0.0f;
        if constexpr (CELL == TANH) da[0][v] = dh[v] * (1.0f - h[v] * h[v]);
        if constexpr (CELL == RELU) da[0][v] = h[v] > 0.0f ? dh[v] : 0.0f;
        if constexpr (CELL == LINEAR) da[0][v] = dh[v];
        if constexpr (CELL == GRU) {
            const float dn = dh[v] * gate[2][v];
            da[0][v] = dn * gate[3][v];
            da[1][v] = dh[v] * gate[4][v];
            da[2][v] = dn;
            da[3][v] = dn * gate[0][v];
            pass[v] = scale(dh[v] * gate[1][v], xi);
        }
        if constexpr (CELL == LSTM) {
            const float i = gate[0][v], f = gate[1][v], g = gate[2][v], o = gate[3][v], squashed = hyperbolic_tangent(c[v]);
            const float dc_now = dc[v] + dh[v] * o * (1.0f - squashed * squashed);
            da[0][v] = dc_now * g * i * (1.0f - i);
            da[1][v] = dc_now * c_before[v] * f * (1.0f - f);
            da[2][v] = dc_now * i * (1.0f - g * g);
            da[3][v] = dh[v] * squashed * o * (1.0f - o);
            dc[v] = scale(dc_now * f, xi);
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(LAUNCHED, 1)
backward(TRACK_PARAMETER const void* W, const void* hs, const void* cs, const void* gates, const void* dhs, const float* dh_last, const float* dc_last,
         const float* xi, int xi_step, int xi_row, const i64* lengths, void* das, float* dh_first, float* dc_first,
#if CELL == OWN
         const float* numbers, const void* drawn, float* down_rows,
#endif
#if SUMS_DA
         float* da_rows,
#endif
         u32* shares, int steps, int batch, int first_block) {
    const Place place = place_of(first_block + blockIdx.x);
    const int rank = place.rank;
#if CELL == OWN
    auto load_own = [&] { load_numbers(NUMBERS_AT, numbers, place); };
#else
    auto load_own = [] {};
#endif

    // Where da_t of a turn's rows is.
    auto exchange_at = [&](int t, int turn) {
        constexpr int WIDTH = STORED_DA * COLUMNS * BYTES;  // of one row of das
        const int group = place.in_turn(turn).group;
        return Exchange{shares + place.team * SHARES, (const char*)das + ((i64)t * batch + group * ROWS) * WIDTH + place.head * (SIZE * BYTES), WIDTH,
                        batch - group * ROWS, TRACK, group * ROWS, t, rank};
    };
#if TURNS > 1
    const int turns = live_turns(place.group, batch);
    if (!begin_turns(matrix_of(W, place), rank, steps, turns, [&](int step, int turn) { return exchange_at(steps - 1 - step, turn); }, load_own)) return;
#endif

    Values pass[TURNS][ITEMS], dc[TURNS][ITEMS][C_STATES], c[TURNS][ITEMS];
#if CELL == OWN
    Down down[TURNS][ITEMS] = {};
#endif
#if SUMS_DA
    Values total[TURNS][ITEMS][STORED_DA] = {};  // of da over time: the gradient of the biases, row by row
#endif
    float weight_of_sum[TURNS][ITEMS];  // ξ of the step just done, which W' da is weighted with
    int length[TURNS][ITEMS];
#if !SINGLE
    float weight_next[TURNS][ITEMS];  // ξ of the next step
    auto weight_at = [&](const Item& it, int t) { return xi && it.real > 0 && t >= 0 ? xi[(i64)t * xi_step + (i64)it.batch_row * xi_row] : 1.0f; };
#endif
    auto fetch = [&](int done, int turn) {
        const int t = steps - 1 - done, use = done * TURNS + turn;
        if (t >= 0)
#pragma unroll
            for (int q = 0; q < PIECES; q++) {
                const Item it = piece(q, place.in_turn(turn), batch);
                if (SINGLE ? it.real == 0 : !it.owned) continue;
                const i64 now = (i64)t * batch + it.batch_row;
                Past::fetch(use, DIRECT, q, dhs, it.in(now), dhs ? it.real : 0);
#if CELL == OWN
#pragma unroll
                for (int i = 0; i < LOOKS; i++) {
                    const i64 when = now + (looks_after(i) ? batch : 0);
                    if (looked_at(i) == 0) Past::fetch(use, STATE + i, q, hs, it.in(when), it.real);
                    else Past::fetch(use, STATE + i, q, cs, it.in(when, EXTRA, looked_at(i) - 1), it.real);
                }
#pragma unroll
                for (int n = 0; n < DRAWN; n++) Past::fetch(use, NOISE + n, q, drawn, it.in(now, DRAWN, n), it.real);
#else
                if constexpr (STATE < FIELDS) Past::fetch(use, STATE, q, CELL == LSTM ? cs : hs, it.in(CELL == LSTM ? now : now + batch), it.real);
#endif
#pragma unroll
                for (int g = 0; g < KEPT; g++) Past::fetch(use, FIRST_GATE + g, q, gates, it.in(now, KEPT, g), it.real);
            }
        mark_copies();
    };

#if SINGLE
    begin();
    if (is_carrier()) {
        const Item its = piece(0, place, batch);  // of its row
        auto fetch_all = [&](int done) {
            const i64 t = steps - 1 - done;
            if (xi && its.has_row && is_first_of_row() && t >= 0) start_copy<4>(word_of(done, its.row), xi + t * xi_step + (i64)its.batch_row * xi_row, true);
            fetch(done, 0);
        };
        auto send = [&](int done) {
            if (!its.has_row) return;
            const i64 now = (i64)(steps - 1 - done) * batch + its.batch_row;
#pragma unroll
            for (int q = 0; q < PIECES; q++) {
                const Item it = piece(q, place, batch);
                if (it.real == 0) continue;
#pragma unroll
                for (int g = 0; g < STORED_DA; g++) ship(done, g, q, das, it.in(now, STORED_DA, g));
            }
        };
        return carry(steps, fetch_all, send);
    }
#else
    for (int done = 0; done < max(AHEAD / TURNS, 1); done++)
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) fetch(done, turn);
#endif
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++)
#pragma unroll
        for (int q = 0; q < ITEMS; q++) {
            const Item it = item(q, place.in_turn(turn), batch);
            load_floats(pass[turn][q], dh_last, it.in(it.batch_row), dh_last ? it.real : 0);
#pragma unroll
            for (int i = 0; i < EXTRA; i++) load_floats(dc[turn][q][i], dc_last, it.in(it.batch_row, EXTRA, i), dc_last ? it.real : 0);
            if constexpr (CELL == LSTM) unpack(load<WIDE>(cs, it.in((i64)steps * batch + it.batch_row), it.real), c[turn][q]);
            length[turn][q] = lengths && it.real > 0 ? (int)lengths[it.batch_row] : steps;
            weight_of_sum[turn][q] = 0.0f;
#if !SINGLE
            weight_next[turn][q] = weight_at(it, steps - 1);
#endif
        }

    // A step of one item, piece by piece: what the forward pass left; dh_t without the loss's direct pull; da_t; storing it; and
    // after the last step, dh_0.
    auto take = [&](int done, int turn, int q, Values (&past)[FIELDS]) {
#pragma unroll
        for (int f = 0; f < FIELDS; f++) Past::take(past[f], done * TURNS + turn, f, q);
    };
    auto add_pass = [&](int turn, int q, Values& dh) {
#pragma unroll
        for (int v = 0; v < WIDE; v++) dh[v] = scale(dh[v], weight_of_sum[turn][q]) + pass[turn][q][v];
    };
    auto step_back = [&](int turn, int q, const Item& it, int t, const Values (&past)[FIELDS], Values& dh, Values (&da)[STORED_DA]) {
#if SINGLE
        weight_of_sum[turn][q] = xi ? __uint_as_float(*word_of(steps - 1 - t, it.row)) : 1.0f;
#else
        weight_of_sum[turn][q] = weight_next[turn][q];
        weight_next[turn][q] = weight_at(it, t - 1);
#endif
#pragma unroll
        for (int v = 0; v < WIDE; v++) dh[v] += past[DIRECT][v];
        if (t < length[turn][q]) {
#if CELL == OWN
            act(it, past, weight_of_sum[turn][q], dh, pass[turn][q], dc[turn][q], da, down[turn][q]);
#else
            act(past, weight_of_sum[turn][q], dh, pass[turn][q], dc[turn][q][0], c[turn][q], da);
#endif
#if SUMS_DA
#pragma unroll
            for (int g = 0; g < STORED_DA; g++)
#pragma unroll
                for (int v = 0; v < WIDE; v++) total[turn][q][g][v] += da[g][v];
#endif
        } else {
#pragma unroll
            for (int v = 0; v < WIDE; v++) pass[turn][q][v] = dh[v];
        }
        if constexpr (CELL == LSTM)
#pragma unroll
            for (int v = 0; v < WIDE; v++) c[turn][q][v] = past[STATE][v];
    };
    auto hand_back = [&](int done, int q, int t, const Item& it, const Values (&da)[STORED_DA]) {
        Stored stored[STORED_DA];
#pragma unroll
        for (int g = 0; g < STORED_DA; g++) stored[g] = told_from_empty(pack(da[g]));
#pragma unroll
        for (int g = 0; g < GATES; g++) hand_on(stored[block_of(g)], it, g, done + 1, rank);
#pragma unroll
        for (int g = 0; g < STORED_DA; g++)
#if SINGLE
            leave_behind(done, g, q, stored[g]);
#else
            store(das, it.in((i64)t * batch + it.batch_row, STORED_DA, g), stored[g], it.real);
#endif
    };
    auto finish = [&](int turn, int q, const Item& it, const Values& dh) {
        store_floats(dh_first, it.in(it.batch_row), dh, dh_first ? it.real : 0);
#pragma unroll
        for (int i = 0; i < EXTRA; i++) store_floats(dc_first, it.in(it.batch_row, EXTRA, i), dc[turn][q][i], dc_first ? it.real : 0);
#if SUMS_DA
#pragma unroll
        for (int g = 0; g < STORED_DA; g++) store_floats(da_rows, it.in(it.batch_row, STORED_DA, g), total[turn][q][g], it.real);
#endif
#if CELL == OWN
#pragma unroll
        for (int p = 0; p < PARAMETERS; p++) store_floats(down_rows, it.in(it.batch_row, PARAMETERS, p), down[turn][q][p], it.real);
#endif
    };

#if TURNS > 1
    for (int done = 0; done <= steps; done++)
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            const int t = steps - 1 - done;
            const Place its = place.in_turn(turn);
            const Exchange exchange = exchange_at(t + 1, turn);
            if (turn >= turns) {  // no row of the batch is left for it
                mark_copies();
                continue;
            }
            const int use = (done - 1) * turns + turn;
            if (done > 0) collect(use, [&] { fetch(done + 1, turn); });
            else fetch(1, turn);
            copied<AHEAD>();
            Values dh[ITEMS] = {}, past[ITEMS][FIELDS], da[ITEMS][STORED_DA] = {};  // all read before one is stored: no load passes a store
            if (done > 0) each_item(its, batch, [&](int q, const Item& it) { sum(dh[q], it, 0, use, exchange); });
            if (done < steps) each_item(its, batch, [&](int q, const Item& it) { take(done, turn, q, past[q]); });
            each_item(its, batch, [&](int q, const Item& it) { add_pass(turn, q, dh[q]); });
            if (done < steps) {
                each_item(its, batch, [&](int q, const Item& it) { step_back(turn, q, it, t, past[q], dh[q], da[q]); });
                each_item(its, batch, [&](int q, const Item& it) { hand_back(done, q, t, it, da[q]); });
            } else each_item(its, batch, [&](int q, const Item& it) { finish(turn, q, it, dh[q]); });
            if (done > 0) conclude(use, rank);
        }
#else
    Matrix A;
    load_matrix(A, matrix_of(W, place), rank);
    open_exchange();
    load_own();
    if (AHEAD == 0) copied<0>();
    meet();

    for (int done = 0; done <= steps; done++) {
        const int t = steps - 1 - done;
        const Exchange exchange = exchange_at(t + 1, 0);
#if SINGLE
        const Sums sums = multiply(A, done);  // at first with zeros
#else
        if (done > 0) collect(A, done, exchange, [&] { fetch(done + AHEAD, 0); });
        else if (AHEAD > 0) fetch(AHEAD, 0);
        if (AHEAD > 0) copied<AHEAD>();
#endif
#pragma unroll
        for (int q = 0; q < ITEMS; q++) {  // one after the other: registers are few, and another order takes longer
            const Item it = item(q, place, batch);
            if (!it.owned) continue;
            Values dh = {}, past[FIELDS], da[STORED_DA] = {};
#if SINGLE
            take_sum(dh, sums, 0, q);
#else
            if (done > 0) sum(dh, it, 0, done, exchange);
#endif
            add_pass(0, q, dh);
            if (done == steps) {
                finish(0, q, it, dh);
                continue;
            }
            take(done, 0, q, past);
            step_back(0, q, it, t, past, dh, da);
            hand_back(done, q, t, it, da);
        }
        if (done == steps) break;
#if HOPPER && !PAIRED && !CROWDED
        conclude(A, done + 1, rank, exchange, [&] { fetch(done + 1, 0); });
#else
        conclude(A, done + 1, rank, exchange);
#endif
    }
#endif
    leave();
}
