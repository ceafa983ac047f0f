// What teams.cuh and crowds.cuh share: a block multiplies da of its team's gates with its part of the columns of W_hh, by
// wgmma, 64 units at a time, tiles in registers as far as they reach, then in shared memory.
#pragma once
#include "shares.cuh"
#include "hopper.cuh"

constexpr int WARPGROUPS = WARPS / 4;
constexpr int M_TILES = (TILES_EACH + WARPGROUPS - 1) / WARPGROUPS;  // of units, of one warpgroup
constexpr int K_TILES = (MEMBERS * GATES * UNITS + 15) / 16;
constexpr int SHARED_TILES = M_TILES * K_TILES - REGISTER_TILES;

static_assert(TRANSPOSED && BYTES == 2 && CLUSTER % MEMBERS == 0, "whole teams, half precision");

// The shared memory of a block: mailboxes, da of the team's gates, tiles of W, then the ring.
constexpr int VECTOR_AT = CROWDED ? 1024 : 128;
constexpr int WEIGHTS_AT = VECTOR_AT + K_TILES * ROWS * 32;
constexpr int RING_AT = WEIGHTS_AT + WARPGROUPS * SHARED_TILES * 2048;

// 64 units by 16 columns, blocks of 8 by 16 bytes, those of one column together.
DEVICE char* shared_tile(int group, int i) { return shared + WEIGHTS_AT + (group * SHARED_TILES + i - REGISTER_TILES) * 2048; }

// The first unit, in the block's part, of tile m of a warpgroup; beyond the part where there is none left.
DEVICE int first_unit(int group, int m) { return (m * WARPGROUPS + group) * 64; }

// Fills tiles with words (j, k), columns k and k + 1 of row j of W', that is unit j.
template <class Word>
DEVICE void load_columns(Matrix& A, int rank, Word word_at) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto word = [&](int group, int i, int row, int column) {
        const int j = first_unit(group, i / K_TILES) + unit_of_row(row);
        return word_at(j < PART ? rank % MEMBERS * PART + j : SIZE, i % K_TILES * 16 + column);
    };
#pragma unroll
    for (int i = 0; i < REGISTER_TILES; i++) load_tile(A.tile[i], lane, [&](int row, int column) { return word(warp / 4, i, warp % 4 * 16 + row, column); });
    for (int n = threadIdx.x; n < WARPGROUPS * SHARED_TILES * 128; n += THREADS) {  // 16 bytes each
        const int tile = n / 128, half = n / 64 % 2, row = n % 64, group = tile / (SHARED_TILES > 0 ? SHARED_TILES : 1), i = REGISTER_TILES + tile - group * SHARED_TILES;
        u32 w[4];
#pragma unroll
        for (int c = 0; c < 4; c++) w[c] = word(group, i, row, half * 8 + c * 2);
        store_words(shared_tile(group, i) + half * 1024 + row * 16, w);
    }
    order_before_engines();
}
