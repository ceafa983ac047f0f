// The gradient of one layer carried back through time, one launch.
//
//     dh_t = dhs_t + ξ_{t+1} (∂h_{t+1}/∂h_t)' dh_{t+1}
//
// and da_t, the gradient of every gate's pre-activation, stored for all t: the gradients of weights,
// biases and inputs are single matrix products with it afterwards.
//
//     tanh   da = dh (1 - h²)          relu   da = dh where h > 0          linear   da = dh
//     gru    dn = dh (1 - z) (1 - n²),  dr = dn u r (1 - r),  dz = dh (h' - n) z (1 - z),  du = dn r
//            with u = W_n h' + b_n; stored as dr dz dn du, since n sees u only through r
//     lstm   dc += dh o (1 - tanh² c);  di df dg do;  dc' = dc f
//
// A row that has ended hands its gradient on untouched. Each step
//
//     act         sums the shares of dh that have arrived; da of the block's own units
//     multiply    W' da over the block's own gates: a share of dh for every unit of the layer
//     scatter     each share, as soon as it is known, to the block that owns the unit
#include "recurrence.cuh"

constexpr int STORED_DA = CELL == LSTM || CELL == GRU ? 4 : 1;
constexpr int TILES = HIDDEN / 16;                         // of units of the layer
constexpr int M_TILES = (TILES + WARPS - 1) / WARPS;       // of one warp
constexpr int K_TILES = (GATES * UNITS * BYTES + 63) / 64 * 2;  // the block's gates, in pairs of tiles
constexpr int SHARED_M_TILES = M_TILES - REGISTER_TILES;
constexpr int CHAINS = ROW_TILES > 1 ? 1 : 2;
constexpr u32 EXPECTED = CLUSTER * ROWS * UNITS * 4;

static_assert(UNITS % 16 == 0, "a tile of units has one owner");

// ---- the shared memory of a block: da of its gates, two inboxes of shares, tiles of W ---------------------

constexpr int PITCH = K_TILES * 32 + 16;
constexpr int SHARE_PITCH = UNITS + 4;  // floats
constexpr int VECTOR_AT = 16;
constexpr int INBOXES_AT = VECTOR_AT + ROWS * PITCH;
constexpr int WEIGHTS_AT = INBOXES_AT + 2 * CLUSTER * ROWS * SHARE_PITCH * 4;
static_assert(WEIGHTS_AT + WARPS * SHARED_M_TILES * K_TILES * 512 == SHARED_BYTES, "the plan counts as the kernel does");

DEVICE char* vector(int row) { return shared + VECTOR_AT + row * PITCH; }
DEVICE float* share(int buffer, int from, int row) { return (float*)(shared + INBOXES_AT) + ((buffer * CLUSTER + from) * ROWS + row) * SHARE_PITCH; }
DEVICE uint4* shared_tile(int warp, int m, int k, int lane) { return (uint4*)(shared + WEIGHTS_AT) + ((warp * SHARED_M_TILES + m) * K_TILES + k) * 32 + lane; }

// ---- multiply and scatter ---------------------------------------------------------------------------

struct Matrix {
    u32 tile[REGISTER_TILES ? REGISTER_TILES : 1][K_TILES][4];
};

// The m-th tile of units this warp multiplies: the next block's units first, the own ones last, so that
// blocks do not all send to one. -1 where there is none left.
DEVICE int tile_of(int rank, int warp, int m) {
    const int i = m * WARPS + warp;
    return TILES % WARPS && i >= TILES ? -1 : (i + (rank + 1) * (UNITS / 16)) % TILES;
}

// Row j of W' is unit j; columns k (and k + 1) are gate k / UNITS of unit k % UNITS of this block.
DEVICE u32 weight_word(const char* W, int rank, int j, int k) {
    auto element = [&](int k) { return K_TILES * 32 == GATES * UNITS * BYTES || k < GATES * UNITS ? weight(W, k / UNITS, rank * UNITS + k % UNITS, j) : 0; };
    if constexpr (DTYPE == TF32) return element(k);
    return element(k) | element(k + 1) << 16;
}

DEVICE void load_matrix(Matrix& A, const void* W, int rank) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto load = [&](u32(&a)[4], int m, int k) {
        const int tile = max(0, tile_of(rank, warp, m));
        load_tile(a, lane, [&](int row, int column) { return weight_word((const char*)W, rank, tile * 16 + row, k * 32 / BYTES + column); });
    };
#pragma unroll
    for (int m = 0; m < REGISTER_TILES; m++)
#pragma unroll
        for (int k = 0; k < K_TILES; k++) load(A.tile[m][k], m, k);
    for (int m = 0; m < SHARED_M_TILES; m++)
        for (int k = 0; k < K_TILES; k++) {
            u32 a[4];
            load(a, REGISTER_TILES + m, k);
            keep_tile(shared_tile(warp, m, k, lane), a);
        }
}

// Sends one tile of shares. mma leaves a thread two rows of one unit; neighbours swap one each, so
// that it has two units of one row.
DEVICE void scatter(const float (&d)[4], int tile, int row_tile, int buffer, int rank) {
    const int lane = threadIdx.x % 32, odd = lane / 4 % 2, to = tile / (UNITS / 16), unit = tile % (UNITS / 16) * 16 + lane / 4 - odd;
    const int row = row_tile * 8 + lane % 4 * 2 + odd;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float even_row = d[2 * half], odd_row = d[2 * half + 1];
        const float swapped = __shfl_xor_sync(~0u, odd ? even_row : odd_row, 4);
        const u32 pair[2] = {__float_as_uint(odd ? swapped : even_row), __float_as_uint(odd ? odd_row : swapped)};
        send(share(buffer, rank, row) + unit + 8 * half, pair, buffer, to);
    }
}

DEVICE void multiply_and_scatter(const Matrix& A, int buffer, int rank) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 from = shared_address(vector(lane % 8)) + lane / 8 * 16;
#pragma unroll
    for (int m = 0; m < M_TILES; m += 2) {  // two tiles at a time keep the tensor cores busy
        float d[2][CHAINS][ROW_TILES][4] = {};
#pragma unroll
        for (int k = 0; k < K_TILES; k += 2) {
            u32 b[ROW_TILES][4];
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) load_fragments(b[r], from + r * 8 * PITCH + k * 32);
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int h = 0; h < 2 && m + h < M_TILES; h++) {
                    u32 a[4];
                    if (m + h < REGISTER_TILES) {
#pragma unroll
                        for (int i = 0; i < 4; i++) a[i] = A.tile[m + h < REGISTER_TILES ? m + h : 0][k + j][i];
                    } else {
                        recall_tile(a, shared_tile(warp, m + h - REGISTER_TILES, k + j, lane));
                    }
#pragma unroll
                    for (int r = 0; r < ROW_TILES; r++) multiply_add(d[h][(k + j) % CHAINS][r], a, b[r][2 * j], b[r][2 * j + 1]);
                }
        }
#pragma unroll
        for (int h = 0; h < 2 && m + h < M_TILES; h++) {
            const int tile = tile_of(rank, warp, m + h);
            if (tile < 0) continue;
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
                for (int c = 1; c < CHAINS; c++)
#pragma unroll
                    for (int i = 0; i < 4; i++) d[h][0][r][i] += d[h][c][r][i];
                scatter(d[h][0][r], tile, r, buffer, rank);
            }
        }
    }
}

// ---- act ------------------------------------------------------------------------------------------

// What step t left behind for one item.
struct Past {
    Stored dh, h;  // the loss's direct pull; h_t, for a gru h_{t-1}
    Stored gate[KEPT ? KEPT : 1];
    Values c;  // c_{t-1}
    float xi;
};

// ξ d; a cut (ξ = 0) gives 0 even where d has overflowed.
DEVICE float scale(float d, float xi) { return xi == 0.0f ? 0.0f : xi * d; }

// From dh (complete) to da; `pass` is what dh hands back beside W' da, dc what it hands to c_{t-1}.
DEVICE void act(const Past& p, const Values& dh, Values& pass, Values& dc, const Values& c, Values (&da)[STORED_DA]) {
    Values h, gate[KEPT ? KEPT : 1];
    unpack(p.h, h);
#pragma unroll
    for (int g = 0; g < KEPT; g++) unpack(p.gate[g], gate[g]);
#pragma unroll
    for (int v = 0; v < WIDE; v++) {
        pass[v] = 0.0f;
        if constexpr (CELL == TANH) da[0][v] = dh[v] * (1.0f - h[v] * h[v]);
        if constexpr (CELL == RELU) da[0][v] = h[v] > 0.0f ? dh[v] : 0.0f;
        if constexpr (CELL == LINEAR) da[0][v] = dh[v];
        if constexpr (CELL == GRU) {
            const float r = gate[0][v], z = gate[1][v], n = gate[2][v], u = gate[3][v];
            const float dn = dh[v] * (1.0f - z) * (1.0f - n * n);
            da[0][v] = dn * u * r * (1.0f - r);
            da[1][v] = dh[v] * (h[v] - n) * z * (1.0f - z);
            da[2][v] = dn;
            da[3][v] = dn * r;
            pass[v] = scale(dh[v] * z, p.xi);
        }
        if constexpr (CELL == LSTM) {
            const float i = gate[0][v], f = gate[1][v], g = gate[2][v], o = gate[3][v], squashed = hyperbolic_tangent(c[v]);
            const float dc_now = dc[v] + dh[v] * o * (1.0f - squashed * squashed);
            da[0][v] = dc_now * g * i * (1.0f - i);
            da[1][v] = dc_now * p.c[v] * f * (1.0f - f);
            da[2][v] = dc_now * i * (1.0f - g * g);
            da[3][v] = dh[v] * squashed * o * (1.0f - o);
            dc[v] = scale(dc_now * f, p.xi);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
backward(const void* W, const void* hs, const float* cs, const void* gates, const void* dhs, const void* dh_last, const float* dc_last,
         const float* xi, int xi_step, int xi_row, const i64* lengths, void* das, void* dh_first, float* dc_first, int steps, int batch) {
    const int rank = blockIdx.x % CLUSTER, group = blockIdx.x / CLUSTER;

    Past past[ITEMS];
    Values pass[ITEMS], dc[ITEMS], c[ITEMS];
    float weight_of_share[ITEMS];  // ξ of the step whose shares of dh are under way
    int length[ITEMS];

    auto recall = [&](int q, const Item& it, int t) {
        const i64 now = (i64)t * batch + it.batch_row;
        past[q].dh = load<WIDE>(dhs, it.in(now), dhs ? it.real : 0);
        if constexpr (CELL != LSTM) past[q].h = load<WIDE>(hs, it.in(CELL == GRU ? now : now + batch), it.real);
        if constexpr (CELL == LSTM) load_floats(past[q].c, cs, it.in(now), it.real);
#pragma unroll
        for (int g = 0; g < KEPT; g++) past[q].gate[g] = load<WIDE>(gates, it.in(now, KEPT, g), it.real);
        past[q].xi = xi && it.real > 0 ? xi[(i64)t * xi_step + (i64)it.batch_row * xi_row] : 1.0f;
    };

#pragma unroll
    for (int q = 0; q < ITEMS; q++) {
        const Item it = item(q, group, rank, batch);
        unpack(load<WIDE>(dh_last, it.in(it.batch_row), it.real), pass[q]);
        if constexpr (CELL == LSTM) {
            load_floats(dc[q], dc_last, it.in(it.batch_row), it.real);
            load_floats(c[q], cs, it.in((i64)steps * batch + it.batch_row), it.real);
        }
        length[q] = lengths && it.real > 0 ? (int)lengths[it.batch_row] : steps;
        weight_of_share[q] = 0.0f;
        recall(q, it, steps - 1);
    }
    Matrix A;
    load_matrix(A, W, rank);
    clear(vector(0), ROWS * PITCH);
    open_mailboxes(EXPECTED);

    for (int done = 0; done <= steps; done++) {
        const int t = steps - 1 - done;
        if (done > 0) receive(done, EXPECTED);
#pragma unroll
        for (int q = 0; q < ITEMS; q++) {
            const Item it = item(q, group, rank, batch);
            if (!it.owned) continue;
            Values dh = {};
            if (done > 0) gather(dh, share(done % 2, 0, it.row) + it.unit, CLUSTER, ROWS * SHARE_PITCH);
#pragma unroll
            for (int v = 0; v < WIDE; v++) dh[v] = scale(dh[v], weight_of_share[q]) + pass[q][v];
            if (done == steps) {
                store(dh_first, it.in(it.batch_row), pack(dh), it.real);
                if constexpr (CELL == LSTM) store_floats(dc_first, it.in(it.batch_row), dc[q], it.real);
                continue;
            }
            Values direct, da[STORED_DA] = {};
            unpack(past[q].dh, direct);
#pragma unroll
            for (int v = 0; v < WIDE; v++) dh[v] += direct[v];
            if (t < length[q]) {
                act(past[q], dh, pass[q], dc[q], c[q], da);
            } else {
#pragma unroll
                for (int v = 0; v < WIDE; v++) pass[q][v] = dh[v];
            }
            weight_of_share[q] = past[q].xi;
            if constexpr (CELL == LSTM)
#pragma unroll
                for (int v = 0; v < WIDE; v++) c[q][v] = past[q].c[v];
            Stored stored[STORED_DA];
#pragma unroll
            for (int g = 0; g < STORED_DA; g++) stored[g] = pack(da[g]);
#pragma unroll
            for (int g = 0; g < GATES; g++) {  // W' meets du where W_ih' meets dn
                Stored s = stored[CELL == GRU && g == 2 ? 3 : g];
#pragma unroll
                for (int w = 0; w < Stored::WORDS; w++) s.word[w] = operand(s.word[w]);
                store_words(vector(it.row) + (g * UNITS + it.unit) * BYTES, s.word);
            }
#pragma unroll
            for (int g = 0; g < STORED_DA; g++) store(das, it.in((i64)t * batch + it.batch_row, STORED_DA, g), stored[g], it.real);
            if (t > 0) recall(q, it, t - 1);  // arrives while the shares of dh travel
        }
        if (done == steps) break;
        __syncthreads();
        multiply_and_scatter(A, (done + 1) % 2, rank);
        if constexpr (CLUSTER == 1) __syncthreads();
    }
    leave();
}
