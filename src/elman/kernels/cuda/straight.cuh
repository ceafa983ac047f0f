// As far.cuh, for few rows: the vector goes from device memory (that is, from L2) straight into the registers that
// mma reads it from, and meets no shared memory:
//
//     read        each warp its part of the sum, 16 bytes of a row to a lane; what is still EMPTY is read again
//     multiply    all of the block's rows of W with that part; the warps' sums are added up in shared memory
//
// mma has a lane hold, of two neighbouring tiles of 32 bytes, four words that lie 8 and 16 bytes apart. Which column of
// the sum is which is ours to say, as long as W agrees: here they are the lane's 16 bytes.
// All blocks must be on the GPU at once: the launch is cooperative, or refused.
#pragma once
#include "recurrence.cuh"

constexpr int M = TRANSPOSED ? UNITS : GATES * UNITS;
constexpr int M_TILES = (M + 15) / 16;
constexpr int READS = (SIZE * BYTES + 64 * WARPS - 1) / (64 * WARPS);  // of a lane, for 8 rows: two tiles of one warp each
constexpr int SHARED_TILES = M_TILES * READS * 2 - REGISTER_TILES;
constexpr int CHAINS = M_TILES * ROW_TILES >= 4 ? 1 : M_TILES * ROW_TILES >= 2 ? 2 : 4;

static_assert(!TRANSPOSED || GATES == 1, "one value per unit is read");
static_assert(SIZE * BYTES % 16 == 0 && WARPS_K == WARPS, "16 bytes at a time, a part of the sum to each warp");

// ---- the shared memory of a block: the warps' partial sums, tiles of W, then the ring ----------------------

// Rows of sums begin 0, 16, 8, 24 … banks apart: neither stores of mma's result nor the items' reads meet a bank twice.
constexpr int PARTIAL_PITCH = 16 * (M_TILES + 1 - M_TILES % 2);
constexpr int SLICE = ROWS * (PARTIAL_PITCH + 4);  // floats
constexpr int PARTIALS_AT = 16;
constexpr int WEIGHTS_AT = PARTIALS_AT + WARPS * SLICE * 4;
constexpr int RING_AT = WEIGHTS_AT + WARPS * SHARED_TILES * 512;

DEVICE float* partials(int slice, int row) { return (float*)(shared + PARTIALS_AT) + slice * SLICE + row * PARTIAL_PITCH + row / 2 * 8; }
DEVICE uint4* shared_tiles() { return (uint4*)(shared + WEIGHTS_AT) + threadIdx.x / 32 * SHARED_TILES * 32 + threadIdx.x % 32; }

// The word with columns k (and k + 1) of row m: unit m % UNITS of gate m / UNITS, or of W' unit m.
DEVICE u32 weight_word(const char* W, int rank, int m, int k) {
    const int gate = m / UNITS, i = rank * UNITS + m % UNITS;
    auto element = [&](int k) { return m >= M || k >= SIZE ? 0 : TRANSPOSED ? weight(W, 0, k, i) : weight(W, gate, i, k); };
    if constexpr (BYTES == 4) return element(k);
    return element(k) | element(k + 1) << 16;
}

DEVICE void load_matrix(Matrix& A, const void* W, int rank) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    A.fill(M_TILES * READS * 2, shared_tiles(), [&](u32(&a)[4], int i) {
        const int tile = i / M_TILES, first = (warp * READS + tile / 2) * 64 + tile % 2 * 8;  // byte of the sum
        load_tile(a, lane, [&](int row, int column) {
            const int byte = column * BYTES;
            return weight_word((const char*)W, rank, i % M_TILES * 16 + row, (first + byte % 16 * 4 + byte / 16 * 4) / BYTES);
        });
    });
}

// A lane's words of the vectors of all rows.
struct Words {
    u32 word[READS][ROW_TILES][4];

    // Reads number n of each row, zeros beyond the batch and the vector; AGAIN, where something was missing.
    template <bool AGAIN>
    __device__ __forceinline__ void read(int n, const Exchange& from) {
        const int lane = threadIdx.x % 32, byte = (threadIdx.x / 32 * READS + n) * 64 + lane % 4 * 16;
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            const int row = r * 8 + lane / 4;
            if constexpr (AGAIN) {
                if (any_empty(word[n][r])) load_words_past_l1(word[n][r], from.vectors + row * from.pitch + byte);
            } else {
#pragma unroll
                for (int w = 0; w < 4; w++) word[n][r][w] = 0;
                if (row < from.rows && byte < SIZE * BYTES) load_words_past_l1(word[n][r], from.vectors + row * from.pitch + byte);
            }
        }
    }

    // Reads again whatever is missing, all of it at once, until nothing is.
    __device__ __forceinline__ void complete(const Exchange& from) {
        auto missing = [&] {
            bool any = false;
#pragma unroll
            for (int n = 0; n < READS; n++)
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) any |= any_empty(word[n][r]);
            return __any_sync(~0u, any);
        };
        if (!missing()) return;
        const long long start = clock64();
        do {
#pragma unroll
            for (int n = 0; n < READS; n++) read<true>(n, from);
            lose_patience(start);
        } while (missing());
    }
};

// ---- a step, in the words of forward.cu and backward.cu -------------------------------------------------

DEVICE void open_exchange() {}

// No value is there sooner, not even one's own; and asking for all of them meanwhile would keep L2 from storing them.
DEVICE void rest() { rest(200); }

// Multiplies what step `use` reads, as soon as it is there (step 0 reads what was there before).
template <class Fetch>
DEVICE void collect(const Matrix& A, int use, const Exchange& from, Fetch fetch) {
    Words b;
    if (use > 0) rest();
#pragma unroll
    for (int n = 0; n < READS; n++) b.read<false>(n, from);
    fetch();
    if (use > 0) b.complete(from);
    float d[CHAINS][ROW_TILES][M_TILES][4] = {};
#pragma unroll
    for (int tile = 0; tile < 2 * READS; tile++)
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            u32 a[4];
            A.read(a, tile * M_TILES + m, shared_tiles());
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                const u32(&w)[4] = b.word[tile / 2][r];
                multiply_add(d[tile % CHAINS][r][m], a, operand(w[tile % 2 * 2]), operand(w[tile % 2 * 2 + 1]));
            }
        }
    store_sums(d, threadIdx.x % 32, 0, [&](int row) { return partials(threadIdx.x / 32, row); });
    __syncthreads();
}

// W times the vector, for one gate of an item.
DEVICE void sum(Values& a, const Item& it, int gate, int use, const Exchange&) { gather(a, partials(0, it.row) + gate * UNITS + it.unit, WARPS, SLICE); }

// The caller stores the values where the others read them.
DEVICE void hand_on(Stored values, const Item& it, int gate, int use, int rank) {}

// After the items of all threads: their sums are read.
DEVICE void conclude(const Matrix& A, int use, int rank, const Exchange& from) { __syncthreads(); }
