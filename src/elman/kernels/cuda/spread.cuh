// As scatter.cuh, for layers that fit no cluster. A group is TEAMS teams of PARTNERS blocks, each team a cluster:
//
//     share da    a block has the gradients of the gates of its own units and copies them to its partners
//     multiply    W' da over the team's gates, for the block's part of all units: 1 / PARTNERS of them
//     meet        this share of dh is stored in device memory, where the owners of the units add up those of
//                 all teams, in one order
//
// So a block holds a square-ish piece of the matrix and reads little: of da what its team has made, of dh TEAMS
// shares of its own units. All blocks must be on the GPU at once: the launch is cooperative, or refused.
#pragma once
#include "shares.cuh"

constexpr int M_TILES = (TILES_EACH + WARPS - 1) / WARPS;            // of units, of one warp
constexpr int TEAM_UNITS = PARTNERS * UNITS;                         // whose da a block has
constexpr int K_TILES = (GATES * TEAM_UNITS * BYTES + 63) / 64 * 2;  // their gates, in pairs of tiles
constexpr int SHARED_TILES = M_TILES * K_TILES - REGISTER_TILES;
constexpr int TOGETHER = ROW_TILES < 4 ? ROW_TILES : 4;  // row tiles multiplied with one reading of the weights
constexpr int CHAINS = TOGETHER > 1 ? 1 : 2;
constexpr int OWN_BYTES = GATES * UNITS * BYTES;  // of one row: da of the block's own units
constexpr u32 EXPECTED = ROWS * (PARTNERS - 1) * OWN_BYTES;

static_assert(TRANSPOSED && CLUSTER % PARTNERS == 0 && SIZE * BYTES % 16 == 0, "whole teams, whole items");
static_assert(ROW_TILES % TOGETHER == 0 && OWN_BYTES % 16 == 0, "row tiles in whole batches, copies of 16 bytes");

// ---- the shared memory of a block: twice da of the team's gates, tiles of W, then the ring ---------------------------

constexpr int PITCH = K_TILES * 32 + 16;
constexpr int VECTORS_AT = 16;
constexpr int WEIGHTS_AT = VECTORS_AT + 2 * ROWS * PITCH;
constexpr int RING_AT = WEIGHTS_AT + WARPS * SHARED_TILES * 512;

DEVICE char* vector(int buffer, int row) { return shared + VECTORS_AT + (buffer * ROWS + row) * PITCH; }
DEVICE uint4* shared_tiles() { return (uint4*)(shared + WEIGHTS_AT) + threadIdx.x / 32 * SHARED_TILES * 32 + threadIdx.x % 32; }

// Row j of W' is unit j; columns k (and k + 1) are the gates of the first partner's units, gate by gate, then the next's.
DEVICE u32 weight_word(const char* W, int rank, int j, int k) {
    auto element = [&](int k) {
        const int partner = k / (GATES * UNITS), gate = k / UNITS % GATES, i = rank / PARTNERS * TEAM_UNITS + partner * UNITS + k % UNITS;
        return partner < PARTNERS && i < SIZE && j < SIZE ? weight(W, gate, i, j) : 0;
    };
    if constexpr (BYTES == 4) return element(k);
    return element(k) | element(k + 1) << 16;
}

DEVICE void load_matrix(Matrix& A, const void* W, int rank) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    A.fill(M_TILES * K_TILES, shared_tiles(), [&](u32(&a)[4], int i) {
        const int tile = i / K_TILES * WARPS + warp, j = (rank % PARTNERS * TILES_EACH + tile) * 16;
        load_tile(a, lane, [&](int row, int column) { return weight_word((const char*)W, rank, tile < TILES_EACH ? j + unit_of_row(row) : SIZE, i % K_TILES * 32 / BYTES + column); });
    });
}

DEVICE void multiply_and_meet(const Matrix& A, int use, int rank, const Exchange& at) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 from = shared_address(vector(use % 2, lane % 8)) + lane / 8 * 16;
#pragma unroll
    for (int m = 0; m < M_TILES; m += 2)  // two tiles at a time keep the tensor cores busy
#pragma unroll
        for (int first = 0; first < ROW_TILES; first += TOGETHER) {
            float d[2][CHAINS][TOGETHER][4] = {};
            multiply_two<M_TILES, K_TILES, PITCH>(d, A, shared_tiles(), m, from + first * 8 * PITCH);
#pragma unroll
            for (int h = 0; h < 2 && m + h < M_TILES; h++) {
                const int tile = (m + h) * WARPS + warp;
                if (TILES_EACH % WARPS && tile >= TILES_EACH) continue;
                const Meeting meeting(tile * 16, use, rank, at);
#pragma unroll
                for (int r = 0; r < TOGETHER; r++) {
#pragma unroll
                    for (int c = 1; c < CHAINS; c++)
#pragma unroll
                        for (int i = 0; i < 4; i++) d[h][0][r][i] += d[h][c][r][i];
                    meeting.store(d[h][0][r], first + r, at);
                }
            }
        }
}

// ---- a step, in the words of backward.cu ----------------------------------------------------------------

DEVICE void open_exchange() {
    clear(vector(0, 0), 2 * ROWS * PITCH);
    open_mailboxes(EXPECTED);
}

// No da of step `use` is sent before all warps have done with that of the step before.
template <class Fetch>
DEVICE void collect(const Matrix& A, int use, const Exchange&, Fetch fetch) {
    fetch();
    __syncthreads();
}

DEVICE char* own_da(int buffer, int row, int rank) { return vector(buffer, row) + rank % PARTNERS * OWN_BYTES; }

// Puts one gate's da of an item where the multiplication finds it.
DEVICE void hand_on(Stored da, const Item& it, int gate, int use, int rank) {
#pragma unroll
    for (int w = 0; w < Stored::WORDS; w++) da.word[w] = operand(da.word[w]);
    store_words(own_da(use % 2, it.row, rank) + (gate * UNITS + it.unit) * BYTES, da.word);
}

// Copies the block's da to its partners, 16 bytes at a time: items, of 4 or 8, would take longer on the way.
DEVICE void copy_to_partners(int use, int rank) {
    constexpr int PER_ROW = OWN_BYTES / 16;
    for (int i = threadIdx.x; i < ROWS * PER_ROW; i += THREADS) {
        char* place = own_da(use % 2, i / PER_ROW, rank) + i % PER_ROW * 16;
        u32 w[4];
        load_words(w, place);
#pragma unroll
        for (int p = 1; p < PARTNERS; p++) send(place, w, use % 2, (rank + p) % PARTNERS);
    }
}

// After the items of all threads.
DEVICE void conclude(const Matrix& A, int use, int rank, const Exchange& at) {
    __syncthreads();
    if constexpr (PARTNERS > 1) {
        copy_to_partners(use, rank);
        receive(use, EXPECTED);
    }
    multiply_and_meet(A, use, rank, at);
}
