// As far.cuh, by what a Hopper GPU has for it: blocks in pairs (clusters of two), each of which multiplies the rows
// of both with its half of the vector:
//
//     stream      the copy engine brings the half, chunk by chunk, from device memory (that is, from L2) to shared
//                 memory in the layout that wgmma reads, as soon as a look at one value of every block that makes
//                 the chunk finds it stored
//     multiply    wgmma, 64 rows of W to a tile, in registers as far as they reach, then in shared memory
//     swap        sums of the partner's rows go to the partner, in one copy
//
// So an SM reads half of what far.cuh reads, and with a few instructions. A value that was not stored yet when its chunk
// was copied is EMPTY, a NaN, and makes a NaN of every sum of its row: only where there is one has anybody to look closer.
// (Stores and the engine's reads meet in L2. Nothing orders them, nor has to: what was read says itself whether it is new.)
// All blocks must be on the GPU at once: the launch is cooperative, or refused.
#pragma once
#include "recurrence.cuh"
#include "hopper.cuh"

constexpr int WARPGROUPS = WARPS / 4;
constexpr int OWN_M = TRANSPOSED ? UNITS : GATES * UNITS;                       // rows of W that make a block's own units
constexpr int M_TILES = (2 * OWN_M + 64 * WARPGROUPS - 1) / (64 * WARPGROUPS);  // of 64 rows, of one warpgroup
constexpr int CHUNK = 128 / BYTES;                                              // elements of a row: what a swizzle spans
constexpr int CHUNKS = (SIZE + 2 * CHUNK - 1) / (2 * CHUNK);                    // of a half
constexpr int K_STEPS = 4;                                                      // of a chunk: 32 bytes each
constexpr int SHARED_CHUNKS = CHUNKS - REGISTER_CHUNKS;
constexpr int PRODUCERS = (CHUNK - 2) / UNITS + 2 > CLUSTER ? CLUSTER : (CHUNK - 2) / UNITS + 2;  // blocks that make a chunk, at most

static_assert(BYTES == 2 && HEADS == 1 && PARTNERS == 2 && CLUSTER % 2 == 0, "half precision, whole pairs");
static_assert(TRANSPOSED == 0 || GATES == 1, "one value per unit is read");
static_assert(REGISTER_TILES == REGISTER_CHUNKS * K_STEPS * M_TILES && STAGES <= CHUNKS && CHUNKS <= 32, "a lane asks for a chunk");

// ---- the shared memory of a block: mailboxes, chunks' barriers; chunks; tiles of W; sums: own, to send, twice received; the ring ----

constexpr int CHUNK_BYTES = ROWS * 128;
constexpr int PARTIAL_PITCH = OWN_M + 4;  // floats
constexpr int SLICE_BYTES = ROWS * PARTIAL_PITCH * 4;
constexpr int FULL_AT = 16, FREE_AT = FULL_AT + 8 * STAGES;
constexpr int STAGES_AT = 1024;
constexpr int WEIGHTS_AT = STAGES_AT + STAGES * CHUNK_BYTES;
constexpr int PARTIALS_AT = WEIGHTS_AT + SHARED_CHUNKS * WARPGROUPS * M_TILES * 8192;
constexpr int RING_AT = PARTIALS_AT + 4 * SLICE_BYTES;
static_assert(FREE_AT + 8 * STAGES < STAGES_AT, "barriers fit before the chunks");

enum { OWN_SUMS, SENT_SUMS, RECEIVED_SUMS };  // and a second of the last
DEVICE float* partials(int slice, int row) { return (float*)(shared + PARTIALS_AT + slice * SLICE_BYTES) + row * PARTIAL_PITCH; }
DEVICE int* repeated() { return (int*)(shared + FREE_AT + 8 * STAGES); }  // how many multiplications were repeated
DEVICE u32 full(int chunk) { return shared_address(shared) + FULL_AT + 8 * (chunk % STAGES); }
DEVICE u32 freed(int chunk) { return shared_address(shared) + FREE_AT + 8 * (chunk % STAGES); }
DEVICE u32 stage(int chunk) { return shared_address(shared) + STAGES_AT + chunk % STAGES * CHUNK_BYTES; }
// 64 rows of W by one chunk: the first tile of a warpgroup.
DEVICE char* shared_tile(int group) { return shared + WEIGHTS_AT + group * M_TILES * 8192; }

// Uses of a chunk's place in one multiplication, and how many were before: multiplication n, counted from 0.
DEVICE constexpr int uses(int chunk) { return (CHUNKS - chunk % STAGES + STAGES - 1) / STAGES; }
DEVICE u32 parity_of_full(int chunk, int n) { return (n * uses(chunk) + chunk / STAGES) % 2; }
DEVICE u32 parity_of_free(int chunk, int n) { return (n * (uses(chunk) - 1) + chunk / STAGES) % 2; }

// The first element of the half that a block multiplies.
DEVICE int half_of(int rank) { return rank % 2 * CHUNKS * CHUNK; }

// The word with columns k and k + 1 of the half, of row m: first the first partner's rows, gate by gate, then the second's.
DEVICE u32 weight_word(const char* W, int rank, int m, int k) {
    const int gate = m % OWN_M / UNITS, i = (rank / 2 * 2 + m / OWN_M) * UNITS + m % UNITS;
    auto element = [&](int k) { return m >= 2 * OWN_M || i >= SIZE || k >= SIZE ? 0 : TRANSPOSED ? weight(W, 0, k, i) : weight(W, gate, i, k); };
    k += half_of(rank);
    return element(k) | element(k + 1) << 16;
}

DEVICE void load_matrix(Matrix& A, const void* W, int rank) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, m0 = warp / 4 * M_TILES * 64 + warp % 4 * 16;
#pragma unroll
    for (int i = 0; i < REGISTER_TILES; i++)
        load_tile(A.tile[i], lane, [&](int row, int column) { return weight_word((const char*)W, rank, m0 + i % M_TILES * 64 + row, i / M_TILES * (CHUNK / K_STEPS) + column); });
    for (int i = threadIdx.x; i < SHARED_CHUNKS * WARPGROUPS * M_TILES * 512; i += THREADS) {  // 16 bytes each, swizzled
        const int tile = i / 512, row = i / 8 % 64, piece = i % 8, chunk = REGISTER_CHUNKS + tile / (WARPGROUPS * M_TILES);
        u32 w[4];
#pragma unroll
        for (int j = 0; j < 4; j++) w[j] = weight_word((const char*)W, rank, tile % (WARPGROUPS * M_TILES) * 64 + row, chunk * CHUNK + (piece * 4 + j) * 4 / BYTES);
        store_words(shared + WEIGHTS_AT + tile * 8192 + row * 128 + (piece ^ row % 8) * 16, w);
    }
    order_before_engines();
}

// Whether one value of every block that makes a chunk is stored, of the last item of its busiest warp: so, most likely,
// are all.
DEVICE bool seems_stored(int chunk, int rank, const Exchange& from) {
    const int first = half_of(rank) + chunk * CHUNK, last = min(first + CHUNK, SIZE) - 1, block = first / UNITS;
    if (first >= SIZE) return true;
    constexpr int ROW = (ITEMS - 1) * THREADS / (UNITS / WIDE);
    const char* row = from.vectors + min(ROW, from.rows - 1) * from.pitch;
    u32 w[PRODUCERS][1];
#pragma unroll
    for (int p = 0; p < PRODUCERS; p++) load_words_past_l1(w[p], row + (i64)min(block + p, last / UNITS) * (UNITS * BYTES));
    bool all = true;
#pragma unroll
    for (int p = 0; p < PRODUCERS; p++) all &= !any_empty(w[p]);
    return all;
}

DEVICE void start_chunk(int chunk, int rank, const Exchange& from) {
    mailbox_expect(full(chunk), CHUNK_BYTES);
    start_box(stage(chunk), from.map, half_of(rank) + chunk * CHUNK, from.first_row, from.time, full(chunk));
}

// Has the half brought, as far as there is room: the first warp asks for it, each lane for a chunk.
DEVICE void start_stream(int rank, const Exchange& from) {
    if (threadIdx.x >= 32) return;
    if (threadIdx.x < CHUNKS) {
        const long long start = clock64();
        while (!seems_stored(threadIdx.x, rank, from)) lose_patience(start);
        if (threadIdx.x < STAGES) start_chunk(threadIdx.x, rank, from);
    }
    __syncwarp();
}

// d = (its tiles of W) x (the half of the vectors), multiplication n.
DEVICE void multiply(float (&d)[M_TILES][ROW_TILES][4], const Matrix& A, int n, int rank, const Exchange& from) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Operand vector = Operand::swizzled(shared + STAGES_AT), tiles = Operand::swizzled(shared_tile(warp / 4));
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int i = 0; i < 4; i++) d[m][r][i] = 0.0f;
        settle(d[m]);
    }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        mailbox_wait_here(full(chunk), parity_of_full(chunk, n));
        sums_begin();
#pragma unroll
        for (int k = 0; k < K_STEPS; k++)
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                const u64 b = vector.at(chunk % STAGES * CHUNK_BYTES + k * 32);
                if (chunk < REGISTER_CHUNKS) multiply_64(d[m], A.tile[chunk < REGISTER_CHUNKS ? (chunk * K_STEPS + k) * M_TILES + m : 0], b);
                else multiply_64(d[m], tiles.at(((chunk - REGISTER_CHUNKS) * WARPGROUPS * M_TILES + m) * 8192 + k * 32), b);
            }
        sums_commit();
        if (STAGES < CHUNKS && chunk > 0 && chunk - 1 + STAGES < CHUNKS) {  // the place of the chunk before is filled anew
            sums_wait<1>();
            if (lane == 0) {
                mailbox_arrive(freed(chunk - 1));
                if (warp == 0) {
                    mailbox_wait_here(freed(chunk - 1), parity_of_free(chunk - 1, n));
                    start_chunk(chunk - 1 + STAGES, rank, from);
                }
            }
            __syncwarp();
        }
    }
    sums_wait<0>();
#pragma unroll
    for (int m = 0; m < M_TILES; m++) settle(d[m]);
}

// Waits until every value of the half is stored.
DEVICE void await_all(int rank, const Exchange& from) {
    constexpr int PER_ROW = CHUNKS * CHUNK * BYTES / 16;
    const long long start = clock64();
    for (int i = threadIdx.x; i < ROWS * PER_ROW; i += THREADS) {
        const int row = i / PER_ROW, byte = half_of(rank) * BYTES + i % PER_ROW * 16;
        if (row >= from.rows || byte >= SIZE * BYTES) continue;
        u32 w[4];
        do {
            load_words_past_l1(w, from.vectors + row * from.pitch + byte);
            lose_patience(start);
        } while (any_empty(w));
    }
    order_before_engines();
    __syncthreads();
}

// Whether a value may have been missing: it would show in every row of W, so the first of a thread's two tells.
DEVICE bool any_nan(const float (&d)[M_TILES][ROW_TILES][4]) {
    bool any = false;
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int i = 0; i < 2; i++) any |= d[m][r][i] != d[m][r][i];
    return any;
}

// Sums of the own rows to where they are added up, those of the partner's to where they are sent from.
DEVICE void keep_sums(const float (&d)[M_TILES][ROW_TILES][4], int rank) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        const int place = (warp / 4 * M_TILES + m) * 64 + warp % 4 * 16 + FourUnits::Place().unit, partner = place / OWN_M;
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            const FourUnits four(d[m][r]);
            if (partner < 2) store_words(partials(partner == rank % 2 ? OWN_SUMS : SENT_SUMS, r * 8 + four.place.row) + place % OWN_M, four.word);
        }
    }
    order_shared_before_engines();
}

// ---- a step, in the words of forward.cu and backward.cu -------------------------------------------------

DEVICE void open_exchange() {
    if (threadIdx.x == 0) {
        *repeated() = 0;
        for (int i = 0; i < STAGES; i++) {
            mailbox_open(full(i), 1);
            mailbox_open(freed(i), WARPS);
        }
    }
    open_mailboxes(SLICE_BYTES);
}

constexpr bool FETCHES_FIRST = ROWS >= 32;  // else chunks, which are more urgent; but of many rows some are stored late

template <class Fetch>
DEVICE void collect(const Matrix& A, int use, const Exchange& from, Fetch fetch) {
    constexpr int FIRST = TRANSPOSED ? 1 : 0;  // step that collects
    const int rank = from.rank, turn = use - FIRST + 1;
    float d[M_TILES][ROW_TILES][4];
    const int before = *repeated();
#pragma unroll 1
    for (int round = 0; round < 2; round++) {  // once; or again, where something was missing, or a NaN is the user's
        if (FETCHES_FIRST && round == 0) fetch();
        start_stream(rank, from);
        if (!FETCHES_FIRST && round == 0) fetch();
        multiply(d, A, use - FIRST + before + round, rank, from);
        keep_sums(d, rank);
        if (!__syncthreads_or(round == 0 && any_nan(d))) break;
        if (threadIdx.x == 0) *repeated() = before + 1;
        await_all(rank, from);
    }
    if (threadIdx.x == 0) {
        const u32 to = rank % 2 ^ 1;
        send_block(in_block(shared_address(partials(RECEIVED_SUMS + turn % 2, 0)), to), shared_address(partials(SENT_SUMS, 0)), SLICE_BYTES, in_block(mailbox(turn % 2), to));
    }
    receive(turn, SLICE_BYTES);
}

// W times the vector, for one gate of an item.
DEVICE void sum(Values& a, const Item& it, int gate, int use, const Exchange&) {
    constexpr int FIRST = TRANSPOSED ? 1 : 0;
    const int received = RECEIVED_SUMS + (use - FIRST + 1) % 2;
    gather(a, partials(OWN_SUMS, it.row) + gate * UNITS + it.unit, 2, received * (SLICE_BYTES / 4));
}

// The caller stores the values where the others read them.
DEVICE void hand_on(Stored values, const Item& it, int gate, int use, int rank) {}

// After the items of all threads: their sums are read, and those sent are gone.
DEVICE void conclude(const Matrix& A, int use, int rank, const Exchange& from) {
    if (threadIdx.x == 0) blocks_sent();
    __syncthreads();
}
