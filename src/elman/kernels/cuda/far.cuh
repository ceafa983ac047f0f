// As gather.cuh, for layers that fit no cluster: the blocks of a group lie anywhere on the GPU, and each
// reads the whole vector (h forward, da backward) from device memory, where it is stored anyway:
//
//     stream      copy the vector through shared memory chunk by chunk (it comes from L2) while the chunk
//                 before is multiplied; what is still EMPTY is copied again
//
// The vector of a step has an address of its own, filled with EMPTY before the launch, and no value is ever
// overwritten: the values themselves say that they are there, and nothing else has to be waited for. All
// blocks must be on the GPU at once: the launch is cooperative, or refused.
#pragma once
#include "recurrence.cuh"

constexpr int WARPS_M = WARPS / WARPS_K;
constexpr int M = TRANSPOSED ? UNITS : GATES * UNITS;
constexpr int M_TILES = M / 16 / WARPS_M;                                                                // of one warp
constexpr int SUMMED = (TRANSPOSED ? GATES : 1) * SIZE * BYTES;                                          // bytes of one row's vector
constexpr int CHUNKS = (SUMMED + 32 * WARPS_K * CHUNK_TILES - 1) / (32 * WARPS_K * CHUNK_TILES);
constexpr int K_TILES = CHUNKS * CHUNK_TILES;                                                            // of one warp
constexpr int SHARED_TILES = M_TILES * K_TILES - REGISTER_TILES;
constexpr int CHAINS = M_TILES * ROW_TILES >= 4 ? 1 : M_TILES * ROW_TILES >= 2 ? 2 : 4;
constexpr int TOGETHER = ROW_TILES < 4 ? ROW_TILES : 4;  // row tiles multiplied with one reading of the weights

static_assert(M % (16 * WARPS_M) == 0, "rows divide over the warps");
static_assert(SIZE * BYTES % 16 == 0 && CHUNK_TILES % 2 == 0, "copies of 16 bytes, tiles in pairs");
static_assert(ROW_TILES % TOGETHER == 0 && THREADS % (WARPS_K * CHUNK_TILES * 2) == 0, "row tiles and rows in whole batches");

// ---- the shared memory of a block: STAGES chunks of the vector (later the warps' partial sums), tiles of W, then the ring ---

constexpr int PER_ROW = WARPS_K * CHUNK_TILES * 2;  // copies of 16 bytes
constexpr int AT_ONCE = THREADS / PER_ROW;          // rows
constexpr int PITCH = PER_ROW * 16 + 16;
constexpr int PARTIAL_PITCH = M + 4;
constexpr int STAGE_BYTES = STAGES * ROWS * PITCH, PARTIAL_BYTES = WARPS_K * ROWS * PARTIAL_PITCH * 4;
constexpr int STAGES_AT = 16, PARTIALS_AT = STAGES_AT;
constexpr int WEIGHTS_AT = STAGES_AT + (STAGE_BYTES > PARTIAL_BYTES ? STAGE_BYTES : PARTIAL_BYTES);
constexpr int RING_AT = WEIGHTS_AT + WARPS * SHARED_TILES * 512;

DEVICE char* stage(int chunk, int row) { return shared + STAGES_AT + (chunk % STAGES * ROWS + row) * PITCH; }
DEVICE float* partials(int slice, int row) { return (float*)(shared + PARTIALS_AT) + (slice * ROWS + row) * PARTIAL_PITCH; }
DEVICE uint4* shared_tiles() { return (uint4*)(shared + WEIGHTS_AT) + threadIdx.x / 32 * SHARED_TILES * 32 + threadIdx.x % 32; }

// The word with columns k (and k + 1) of row m: unit m % UNITS of gate m / UNITS; of W', unit m, and
// column k is gate k / SIZE of unit k % SIZE.
DEVICE u32 weight_word(const char* W, int rank, int m, int k) {
    const int gate = m / UNITS, i = rank * UNITS + m % UNITS;
    auto element = [&](int k) { return k * BYTES >= SUMMED ? 0 : TRANSPOSED ? weight(W, k / SIZE, k % SIZE, i) : weight(W, gate, i, k); };
    if constexpr (BYTES == 4) return element(k);
    return element(k) | element(k + 1) << 16;
}

DEVICE void load_matrix(Matrix& A, const void* W, int rank) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, m0 = warp / WARPS_K * M_TILES * 16, k0 = warp % WARPS_K * K_TILES * 32 / BYTES;
    A.fill(M_TILES * K_TILES, shared_tiles(), [&](u32(&a)[4], int i) {
        load_tile(a, lane, [&](int row, int column) { return weight_word((const char*)W, rank, m0 + i % M_TILES * 16 + row, k0 + i / M_TILES * 32 / BYTES + column); });
    });
}

// Starts copying every warp's chunk `chunk` of the rows' vectors, zeros beyond the batch and the vector; AGAIN,
// what has been copied before it was there. Whether there was anything to copy.
template <bool AGAIN>
DEVICE bool start_chunk(int chunk, const Exchange& from) {
    const int piece = threadIdx.x % PER_ROW, slice = piece / (2 * CHUNK_TILES);
    const int byte = (slice * K_TILES + chunk * CHUNK_TILES) * 32 + piece % (2 * CHUNK_TILES) * 16;
    const int gate = byte / (SIZE * BYTES), block = block_of(gate);
    const char* vector = from.vectors + block * (COLUMNS * BYTES) + byte % (SIZE * BYTES);
    bool any = false;
#pragma unroll
    for (int n = 0; n < (ROWS + AT_ONCE - 1) / AT_ONCE; n++) {
        const int row = n * AT_ONCE + threadIdx.x / PER_ROW;
        if (ROWS % AT_ONCE && row >= ROWS) break;
        char* to = stage(chunk, row) + piece * 16;
        if constexpr (AGAIN) {
            u32 copied_before[4];
            load_words(copied_before, to);
            if (!any_empty(copied_before)) continue;
        }
        const bool real = row < from.rows && byte < SUMMED;
        start_copy_past_l1(to, real ? vector + row * from.pitch : from.vectors, real);
        any = true;
    }
    return any;
}

// Copies a chunk, already copied once, until all of it is there.
DEVICE void complete_chunk(int chunk, const Exchange& from) {
    const long long start = clock64();
    while (start_chunk<true>(chunk, from)) {
        mark_copies();
        copied<0>();
        lose_patience(start);
    }
}

// d += (its tiles of W) x (chunk `chunk` of the vectors).
DEVICE void multiply_chunk(float (&d)[CHAINS][ROW_TILES][M_TILES][4], const Matrix& A, int chunk) {
    const int lane = threadIdx.x % 32, slice = threadIdx.x / 32 % WARPS_K;
    const u32 from = shared_address(stage(chunk, lane % 8)) + slice * CHUNK_TILES * 32 + lane / 8 * 16;
#pragma unroll
    for (int k = 0; k < CHUNK_TILES; k += 2)
#pragma unroll
        for (int first = 0; first < ROW_TILES; first += TOGETHER) {
            u32 b[TOGETHER][4];
#pragma unroll
            for (int r = 0; r < TOGETHER; r++) {
                load_fragments(b[r], from + (first + r) * 8 * PITCH + k * 32);
#pragma unroll
                for (int i = 0; i < 4; i++) b[r][i] = operand(b[r][i]);
            }
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {
                    u32 a[4];
                    A.read(a, (chunk * CHUNK_TILES + k + j) * M_TILES + m, shared_tiles());
#pragma unroll
                    for (int r = 0; r < TOGETHER; r++) multiply_add(d[(k + j) % CHAINS][first + r][m], a, b[r][2 * j], b[r][2 * j + 1]);
                }
        }
}

// ---- a step, in the words of forward.cu and backward.cu -------------------------------------------------

DEVICE void open_exchange() {}

// Multiplies what step `use` reads, as soon as it is there (step 0 reads what was there before), and fetches what a
// later step needs while the last chunk is multiplied: no wait for a chunk may be one for slower device memory.
template <class Fetch>
DEVICE void collect(const Matrix& A, int use, const Exchange& from, Fetch fetch) {
    float d[CHAINS][ROW_TILES][M_TILES][4] = {};
    start_chunk<false>(0, from);  // alone, until it is there: all blocks asking for all chunks would keep L2 from storing them
    mark_copies();
    copied<0>();
    if (use > 0) complete_chunk(0, from);
#pragma unroll
    for (int chunk = 1; chunk < STAGES - 1; chunk++) {
        if (chunk < CHUNKS) start_chunk<false>(chunk, from);
        mark_copies();
    }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        copied<STAGES - 2>();
        if (use > 0 && chunk > 0) complete_chunk(chunk, from);
        __syncthreads();  // all threads' copies are here, and all have done with the chunk whose place is filled next
        if (chunk + STAGES - 1 < CHUNKS) start_chunk<false>(chunk + STAGES - 1, from);
        mark_copies();
        if (chunk == CHUNKS - 1) fetch();
        multiply_chunk(d, A, chunk);
    }
    __syncthreads();  // the chunks are read: their place is the sums' now
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, m0 = warp / WARPS_K * M_TILES * 16, slice = warp % WARPS_K;
    store_sums(d, lane, m0, [&](int row) { return partials(slice, row); });
    __syncthreads();
}

// W times the vector, for one gate of an item.
DEVICE void sum(Values& a, const Item& it, int gate, int use, const Exchange&) { gather(a, partials(0, it.row) + gate * UNITS + it.unit, WARPS_K, ROWS * PARTIAL_PITCH); }

// The caller stores the values where the others read them.
DEVICE void hand_on(Stored values, const Item& it, int gate, int use, int rank) {}

// After the items of all threads: their sums are read, and the chunks may come back to their place.
DEVICE void conclude(const Matrix& A, int use, int rank, const Exchange& from) { __syncthreads(); }
