// One SM has whole rows of the batch and all units, and nothing but the barrier lies between one step and the next.
// Its threads are of two kinds:
//
//     workers     each warp owns EACH units: it multiplies the rows of W (or W') that make all of their gates, so that no
//                 sums meet, and knows device memory not at all
//     carriers    copy what a step reads into shared memory, some steps ahead, and what it leaves from there to device
//                 memory, one step behind, 16 bytes of a row to a thread
//
// mma leaves a thread one unit of two rows; a swap with a neighbour makes it two units of one row, an item. For layers so
// small that a step is all latency: reading the vector, a chain of mma, the cell's own equations.
#pragma once
#include "recurrence.cuh"

constexpr int CARRIERS = LAUNCHED - THREADS, LANES = CARRIERS / ROWS;                    // carriers; those of a row
constexpr int EACH = UNITS / WARPS;                                                      // units of a warp
constexpr int BLOCKS = (TRANSPOSED ? 1 : GATES) * (EACH / 8);                            // its rows of W, in eights
constexpr int M_TILES = (BLOCKS + 1) / 2;                                                // of one warp
constexpr int K_TILES = ((TRANSPOSED ? GATES : 1) * UNITS * BYTES + 63) / 64 * 2;        // in pairs
constexpr int CHAINS = M_TILES * ROW_TILES >= 4 ? 1 : M_TILES * ROW_TILES >= 2 ? 2 : 4;  // sums in flight hide mma's latency
constexpr int OUTPUTS = TRANSPOSED ? STORED_DA : 1 + EXTRA + KEPT;

// Units that a carrier copies at once: as many as the place of a row in memory allows.
constexpr int PIECE = (SIZE * BYTES % 16 == 0 ? 16 : SIZE * BYTES % 8 == 0 ? 8 : 4) / BYTES;
constexpr int PIECES = (UNITS / PIECE + LANES - 1) / LANES;  // of a carrier, all of one row

static_assert(REGISTER_TILES == M_TILES * K_TILES && CLUSTER == 1 && TURNS == 1, "one SM, all of the matrix in registers");
static_assert(SIZE * BYTES % 4 == 0 && CARRIERS >= ROWS, "words can be copied; a carrier to each row");

// A worker's q-th item: where its warp's products are.
DEVICE Item item(int q, const Place& place, int batch) {
    const int lane = threadIdx.x % 32, row = q / (EACH / 8) * 8 + lane % 4 * 2 + lane / 4 % 2;
    return item_at<WIDE>(true, row, threadIdx.x / 32 * EACH + q % (EACH / 8) * 8 + lane / 8 * 2, place, batch);
}

// A carrier's q-th piece.
DEVICE Item piece(int q, const Place& place, int batch) {
    const int carrier = threadIdx.x - THREADS, unit = (carrier % LANES + q * LANES) * PIECE;
    return item_at<PIECE>(unit < UNITS, carrier / LANES, unit, place, batch);
}

// ---- the shared memory of a block: two vectors, words of some steps, two steps' outputs, then the ring of inputs ----

// Bytes from row to row where items lie: an odd number of 16, so that neither items nor ldmatrix meet a bank twice.
DEVICE constexpr int pitch_of(int fields) { return (fields * UNITS * BYTES + 127) / 128 * 128 + 16; }

constexpr int PITCH = K_TILES * 32 + 16;
constexpr int VECTORS_AT = 16;
constexpr int WORDS_AT = VECTORS_AT + 2 * ROWS * PITCH;
constexpr int WORD_STEPS = 16;
constexpr int OUTPUTS_AT = WORDS_AT + WORD_STEPS * ROWS * 4;
constexpr int RING_AT = OUTPUTS_AT + 2 * ROWS * pitch_of(OUTPUTS);

static_assert(WORD_STEPS >= 2 * AHEAD, "no word is overwritten before it is read");

DEVICE char* vector(int buffer, int row) { return shared + VECTORS_AT + (buffer * ROWS + row) * PITCH; }

// Of a step and a row: which row of a table is read, or ξ.
DEVICE u32* word_of(int step, int row) { return (u32*)(shared + WORDS_AT) + step % WORD_STEPS * ROWS + row; }

// Where a field of an item lies in one step's values.
DEVICE int place_in(int fields, int field, const Item& it) { return it.row * pitch_of(fields) + (field * UNITS + it.unit) * BYTES; }

DEVICE void copy_piece(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(PIECE * BYTES) : "memory");
}

// What workers read, fetched by carriers.
template <int FIELDS, int AT>
struct Ring {
    static constexpr int STEP = ROWS * pitch_of(FIELDS), SIZE_IN_BYTES = (AHEAD + 1) * STEP;

    static __device__ __forceinline__ char* place(int step, int field, const Item& it) { return shared + AT + step % (AHEAD + 1) * STEP + place_in(FIELDS, field, it); }
    static __device__ __forceinline__ void fetch(int step, int field, int q, const void* base, i64 element, int real) {
        if (real > 0) copy_piece(place(step, field, piece(q, {}, 0)), (const char*)base + element * BYTES);
    }
    static __device__ __forceinline__ void take(Values& x, int step, int field, int q) {
        Stored p;
        load_words(p.word, place(step, field, item(q, {}, 0)));
        unpack(p, x);
    }
};

// What workers leave of a step, shipped by carriers during the next.
DEVICE char* output(int step, int field, const Item& it) { return shared + OUTPUTS_AT + step % 2 * (ROWS * pitch_of(OUTPUTS)) + place_in(OUTPUTS, field, it); }

DEVICE void leave_behind(int step, int field, int q, const Stored& values) { store_words(output(step, field, item(q, {}, 0)), values.word); }

DEVICE void ship(int step, int field, int q, void* base, i64 element) {
    Packed<PIECE> p;
    load_words(p.word, output(step, field, piece(q, {}, 0)));
    store_words((char*)base + element * BYTES, p.word);
}

// ---- all threads ------------------------------------------------------------------------------------

DEVICE void meet() { asm volatile("bar.sync 1, %0;" ::"n"(LAUNCHED) : "memory"); }

// What no copy writes, of units and rows that do not exist, is zeros.
DEVICE void begin() {
    for (int i = threadIdx.x; i < SHARED_BYTES / 16; i += LAUNCHED) ((uint4*)shared)[i] = make_uint4(0, 0, 0, 0);
    meet();
}

DEVICE bool is_carrier() { return threadIdx.x >= THREADS; }
DEVICE bool is_first_of_row() { return threadIdx.x % LANES == 0; }

// A carrier's part. fetch(t) asks for what step t reads, as one batch of copies; send(t) ships what step t has left.
template <class Fetch, class Send>
DEVICE void carry(int steps, Fetch fetch, Send send) {
#pragma unroll 1
    for (int t = 0; t < AHEAD; t++) fetch(t);
    copied<AHEAD - 1>();
    meet();
#pragma unroll 1
    for (int t = 0; t < steps; t++) {
        fetch(t + AHEAD);
        if (t > 0) send(t - 1);
        copied<AHEAD - 1>();
        meet();
    }
    send(steps - 1);
}

// Carriers alone.
DEVICE void carriers_meet() { asm volatile("bar.sync 2, %0;" ::"n"(CARRIERS) : "memory"); }

// ---- a worker's matrix ------------------------------------------------------------------------------

// The word with columns k (and k + 1) of row r of one of the warp's blocks: unit r of its eight, of a gate forward.
DEVICE u32 weight_word(const char* W, int block, int r, int k) {
    const int unit = threadIdx.x / 32 * EACH + block % (EACH / 8) * 8 + r;
    auto element = [&](int k) {
        if (block >= BLOCKS || k >= (TRANSPOSED ? GATES : 1) * UNITS) return 0u;
        return TRANSPOSED ? weight(W, k / UNITS, k % UNITS, unit) : weight(W, block / (EACH / 8), unit, k);
    };
    if constexpr (BYTES == 4) return element(k);
    return element(k) | element(k + 1) << 16;
}

DEVICE void load_matrix(Matrix& A, const void* W, int rank) {
    const int lane = threadIdx.x % 32;
    A.fill(M_TILES * K_TILES, nullptr, [&](u32(&a)[4], int i) {
        load_tile(a, lane, [&](int row, int column) {
            return weight_word((const char*)W, i % M_TILES * 2 + row / 8, row % 8, i / M_TILES * 32 / BYTES + column);
        });
    });
}

// ---- a step, in the words of forward.cu and backward.cu -------------------------------------------------

DEVICE void open_exchange() {}

// A warp's products with what step `use` reads, item by item.
struct Sums {
    Values of[ITEMS][TRANSPOSED ? 1 : GATES];
};

DEVICE Sums multiply(const Matrix& A, int use) {
    const int lane = threadIdx.x % 32;
    const u32 from = shared_address(vector(use % 2, lane % 8)) + lane / 8 * 16;
    float d[CHAINS][ROW_TILES][M_TILES][4] = {};
    multiply_all<K_TILES, PITCH>(d, A, nullptr, from);
    Sums sums;
    const bool odd = lane / 4 % 2;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            float two[2];  // rows 2 (lane % 4) and the next one, of unit lane / 4
#pragma unroll
            for (int i = 0; i < 2; i++) {
                two[i] = d[0][r][block / 2][block % 2 * 2 + i];
#pragma unroll
                for (int c = 1; c < min(CHAINS, K_TILES); c++) two[i] += d[c][r][block / 2][block % 2 * 2 + i];
            }
            const float swapped = __shfl_xor_sync(~0u, odd ? two[0] : two[1], 4);
            Values& sum = sums.of[r * (EACH / 8) + block % (EACH / 8)][block / (EACH / 8)];
            sum[0] = odd ? swapped : two[0], sum[1] = odd ? two[1] : swapped;
        }
    return sums;
}

DEVICE void take_sum(Values& a, const Sums& sums, int gate, int q) {
#pragma unroll
    for (int v = 0; v < WIDE; v++) a[v] = sums.of[q][gate][v];
}

// Gives new values of an item to step `use`.
DEVICE void hand_on(Stored values, const Item& it, int gate, int use, int rank) {
#pragma unroll
    for (int w = 0; w < Stored::WORDS; w++) values.word[w] = operand(values.word[w]);
    store_words(vector(use % 2, it.row) + (gate * UNITS + it.unit) * BYTES, values.word);
}

// After the items of all threads.
DEVICE void conclude(const Matrix& A, int use, int rank, const Exchange&) { meet(); }
