// Every block has the gradients of its own gates and computes a share of dh for every unit of the layer:
//
//     multiply    W' da over the block's own gates
//     scatter     each share, as soon as it is known, to the block that owns the unit
//
// Half the traffic of a broadcast for an lstm, whose four gates' da would all have to travel.
#pragma once
#include "recurrence.cuh"

constexpr int TILES = HIDDEN / 16;                              // of units of the layer
constexpr int M_TILES = (TILES + WARPS - 1) / WARPS;            // of one warp
constexpr int K_TILES = (GATES * UNITS * BYTES + 63) / 64 * 2;  // the block's gates, in pairs of tiles
constexpr int SHARED_TILES = M_TILES * K_TILES - REGISTER_TILES;
constexpr int CHAINS = ROW_TILES > 1 ? 1 : 2;
constexpr u32 EXPECTED = CLUSTER * ROWS * UNITS * 4;

static_assert(UNITS % 16 == 0, "a tile of units has one owner");

// ---- the shared memory of a block: twice da of its gates, two inboxes of shares, tiles of W, then the ring -

constexpr int PITCH = K_TILES * 32 + 16;
constexpr int SHARE_PITCH = UNITS + 4;  // floats
constexpr int VECTORS_AT = 16;
constexpr int INBOXES_AT = VECTORS_AT + 2 * ROWS * PITCH;
constexpr int WEIGHTS_AT = INBOXES_AT + 2 * CLUSTER * ROWS * SHARE_PITCH * 4;
constexpr int RING_AT = WEIGHTS_AT + WARPS * SHARED_TILES * 512;

DEVICE char* vector(int buffer, int row) { return shared + VECTORS_AT + (buffer * ROWS + row) * PITCH; }
DEVICE float* share(int buffer, int from, int row) { return (float*)(shared + INBOXES_AT) + ((buffer * CLUSTER + from) * ROWS + row) * SHARE_PITCH; }
DEVICE uint4* shared_tiles() { return (uint4*)(shared + WEIGHTS_AT) + threadIdx.x / 32 * SHARED_TILES * 32 + threadIdx.x % 32; }

// The m-th tile of units this warp multiplies: the next block's units first, the own ones last, so that
// blocks do not all send to one. -1 where there is none left.
DEVICE int tile_of(int rank, int warp, int m) {
    const int i = m * WARPS + warp;
    return TILES % WARPS && i >= TILES ? -1 : (i + (rank + 1) * (UNITS / 16)) % TILES;
}

// Row j of W' is unit j; columns k (and k + 1) are gate k / UNITS of unit k % UNITS of this block.
DEVICE u32 weight_word(const char* W, int rank, int j, int k) {
    auto element = [&](int k) { return K_TILES * 32 == GATES * UNITS * BYTES || k < GATES * UNITS ? weight(W, k / UNITS, rank * UNITS + k % UNITS, j) : 0; };
    if constexpr (BYTES == 4) return element(k);
    return element(k) | element(k + 1) << 16;
}

DEVICE void load_matrix(Matrix& A, const void* W, int rank) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    A.fill(M_TILES * K_TILES, shared_tiles(), [&](u32(&a)[4], int i) {
        const int tile = max(0, tile_of(rank, warp, i / K_TILES));
        load_tile(a, lane, [&](int row, int column) { return weight_word((const char*)W, rank, tile * 16 + row, i % K_TILES * 32 / BYTES + column); });
    });
}

// Sends one tile of shares, each row of it as one delivery of 16 bytes.
DEVICE void scatter(const float (&d)[4], int tile, int row_tile, int buffer, int rank) {
    const FourUnits four(d);
    const int unit = tile % (UNITS / 16) * 16 + four.place.unit;
    send(share(buffer, rank, row_tile * 8 + four.place.row) + unit, four.word, buffer, tile / (UNITS / 16));
}

DEVICE void multiply_and_scatter(const Matrix& A, int use, int rank) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 from = shared_address(vector(use % 2, lane % 8)) + lane / 8 * 16;
#pragma unroll
    for (int m = 0; m < M_TILES; m += 2) {  // two tiles at a time keep the tensor cores busy
        float d[2][CHAINS][ROW_TILES][4] = {};
        multiply_two<M_TILES, K_TILES, PITCH>(d, A, shared_tiles(), m, from);
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
                scatter(d[h][0][r], tile, r, use % 2, rank);
            }
        }
    }
}

// ---- a step, in the words of backward.cu ----------------------------------------------------------------

DEVICE void open_exchange() {
    clear(vector(0, 0), 2 * ROWS * PITCH);
    open_mailboxes(EXPECTED);
}

// Receives the shares that step `use` reads.
template <class Fetch>
DEVICE void collect(const Matrix& A, int use, const Exchange&, Fetch fetch) {
    fetch();
    receive(use, EXPECTED);
}

// W' times all gates' da, for one item.
DEVICE void sum(Values& dh, const Item& it, int gate, int use, const Exchange&) { gather(dh, share(use % 2, 0, it.row) + it.unit, CLUSTER, ROWS * SHARE_PITCH); }

// Puts one gate's da of an item where the multiplication finds it.
DEVICE void hand_on(Stored da, const Item& it, int gate, int use, int rank) {
#pragma unroll
    for (int w = 0; w < Stored::WORDS; w++) da.word[w] = operand(da.word[w]);
    store_words(vector(use % 2, it.row) + (gate * UNITS + it.unit) * BYTES, da.word);
}

// After the items of all threads.
DEVICE void conclude(const Matrix& A, int use, int rank, const Exchange&) {
    __syncthreads();
    multiply_and_scatter(A, use, rank);
    if constexpr (CLUSTER == 1) __syncthreads();
}
