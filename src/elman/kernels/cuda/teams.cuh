// As spread.cuh, by what a Hopper GPU has for it: da goes to the partners in one copy each, in the layout that wgmma
// reads, and wgmma multiplies it with 64 units at a time.
//
// There is one place for da, in the order in which it comes: first the block's own, then that of the partner before it,
// of the one before that... Each is multiplied while the next is on its way. Partners say when they have done with all of
// it, and nothing is sent before all have.
// All blocks must be on the GPU at once: the launch is cooperative, or refused.
#pragma once
#include "columns.cuh"

constexpr int OWN_K = GATES * UNITS;
constexpr int COLUMN_BYTES = ROWS * 16;  // 8 elements of every row: blocks of 8 rows by 16 bytes
constexpr u32 OWN_BYTES = OWN_K / 8 * COLUMN_BYTES;

static_assert(PARTNERS <= WARPS, "a warp for each partner");
static_assert(SIZE % WIDE == 0 && UNITS % WIDE == 0 && OWN_K % 8 == 0, "whole items, whole columns of blocks");

// ---- the shared memory of a block, as columns.cuh has it ------------------------------------------------------------

constexpr int DONE_AT = 16, ARRIVED_AT = 24;
static_assert(ARRIVED_AT + 8 * (PARTNERS - 1) <= VECTOR_AT, "mailboxes fit before da");

DEVICE u32 done() { return shared_address(shared) + DONE_AT; }
DEVICE u32 arrived(int from) { return shared_address(shared) + ARRIVED_AT + 8 * (from - 1); }  // da of the partner so many before
// Element k of a row of da: the gates of the block's own units, gate by gate, then those of the partner before it...
DEVICE char* da_at(int row, int k) { return shared + VECTOR_AT + k / 8 * COLUMN_BYTES + row * 16 + k % 8 * BYTES; }

// Row j of W' is unit j; columns k and k + 1 as da's.
DEVICE u32 weight_word(const char* W, int rank, int j, int k) {
    auto element = [&](int k) {
        const int from = k / OWN_K, partner = (rank + PARTNERS - from) % PARTNERS, gate = k / UNITS % GATES;
        const int i = (rank / PARTNERS * PARTNERS + partner) * UNITS + k % UNITS;
        return from < PARTNERS && i < SIZE && j < SIZE ? weight(W, gate, i, j) : 0;
    };
    return element(k) | element(k + 1) << 16;
}

DEVICE void load_matrix(Matrix& A, const void* W, int rank) {
    load_columns(A, rank, [&](int j, int k) { return weight_word((const char*)W, rank, j, k); });
}

// Of how many partners da is needed for so many tiles along the sum.
DEVICE constexpr int partners_in(int tiles) { return tiles * 16 >= PARTNERS * OWN_K ? PARTNERS : (tiles * 16 + OWN_K - 1) / OWN_K; }

// Waits for da of the partner so many before, of step `use`.
DEVICE void receive_from(int from, int use) {
    mailbox_wait_here(arrived(from), (use - 1) % 2);
    if (threadIdx.x == 0) mailbox_expect(arrived(from), OWN_BYTES);
}

// Starts d = (tile m of the warpgroup's units) x da; the first as da comes.
DEVICE void start_tile(float (&d)[ROW_TILES][4], const Matrix& A, int m, int use) {
    const int group = threadIdx.x / 128;
    const Operand da = Operand::in_blocks(shared + VECTOR_AT, COLUMN_BYTES), tiles = Operand::in_blocks(shared_tile(group, REGISTER_TILES), 1024);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) d[r][i] = 0.0f;
    settle(d);
    sums_begin();
#pragma unroll
    for (int k = 0; k < K_TILES; k++) {
        const int i = m * K_TILES + k;
        const int here = max(1, partners_in(k));
        if (m == 0 && here < partners_in(k + 1)) {
            sums_commit();
#pragma unroll
            for (int from = here; from < partners_in(k + 1); from++) receive_from(from, use);
            sums_begin();
        }
        const u64 b = da.at(k * 2 * COLUMN_BYTES);
        if (i < REGISTER_TILES) multiply_64(d, A.tile[i < REGISTER_TILES ? i : 0], b);
        else multiply_64(d, tiles.at((i - REGISTER_TILES) * 2048), b);
    }
    sums_commit();
}

// One tile is multiplied while the one before is stored, where there are registers for both; else another warpgroup's is.
// (Of 8 rows, or all tiles in registers, the compiler would let one product wait for the other: ptxas says C7517, C7520.)
constexpr int SUMS = M_TILES > 1 && (ROWS == 16 || ROWS == 32) && SHARED_TILES > 0 ? 2 : 1;

DEVICE void multiply_and_meet(const Matrix& A, int use, int rank, const Exchange& at) {
    const int warp = threadIdx.x / 32;
    float d[SUMS][ROW_TILES][4];
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        if (SUMS == 1 || m == 0) start_tile(d[m % SUMS], A, m, use);
        if (SUMS == 2 && m + 1 < M_TILES) {
            start_tile(d[(m + 1) % SUMS], A, m + 1, use);
            sums_wait<1>();
        } else sums_wait<0>();
        settle(d[m % SUMS]);
        const Meeting meeting(first_unit(warp / 4, m) + warp % 4 * 16, use, rank, at);
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) meeting.store(d[m % SUMS][r], r, at);
    }
}

// ---- a step, in the words of backward.cu ----------------------------------------------------------------

DEVICE void open_exchange() {
    clear(shared + VECTOR_AT, 2 * K_TILES * COLUMN_BYTES);
    if constexpr (PARTNERS > 1) {
        if (threadIdx.x == 0) {
            mailbox_open(done(), PARTNERS - 1);
            for (int from = 1; from < PARTNERS; from++) mailbox_open(arrived(from));
            mailboxes_visible();
            for (int from = 1; from < PARTNERS; from++) mailbox_expect(arrived(from), OWN_BYTES);
        }
        cluster_barrier();
    }
}

// No da of step `use` is stored, nor sent, before all warps of all partners have done with that of the step before. And
// what the step reads is there.
template <class Fetch>
DEVICE void collect(const Matrix& A, int use, const Exchange& at, Fetch) {
    copied<0>();
    __syncthreads();
    if (PARTNERS > 1 && threadIdx.x < PARTNERS - 1) mailbox_arrive_at(in_block(done(), (at.rank + 1 + threadIdx.x) % PARTNERS));
}

// Puts one gate's da of an item where the multiplication finds it.
DEVICE void hand_on(Stored da, const Item& it, int gate, int use, int rank) { store_words(da_at(it.row, gate * UNITS + it.unit), da.word); }

// After the items of all threads. What the next step reads is fetched while da is on its way.
template <class Fetch>
DEVICE void conclude(const Matrix& A, int use, int rank, const Exchange& at, Fetch fetch) {
    order_shared_before_engines();
    __syncthreads();
    const int after = threadIdx.x % 32 == 0 ? 1 + threadIdx.x / 32 : PARTNERS;  // the partner that this thread sends to
    if (after < PARTNERS) {
        const u32 to = (rank + after) % PARTNERS, own = shared_address(da_at(0, 0));
        if (use > 1) mailbox_wait_here(done(), use % 2);  // phase 0 ends after step 1
        send_block(in_block(own + after * OWN_BYTES, to), own, OWN_BYTES, in_block(arrived(after), to));
    }
    fetch();
    multiply_and_meet(A, use, rank, at);
    if (after < PARTNERS) blocks_sent();  // before it is written over
}
