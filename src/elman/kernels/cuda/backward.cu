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
#if PAIRED
#include "pairs.cuh"
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

extern "C" __global__ void __launch_bounds__(THREADS, 1)
backward(TRACK_PARAMETER const void* W, const void* hs, const void* cs, const void* gates, const void* dhs, const float* dh_last, const float* dc_last,
         const float* xi, int xi_step, int xi_row, const i64* lengths, void* das, float* dh_first, float* dc_first,
#if CELL == OWN
         const float* numbers, const void* drawn, float* down_rows,
#endif
         u32* shares, int steps, int batch, int first_block) {
    const Place place = place_of(first_block + blockIdx.x);
    const int rank = place.rank, group = place.group;

    Values pass[ITEMS], dc[ITEMS][C_STATES], c[ITEMS];
#if CELL == OWN
    Down down[ITEMS] = {};
#endif
    float weight_of_sum[ITEMS], weight_next[ITEMS];  // ξ of the step just done, which W' da is weighted with, and of the next
    int length[ITEMS];

    auto weight_at = [&](const Item& it, int t) { return xi && it.real > 0 && t >= 0 ? xi[(i64)t * xi_step + (i64)it.batch_row * xi_row] : 1.0f; };
    auto fetch = [&](int done) {
        const int t = steps - 1 - done;
        if (t >= 0)
#pragma unroll
            for (int q = 0; q < PIECES; q++) {
                const Item it = item<PIECE>(q, place, batch);
                if (!it.owned) continue;
                const i64 now = (i64)t * batch + it.batch_row;
                Past::fetch(done, DIRECT, q, dhs, it.in(now), dhs ? it.real : 0);
#if CELL == OWN
#pragma unroll
                for (int i = 0; i < LOOKS; i++) {
                    const i64 when = now + (looks_after(i) ? batch : 0);
                    if (looked_at(i) == 0) Past::fetch(done, STATE + i, q, hs, it.in(when), it.real);
                    else Past::fetch(done, STATE + i, q, cs, it.in(when, EXTRA, looked_at(i) - 1), it.real);
                }
#pragma unroll
                for (int n = 0; n < DRAWN; n++) Past::fetch(done, NOISE + n, q, drawn, it.in(now, DRAWN, n), it.real);
#else
                if constexpr (STATE < FIELDS) Past::fetch(done, STATE, q, CELL == LSTM ? cs : hs, it.in(CELL == LSTM ? now : now + batch), it.real);
#endif
#pragma unroll
                for (int g = 0; g < KEPT; g++) Past::fetch(done, FIRST_GATE + g, q, gates, it.in(now, KEPT, g), it.real);
            }
        mark_copies();
    };

    for (int done = 0; done < max(AHEAD, 1); done++) fetch(done);
#pragma unroll
    for (int q = 0; q < ITEMS; q++) {
        const Item it = item(q, place, batch);
        load_floats(pass[q], dh_last, it.in(it.batch_row), dh_last ? it.real : 0);
#pragma unroll
        for (int i = 0; i < EXTRA; i++) load_floats(dc[q][i], dc_last, it.in(it.batch_row, EXTRA, i), dc_last ? it.real : 0);
        if constexpr (CELL == LSTM) unpack(load<WIDE>(cs, it.in((i64)steps * batch + it.batch_row), it.real), c[q]);
        length[q] = lengths && it.real > 0 ? (int)lengths[it.batch_row] : steps;
        weight_of_sum[q] = 0.0f;
        weight_next[q] = weight_at(it, steps - 1);
    }
    Matrix A;
    load_matrix(A, matrix_of(W, place), rank);
    open_exchange();
#if CELL == OWN
    load_numbers(NUMBERS_AT, numbers, place);
#endif
    if (AHEAD == 0) copied<0>();
    __syncthreads();

    for (int done = 0; done <= steps; done++) {
        const int t = steps - 1 - done;
        constexpr int WIDTH = STORED_DA * COLUMNS * BYTES;  // of one row of das
        const Exchange exchange = {shares + place.team * SHARES, (const char*)das + ((i64)(t + 1) * batch + group * ROWS) * WIDTH + place.head * (SIZE * BYTES), WIDTH,
                                   batch - group * ROWS, TRACK, group * ROWS, t + 1, rank};
        if (done > 0) collect(A, done, exchange, [&] { fetch(done + AHEAD); });
        else if (AHEAD > 0) fetch(AHEAD);
        if (AHEAD > 0) copied<AHEAD>();
#pragma unroll
        for (int q = 0; q < ITEMS; q++) {
            const Item it = item(q, place, batch);
            if (!it.owned) continue;
            Values dh = {}, past[FIELDS], da[STORED_DA] = {};
            if (done > 0) sum(dh, it, 0, done, exchange);
#pragma unroll
            for (int v = 0; v < WIDE; v++) dh[v] = scale(dh[v], weight_of_sum[q]) + pass[q][v];
            if (done == steps) {
                store_floats(dh_first, it.in(it.batch_row), dh, dh_first ? it.real : 0);
#pragma unroll
                for (int i = 0; i < EXTRA; i++) store_floats(dc_first, it.in(it.batch_row, EXTRA, i), dc[q][i], dc_first ? it.real : 0);
#if CELL == OWN
#pragma unroll
                for (int p = 0; p < PARAMETERS; p++) store_floats(down_rows, it.in(it.batch_row, PARAMETERS, p), down[q][p], it.real);
#endif
                continue;
            }
#pragma unroll
            for (int f = 0; f < FIELDS; f++) Past::take(past[f], done, f, q);
            weight_of_sum[q] = weight_next[q];
            weight_next[q] = weight_at(it, t - 1);
#pragma unroll
            for (int v = 0; v < WIDE; v++) dh[v] += past[DIRECT][v];
            if (t < length[q]) {
#if CELL == OWN
                act(it, past, weight_of_sum[q], dh, pass[q], dc[q], da, down[q]);
#else
                act(past, weight_of_sum[q], dh, pass[q], dc[q][0], c[q], da);
#endif
            } else {
#pragma unroll
                for (int v = 0; v < WIDE; v++) pass[q][v] = dh[v];
            }
            if constexpr (CELL == LSTM)
#pragma unroll
                for (int v = 0; v < WIDE; v++) c[q][v] = past[STATE][v];
            Stored stored[STORED_DA];
#pragma unroll
            for (int g = 0; g < STORED_DA; g++) stored[g] = told_from_empty(pack(da[g]));
#pragma unroll
            for (int g = 0; g < GATES; g++) hand_on(stored[block_of(g)], it, g, done + 1, rank);
#pragma unroll
            for (int g = 0; g < STORED_DA; g++) store(das, it.in((i64)t * batch + it.batch_row, STORED_DA, g), stored[g], it.real);
        }
        if (done == steps) break;
#if HOPPER && !PAIRED
        conclude(A, done + 1, rank, exchange, [&] { fetch(done + 1); });
#else
        conclude(A, done + 1, rank, exchange);
#endif
    }
    leave();
}
