// h_1 … h_T of one layer, one launch.
//
//     tanh, relu   h = f(x + W h), and linear, without f
//     gru          r, z = σ(x + W h);  n = tanh(x_n + r (W_n h + b_n));  h = (1 - z) n + z h
//     lstm         i, f, o = σ(x + W h);  g = tanh(x + W h);  c = f c + i g;  h = o tanh(c)
//
// where x is the input's share, W_ih x_t + b, computed beforehand for all t in one matrix product, or
// a table whose row ids[t, b] is looked up here. Each step
//
//     multiply     (the block's rows of W) x (the whole of h); WARPS_K warps share each sum
//     act          the equations above, for the block's own units
//     broadcast    their new h to every block of the group
#include "recurrence.cuh"

constexpr int WARPS_M = WARPS / WARPS_K;
constexpr int M = GATES * UNITS;
constexpr int M_TILES = M / 16 / WARPS_M;                                                   // of one warp
constexpr int K_TILES = ((SIZE * BYTES + 31) / 32 + 2 * WARPS_K - 1) / (2 * WARPS_K) * 2;  // likewise, in pairs
constexpr int SHARED_K_TILES = K_TILES - REGISTER_TILES;
constexpr int CHAINS = M_TILES * ROW_TILES >= 4 ? 1 : M_TILES * ROW_TILES >= 2 ? 2 : 4;  // sums in flight hide mma's latency
constexpr u32 EXPECTED = ROWS * HIDDEN * BYTES;

static_assert(M % (16 * WARPS_M) == 0, "rows divide over the warps");
static_assert(REGISTER_TILES % 2 == 0 && REGISTER_TILES <= K_TILES, "tiles are read in pairs");

// ---- the shared memory of a block: two vectors h, the warps' partial sums, tiles of W -------------------

constexpr int SUMMED = WARPS_K * K_TILES * 32;  // bytes of h that the warps read between them
constexpr int PITCH = (SUMMED > HIDDEN * BYTES ? SUMMED : HIDDEN * BYTES) + 16;  // an odd number of 16 bytes: ldmatrix meets no bank twice
constexpr int PARTIAL_PITCH = M + 4;                                             // floats; likewise for the stores of mma's result
constexpr int VECTORS_AT = 16;
constexpr int PARTIALS_AT = VECTORS_AT + 2 * ROWS * PITCH;
constexpr int WEIGHTS_AT = PARTIALS_AT + WARPS_K * ROWS * PARTIAL_PITCH * 4;
static_assert(WEIGHTS_AT + WARPS * SHARED_K_TILES * M_TILES * 512 == SHARED_BYTES, "the plan counts as the kernel does");

DEVICE char* vector(int buffer, int row) { return shared + VECTORS_AT + (buffer * ROWS + row) * PITCH; }
DEVICE float* partials(int slice, int row) { return (float*)(shared + PARTIALS_AT) + (slice * ROWS + row) * PARTIAL_PITCH; }
DEVICE uint4* shared_tile(int warp, int m, int k, int lane) { return (uint4*)(shared + WEIGHTS_AT) + ((warp * SHARED_K_TILES + k) * M_TILES + m) * 32 + lane; }

// ---- multiply -------------------------------------------------------------------------------------

struct Matrix {
    u32 tile[M_TILES][REGISTER_TILES][4];
};

// Row m of the block's slice is unit m % UNITS of gate m / UNITS; columns k (and k + 1) make one word.
DEVICE u32 weight_word(const char* W, int rank, int m, int k) {
    const int gate = m / UNITS, i = rank * UNITS + m % UNITS;
    if constexpr (DTYPE == TF32) return k < SIZE ? weight(W, gate, i, k) : 0;
    if constexpr (SIZE == HIDDEN && SUMMED == SIZE * BYTES) return *(const u32*)(W + (i64)(gate * SIZE + i) * (SIZE * BYTES) + k * BYTES);
    return (k < SIZE ? weight(W, gate, i, k) : 0) | (k + 1 < SIZE ? weight(W, gate, i, k + 1) << 16 : 0);
}

DEVICE void load_matrix(Matrix& A, const void* W, int rank) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, m0 = warp / WARPS_K * M_TILES * 16, k0 = warp % WARPS_K * K_TILES * 32 / BYTES;
    auto load = [&](u32(&a)[4], int m, int k) {
        load_tile(a, lane, [&](int row, int column) { return weight_word((const char*)W, rank, m0 + 16 * m + row, k0 + k * 32 / BYTES + column); });
    };
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int k = 0; k < REGISTER_TILES; k++) load(A.tile[m][k], m, k);
        for (int k = 0; k < SHARED_K_TILES; k++) {
            u32 a[4];
            load(a, m, REGISTER_TILES + k);
            keep_tile(shared_tile(warp, m, k, lane), a);
        }
    }
}

// partials(slice, row)[m] = the warp's share of Σ_k W[m, k] h[row, k].
DEVICE void multiply(const Matrix& A, int buffer) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, m0 = warp / WARPS_K * M_TILES * 16, slice = warp % WARPS_K;
    const u32 from = shared_address(vector(buffer, lane % 8)) + slice * K_TILES * 32 + lane / 8 * 16;
    float d[CHAINS][ROW_TILES][M_TILES][4] = {};
#pragma unroll
    for (int k = 0; k < K_TILES; k += 2) {
        u32 b[ROW_TILES][4];
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) load_fragments(b[r], from + r * 8 * PITCH + k * 32);
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                u32 a[4];
                if (k < REGISTER_TILES) {
#pragma unroll
                    for (int i = 0; i < 4; i++) a[i] = A.tile[m][k < REGISTER_TILES ? k + j : 0][i];
                } else {
                    recall_tile(a, shared_tile(warp, m, k + j - REGISTER_TILES, lane));
                }
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) multiply_add(d[(k + j) % CHAINS][r][m], a, b[r][2 * j], b[r][2 * j + 1]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float sum = d[0][r][m][i];
#pragma unroll
                for (int c = 1; c < CHAINS; c++) sum += d[c][r][m][i];
                partials(slice, r * 8 + lane % 4 * 2 + i % 2)[m0 + 16 * m + lane / 4 + 8 * (i / 2)] = sum;
            }
}

// ---- act ------------------------------------------------------------------------------------------

// New h (and c) of one item from a = W h and x; `kept` is what the backward pass will ask for.
DEVICE void act(const Values (&a)[GATES], const Values (&x)[GATES], const Values& b_n, Values& h, Values& c, Values (&kept)[4]) {
#pragma unroll
    for (int v = 0; v < WIDE; v++) {
        if constexpr (CELL == TANH) h[v] = hyperbolic_tangent(a[0][v] + x[0][v]);
        if constexpr (CELL == RELU) h[v] = fmaxf(a[0][v] + x[0][v], 0.0f);
        if constexpr (CELL == LINEAR) h[v] = a[0][v] + x[0][v];
        if constexpr (CELL == GRU) {
            const float r = sigmoid(a[0][v] + x[0][v]), z = sigmoid(a[1][v] + x[1][v]), u = a[2][v] + b_n[v];
            const float n = hyperbolic_tangent(x[2][v] + r * u);
            h[v] = n + z * (h[v] - n);
            kept[0][v] = r, kept[1][v] = z, kept[2][v] = n, kept[3][v] = u;
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

// ---- broadcast ------------------------------------------------------------------------------------

DEVICE void broadcast(Stored h, const Item& it, int buffer, int rank) {
#pragma unroll
    for (int w = 0; w < Stored::WORDS; w++) h.word[w] = operand(h.word[w]);
#pragma unroll
    for (int i = 0; i < CLUSTER; i++) send(vector(buffer, it.row) + it.layer_unit * BYTES, h.word, buffer, (rank + i) % CLUSTER);
}

// Every block reads the whole of h_0 itself.
DEVICE void load_first_vector(const void* hs, int group, int batch) {
    constexpr int PER_ROW = HIDDEN / WIDE;
    for (int i = threadIdx.x; i < ROWS * PER_ROW; i += THREADS) {
        const int row = i / PER_ROW, b = group * ROWS + row, unit = i % PER_ROW * WIDE;
        Stored h = load<WIDE>(hs, (i64)b * SIZE + unit, b < batch ? max(0, min(WIDE, SIZE - unit)) : 0);
#pragma unroll
        for (int j = 0; j < Stored::WORDS; j++) h.word[j] = operand(h.word[j]);
        store_words(vector(0, row) + unit * BYTES, h.word);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward(const void* W, const void* xs, const i64* ids, const float* b_hn, const i64* lengths, void* hs, float* cs, void* gates, int steps, int batch) {
    const int rank = blockIdx.x % CLUSTER, group = blockIdx.x / CLUSTER;

    Values h[ITEMS], c[ITEMS], b_n[ITEMS];
    Stored x[ITEMS][GATES];
    int length[ITEMS], row[ITEMS];

    // The row of `xs` with x_t: ids[t, b] of the table, or (t, b) of the array.
    auto input_row = [&](const Item& it, int t) {
        const int place = t * batch + it.batch_row;
        return ids && it.real > 0 && t < steps ? (int)ids[place] : place;
    };
    auto load_input = [&](int q, const Item& it, int t) {
#pragma unroll
        for (int g = 0; g < GATES; g++) x[q][g] = load<WIDE>(xs, it.in(row[q], GATES, g), it.real);
        row[q] = input_row(it, t + 1);
    };

#pragma unroll
    for (int q = 0; q < ITEMS; q++) {
        const Item it = item(q, group, rank, batch);
        unpack(load<WIDE>(hs, it.in(it.batch_row), it.real), h[q]);
        if constexpr (CELL == LSTM) load_floats(c[q], cs, it.in(it.batch_row), it.real);
        if constexpr (CELL == GRU) load_floats(b_n[q], b_hn, it.layer_unit, b_hn ? it.real : 0);
        length[q] = lengths && it.real > 0 ? (int)lengths[it.batch_row] : steps;
        row[q] = input_row(it, 0);
        load_input(q, it, 0);
    }
    Matrix A;
    load_matrix(A, W, rank);
    clear(vector(0, 0), 2 * ROWS * PITCH);
    load_first_vector(hs, group, batch);
    open_mailboxes(EXPECTED);
    __syncthreads();

    for (int t = 0; t < steps; t++) {
        if (t > 0) receive(t, EXPECTED);
        multiply(A, t % 2);
        __syncthreads();
#pragma unroll
        for (int q = 0; q < ITEMS; q++) {
            const Item it = item(q, group, rank, batch);
            if (!it.owned) continue;
            Values a[GATES], input[GATES], kept[4] = {}, h_new, c_new;
#pragma unroll
            for (int g = 0; g < GATES; g++) {
                gather(a[g], partials(0, it.row) + g * UNITS + it.unit, WARPS_K, ROWS * PARTIAL_PITCH);
                unpack(x[q][g], input[g]);
            }
#pragma unroll
            for (int v = 0; v < WIDE; v++) h_new[v] = h[q][v], c_new[v] = c[q][v];
            if (t < length[q]) act(a, input, b_n[q], h_new, c_new, kept);
            const Stored stored = pack(h_new);
            if (t + 1 < steps) broadcast(stored, it, (t + 1) % 2, rank);
            unpack(stored, h[q]);  // the state is what was stored, so a sequence can be resumed anywhere
#pragma unroll
            for (int v = 0; v < WIDE; v++) c[q][v] = c_new[v];
            const i64 now = (i64)t * batch + it.batch_row;
            store(hs, it.in(now + batch), stored, it.real);
            if constexpr (CELL == LSTM) store_floats(cs, it.in(now + batch), c[q], it.real);
#pragma unroll
            for (int g = 0; g < KEPT; g++)
                if (gates) store(gates, it.in(now, KEPT, g), pack(kept[g]), it.real);
            if (t + 1 < steps) load_input(q, it, t + 1);  // arrives while h travels
        }
        if constexpr (CLUSTER == 1) __syncthreads();
    }
    leave();
}
