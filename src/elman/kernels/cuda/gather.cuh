// Every block has the whole vector (h forward, da backward) and computes the sums of its own rows:
//
//     multiply     (its M rows of W, or of W') x (the whole vector); WARPS_K warps share each sum
//     broadcast    new values of its units to every block of the group
#pragma once
#include "recurrence.cuh"

constexpr int WARPS_M = WARPS / WARPS_K;
constexpr int M = TRANSPOSED ? UNITS : GATES * UNITS;
constexpr int M_TILES = M / 16 / WARPS_M;                                                   // of one warp
constexpr int K_TILES = ((SIZE * BYTES + 31) / 32 + 2 * WARPS_K - 1) / (2 * WARPS_K) * 2;  // likewise, in pairs
constexpr int SHARED_TILES = M_TILES * K_TILES - REGISTER_TILES;
constexpr int CHAINS = M_TILES * ROW_TILES >= 4 ? 1 : M_TILES * ROW_TILES >= 2 ? 2 : 4;  // sums in flight hide mma's latency
constexpr u32 EXPECTED = ROWS * HIDDEN * BYTES;

static_assert(M % (16 * WARPS_M) == 0, "rows divide over the warps");
static_assert(!TRANSPOSED || GATES == 1, "one value per unit is broadcast");

// ---- the shared memory of a block: two vectors, twice the warps' partial sums, tiles of W, then the ring ---

constexpr int SUMMED = WARPS_K * K_TILES * 32;  // bytes of the vector that the warps read between them
constexpr int PITCH = (SUMMED > HIDDEN * BYTES ? SUMMED : HIDDEN * BYTES) + 16;  // an odd number of 16 bytes: ldmatrix meets no bank twice
constexpr int PARTIAL_PITCH = M + 4;                                             // floats; likewise for the stores of mma's result
constexpr int VECTORS_AT = 16;
constexpr int PARTIALS_AT = VECTORS_AT + 2 * ROWS * PITCH;
constexpr int WEIGHTS_AT = PARTIALS_AT + 2 * WARPS_K * ROWS * PARTIAL_PITCH * 4;
constexpr int RING_AT = WEIGHTS_AT + WARPS * SHARED_TILES * 512;

DEVICE char* vector(int buffer, int row) { return shared + VECTORS_AT + (buffer * ROWS + row) * PITCH; }
DEVICE float* partials(int buffer, int slice, int row) { return (float*)(shared + PARTIALS_AT) + ((buffer * WARPS_K + slice) * ROWS + row) * PARTIAL_PITCH; }
DEVICE uint4* shared_tiles() { return (uint4*)(shared + WEIGHTS_AT) + threadIdx.x / 32 * SHARED_TILES * 32 + threadIdx.x % 32; }

// The word with columns k (and k + 1) of row m: unit m % UNITS of gate m / UNITS, or of W' unit m.
DEVICE u32 weight_word(const char* W, int rank, int m, int k) {
    const int gate = m / UNITS, i = rank * UNITS + m % UNITS;
    auto element = [&](int k) { return SUMMED > SIZE * BYTES && k >= SIZE ? 0 : TRANSPOSED ? weight(W, 0, k, i) : weight(W, gate, i, k); };
    if constexpr (BYTES == 4) return element(k);
    if constexpr (!TRANSPOSED && SIZE == HIDDEN && SUMMED == SIZE * BYTES) return *(const u32*)(W + (i64)(gate * COLUMNS + i) * (COLUMNS * BYTES) + k * BYTES);
    return element(k) | element(k + 1) << 16;
}

DEVICE void load_matrix(Matrix& A, const void* W, int rank) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, m0 = warp / WARPS_K * M_TILES * 16, k0 = warp % WARPS_K * K_TILES * 32 / BYTES;
    A.fill(M_TILES * K_TILES, shared_tiles(), [&](u32(&a)[4], int i) {
        load_tile(a, lane, [&](int row, int column) { return weight_word((const char*)W, rank, m0 + i % M_TILES * 16 + row, k0 + i / M_TILES * 32 / BYTES + column); });
    });
}

// partials(buffer, slice, row)[m] = the warp's share of Σ_k W[m, k] vector[row, k].
DEVICE void multiply(const Matrix& A, int buffer) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, m0 = warp / WARPS_K * M_TILES * 16, slice = warp % WARPS_K;
    const u32 from = shared_address(vector(buffer, lane % 8)) + slice * K_TILES * 32 + lane / 8 * 16;
    float d[CHAINS][ROW_TILES][M_TILES][4] = {};
    multiply_all<K_TILES, PITCH>(d, A, shared_tiles(), from);
    store_sums(d, lane, m0, [&](int row) { return partials(buffer, slice, row); });
}

// ---- a step, in the words of forward.cu and backward.cu -------------------------------------------------

DEVICE void open_exchange() {
    clear(vector(0, 0), 2 * ROWS * PITCH);
    open_mailboxes(EXPECTED);
}

// Receives what step `use` reads (step 0 reads what is there) and multiplies.
template <class Fetch>
DEVICE void collect(const Matrix& A, int use, const Exchange&, Fetch fetch) {
    fetch();
    if (use > 0) receive(use, EXPECTED);
    multiply(A, use % 2);
    __syncthreads();
}

// W times the vector, for one gate of an item.
DEVICE void sum(Values& a, const Item& it, int gate, int use, const Exchange&) { gather(a, partials(use % 2, 0, it.row) + gate * UNITS + it.unit, WARPS_K, ROWS * PARTIAL_PITCH); }

// Gives new values of an item to step `use`.
DEVICE void hand_on(Stored values, const Item& it, int gate, int use, int rank) {
#pragma unroll
    for (int w = 0; w < Stored::WORDS; w++) values.word[w] = operand(values.word[w]);
#pragma unroll
    for (int i = 0; i < CLUSTER; i++) send(vector(use % 2, it.row) + it.layer_unit * BYTES, values.word, use % 2, (rank + i) % CLUSTER);
}

// After the items of all threads.
DEVICE void conclude(const Matrix& A, int use, int rank, const Exchange&) {
    if constexpr (CLUSTER == 1) __syncthreads();
}
