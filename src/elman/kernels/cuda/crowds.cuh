// As teams.cuh, for teams of more blocks than a cluster has: da goes by way of device memory, where it is stored anyway.
//
//     stream      the copy engine brings da of the team's units, 64 units of one gate at a time, to shared memory in the
//                 layout that wgmma reads, as soon as a look at one value of every block that makes them finds it stored
//     multiply    with the block's part of the columns of W_hh
//     meet        shares of dh are stored, and added up by the units' owners, as teams do (shares.cuh)
//
// A larger team reads more of da, and stores and reads fewer shares: of an lstm of 2048 units and 64 rows, on 128 blocks, 64 KB of
// da and twice 32 of shares in teams of eight, where teams of two, which are clusters, store and read 128 of shares each.
//
// As in pairs.cuh a value that was not stored yet when it was copied is EMPTY, a NaN, and makes a NaN of every sum of its row:
// only where there is one has anybody to look closer. All blocks must be on the GPU at once: the launch is cooperative, or refused.
#pragma once
#include "columns.cuh"

constexpr int TEAM_UNITS = MEMBERS * UNITS;                   // whose da a block multiplies
constexpr int CHUNK = 128 / BYTES, CHUNK_BYTES = ROWS * 128;  // units, of a row: what a swizzle spans
constexpr int CHUNKS = GATES * TEAM_UNITS / CHUNK;            // all gates of 64 units, then of the next
constexpr int K_STEPS = 4;                                    // of a chunk: 32 bytes each

static_assert(TEAM_UNITS % CHUNK == 0 && SIZE % CHUNK == 0 && HEADS == 1, "a chunk is one team's, and one gate's");
static_assert(CHUNKS <= 32 && MEMBERS <= 32, "a lane asks for a chunk, and looks for a block's values");
static_assert(SIZE % WIDE == 0 && UNITS % WIDE == 0, "whole items");

// ---- the shared memory of a block: mailboxes of the chunks; chunks, tiles of W' and the ring as columns.cuh has them ----------

constexpr int FULL_AT = 16;
static_assert(FULL_AT + 8 * CHUNKS <= VECTOR_AT, "mailboxes fit before da");

DEVICE int* repeated() { return (int*)shared; }  // how many multiplications were repeated
DEVICE u32 full(int chunk) { return shared_address(shared) + FULL_AT + 8 * chunk; }

// The team's first unit; the first of a chunk, in the team, and its gate.
DEVICE int first_of_team(int rank) { return rank / MEMBERS * TEAM_UNITS; }
DEVICE int unit_of(int chunk) { return chunk / GATES * CHUNK; }
DEVICE int gate_of(int chunk) { return chunk % GATES; }

DEVICE void load_matrix(Matrix& A, const void* W, int rank) {
    load_columns(A, rank, [&](int j, int k) {
        const int i = first_of_team(rank) + unit_of(k / CHUNK) + k % CHUNK, gate = gate_of(k / CHUNK);
        auto element = [&](int i) { return i < SIZE && j < SIZE ? weight((const char*)W, gate, i, j) : 0; };
        return element(i) | element(i + 1) << 16;
    });
}

// ---- da of the team ----------------------------------------------------------------------------------

// Has a chunk brought; one of no units as zeros, which is what lies beyond the array.
DEVICE void ask_for(int chunk, const Exchange& from) {
    const int unit = first_of_team(from.rank) + unit_of(chunk), column = unit < SIZE ? block_of(gate_of(chunk)) * SIZE + unit : STORED_DA * SIZE;
    mailbox_expect(full(chunk), CHUNK_BYTES);
    start_box(shared_address(shared) + VECTOR_AT + chunk * CHUNK_BYTES, from.map, column, from.first_row, from.time, full(chunk));
}

// Whether the value is stored that a block of the team stores last, most likely: of the last item of its busiest warp, the
// last gate. Then, most likely, all are.
DEVICE bool seems_stored(int member, const Exchange& from) {
    constexpr int ROW = (ITEMS - 1) * THREADS / (UNITS / WIDE);
    u32 w[1];
    load_words_past_l1(w, from.vectors + min(ROW, from.rows - 1) * from.pitch + ((STORED_DA - 1) * SIZE + first_of_team(from.rank) + member * UNITS) * BYTES);
    return !any_empty(w);
}

// The first warp asks for all chunks, a lane for each, once the blocks that make it seem to have stored it; a lane looks for a
// block's values.
DEVICE void start_stream(const Exchange& from) {
    if (threadIdx.x >= 32) return;
    const int lane = threadIdx.x, unit = unit_of(lane);
    const u32 makers = lane >= CHUNKS ? 0 : (2u << (unit + CHUNK - 1) / UNITS) - (1u << unit / UNITS);
    const long long start = clock64();
    bool asked = lane >= CHUNKS, stored = lane >= MEMBERS || first_of_team(from.rank) + lane * UNITS >= SIZE;
    while (!__all_sync(~0u, asked)) {
        if (!stored) stored = seems_stored(lane, from);
        const u32 all = __ballot_sync(~0u, stored);
        if (!asked && (all & makers) == makers) {
            ask_for(lane, from);
            asked = true;
        }
        lose_patience(start);
    }
}

// Waits until every value of the team is stored.
DEVICE void await_all(const Exchange& from) {
    constexpr int PER_GATE = TEAM_UNITS * BYTES / 16, PER_ROW = GATES * PER_GATE;
    const long long start = clock64();
    for (int i = threadIdx.x; i < ROWS * PER_ROW; i += THREADS) {
        const int row = i / PER_ROW, gate = i / PER_GATE % GATES, unit = first_of_team(from.rank) + i % PER_GATE * (16 / BYTES);
        if (row >= from.rows || unit >= SIZE) continue;
        u32 w[4];
        do {
            load_words_past_l1(w, from.vectors + row * from.pitch + (block_of(gate) * SIZE + unit) * BYTES);
            lose_patience(start);
        } while (any_empty(w));
    }
    order_before_engines();
}

// ---- products and shares -------------------------------------------------------------------------------

// d = (tile m of the warpgroup's units) x da, multiplication n; the first as da comes.
DEVICE void multiply_tile(float (&d)[ROW_TILES][4], const Matrix& A, int m, int n) {
    const Operand da = Operand::swizzled(shared + VECTOR_AT), tiles = Operand::in_blocks(shared_tile(threadIdx.x / 128, REGISTER_TILES), 1024);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) d[r][i] = 0.0f;
    settle(d);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        if (m == 0) mailbox_wait_here(full(chunk), n % 2);
        if (m == 0 || chunk == 0) sums_begin();
#pragma unroll
        for (int k = 0; k < K_STEPS; k++) {
            const int i = (m * CHUNKS + chunk) * K_STEPS + k;
            const u64 b = da.at(chunk * CHUNK_BYTES + k * 32);
            if (i < REGISTER_TILES) multiply_64(d, A.tile[i < REGISTER_TILES ? i : 0], b);
            else multiply_64(d, tiles.at((i - REGISTER_TILES) * 2048), b);
        }
        if (m == 0 || chunk == CHUNKS - 1) sums_commit();
    }
    sums_wait<0>();
    settle(d);
}

// Whether a value may have been missing: it would show in every unit, so the first of a thread's two tells.
DEVICE bool any_nan(const float (&d)[ROW_TILES][4]) {
    bool any = false;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int i = 0; i < 2; i++) any |= d[r][i] != d[r][i];
    return any;
}

// Shares of step `use`, multiplication n. Whether it was done again: something was missing, or a NaN is the user's. (To store one
// tile while the next is multiplied, with a second set of sums, gained nothing.)
DEVICE bool multiply_and_meet(const Matrix& A, int use, int n, const Exchange& at) {
    const int warp = threadIdx.x / 32;
    float d[ROW_TILES][4];
    bool again = false;
#pragma unroll 1
    for (int round = 0; round < 2; round++) {
        multiply_tile(d, A, 0, n + round);
        if (!__syncthreads_or(round == 0 && any_nan(d))) break;
        again = true;
        await_all(at);
        __syncthreads();
        if (threadIdx.x < CHUNKS) ask_for(threadIdx.x, at);
    }
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        if (m > 0) multiply_tile(d, A, m, n);
        const Meeting meeting(first_unit(warp / 4, m) + warp % 4 * 16, use, at.rank, at);
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) meeting.store(d[r], r, at);
    }
    return again;
}

// ---- a step, in the words of backward.cu ----------------------------------------------------------------

DEVICE void open_exchange() {
    if (threadIdx.x == 0) {
        *repeated() = 0;
        for (int i = 0; i < CHUNKS; i++) mailbox_open(full(i), 1);
        mailboxes_visible();
    }
}

// Multiplies da of the step before, once it is there, and stores shares; what this step reads is fetched meanwhile.
template <class Fetch>
DEVICE void collect(const Matrix& A, int use, const Exchange& from, Fetch fetch) {
    const int before = *repeated();
    fetch();
    start_stream(from);
    if (multiply_and_meet(A, use, use - 1 + before, from) && threadIdx.x == 0) *repeated() = before + 1;
    copied<0>();
    __syncthreads();
}

// The caller stores da where the team reads it.
DEVICE void hand_on(Stored da, const Item& it, int gate, int use, int rank) {}

// After the items of all threads: what the step has fetched is read.
DEVICE void conclude(const Matrix& A, int use, int rank, const Exchange& from) { __syncthreads(); }
