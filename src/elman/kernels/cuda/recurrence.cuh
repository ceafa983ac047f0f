// What both directions of every cell share: how a layer is cut over blocks, warps and threads, and how
// blocks pass values on.
//
// A group of CLUSTER blocks owns ROWS rows of the batch and never speaks to another group; where W_hh falls into
// HEADS blocks along its diagonal, a group has one of them, and SIZE, HIDDEN are of its units. Block
// `rank` owns UNITS of the hidden units; it keeps the rows of the recurrent matrix that make their gates
// in registers (what does not fit, in shared memory) for the whole sequence, and computes their state,
// and the gradients of their gates, in fp32.
//
//     forward    a = W h needs every unit of h: each block broadcasts its units' new h to the group
//     backward   dh = W' da sums over every gate: each block sends its share of dh to the units' owners
//
// What is sent lands in one of two buffers of the receiver, in turn. A block that has received all of
// one step knows that every warp of its group has finished reading the step before, so the exchange
// itself is the only synchronisation between blocks.
#pragma once
#include "ptx.cuh"

#define TANH 0
#define RELU 1
#define GRU 2
#define LSTM 3
#define LINEAR 4
#define OWN 5  // a described cell

#if CELL == OWN
#include "own.cuh"  // its sizes and equations, written by equations.py
#else
constexpr int GATES = CELL == LSTM ? 4 : CELL == GRU ? 3 : 1;
constexpr int KEPT = CELL == LSTM ? 4 : CELL == GRU ? 5 : 0;  // values per unit and step stored for the backward pass
constexpr int APART = CELL == GRU ? 1 : 0;                    // gates that W_ih' and W_hh' meet with different da
constexpr int EXTRA = CELL == LSTM ? 1 : 0;                   // states beside h
constexpr int DRAWN = 0, PARAMETERS = 0;                      // of noise, per step; of a unit's own, that are learned

// Which block of the stored da W_hh' meets: of a gru du where W_ih' meets dn.
DEVICE constexpr int block_of(int gate) { return CELL == GRU && gate == 2 ? 3 : gate; }
#endif
constexpr int INPUTS = GATES + DRAWN, STORED_DA = GATES + APART;
constexpr int C_STATES = EXTRA > 0 ? EXTRA : 1;  // arrays have no length 0
#ifndef HEADS
#define HEADS 1
#endif
constexpr int COLUMNS = HEADS * SIZE;  // units of the layer: what lies in a row of the arrays
constexpr int UNITS = HIDDEN / CLUSTER;
constexpr int THREADS = 32 * WARPS;  // that have units; where a group has turns others multiply (pairs.cuh)
constexpr int ROW_TILES = ROWS / 8;

static_assert(HIDDEN % CLUSTER == 0 && HIDDEN >= SIZE, "units divide over the blocks");

extern __shared__ __align__(1024) char shared[];

// ---- the recurrent matrix -------------------------------------------------------------------------

// W_hh[gate, i, j] as stored; 0 where it is padding.
DEVICE u32 weight(const char* W, int gate, int i, int j) {
    if (SIZE < HIDDEN && (i >= SIZE || j >= SIZE)) return 0;
    const char* at = W + ((i64)(gate * COLUMNS + i) * COLUMNS + j) * BYTES;
    return BYTES == 4 ? *(const u32*)at : *(const unsigned short*)at;
}

// The fragments of one tile of 16 rows by 32 bytes whose word at (row, column) is word(row, column).
template <class Word>
DEVICE void load_tile(u32 (&a)[4], int lane, Word word) {
#pragma unroll
    for (int i = 0; i < 4; i++)  // rows 0 and 8, first and second half of the 32 bytes
        a[i] = operand(word(lane / 4 + 8 * (i % 2), (16 * (i / 2) + 4 * (lane % 4)) / BYTES));
}

// The tiles of one warp: the first REGISTER_TILES in registers, the rest in shared memory from `place`.
struct Matrix {
    u32 tile[REGISTER_TILES][4];

    __device__ __forceinline__ void read(u32 (&a)[4], int i, const uint4* place) const {
        if (i < REGISTER_TILES) {
#pragma unroll
            for (int w = 0; w < 4; w++) a[w] = tile[i < REGISTER_TILES ? i : 0][w];
        } else {
            const uint4 word = place[(i - REGISTER_TILES) * 32];
            a[0] = word.x, a[1] = word.y, a[2] = word.z, a[3] = word.w;
        }
    }

    // load(a, i) fetches tile i of `count`.
    template <class Load>
    __device__ __forceinline__ void fill(int count, uint4* place, Load load) {
#pragma unroll
        for (int i = 0; i < REGISTER_TILES; i++) load(tile[i], i);
        for (int i = REGISTER_TILES; i < count; i++) {
            u32 a[4];
            load(a, i);
            place[(i - REGISTER_TILES) * 32] = make_uint4(a[0], a[1], a[2], a[3]);
        }
    }
};

// All tiles of a warp, M_TILES down, times R tiles of rows, which lie PITCH bytes apart from `from` on.
template <int K_TILES, int PITCH, int CHAINS, int R, int M_TILES>
DEVICE void multiply_all(float (&d)[CHAINS][R][M_TILES][4], const Matrix& A, const uint4* shared_tiles, u32 from) {
#pragma unroll
    for (int k = 0; k < K_TILES; k += 2) {
        u32 b[R][4];
#pragma unroll
        for (int r = 0; r < R; r++) load_fragments(b[r], from + r * 8 * PITCH + k * 32);
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                u32 a[4];
                A.read(a, (k + j) * M_TILES + m, shared_tiles);
#pragma unroll
                for (int r = 0; r < R; r++) multiply_add(d[(k + j) % CHAINS][r][m], a, b[r][2 * j], b[r][2 * j + 1]);
            }
    }
}

// Tiles m and m + 1 of a warp, where there are two, times R tiles of rows, which lie PITCH bytes apart from `from` on.
template <int M_TILES, int K_TILES, int PITCH, int CHAINS, int R>
DEVICE void multiply_two(float (&d)[2][CHAINS][R][4], const Matrix& A, const uint4* shared_tiles, int m, u32 from) {
#pragma unroll
    for (int k = 0; k < K_TILES; k += 2) {
        u32 b[R][4];
#pragma unroll
        for (int r = 0; r < R; r++) load_fragments(b[r], from + r * 8 * PITCH + k * 32);
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int h = 0; h < 2 && m + h < M_TILES; h++) {
                u32 a[4];
                A.read(a, (m + h) * K_TILES + k + j, shared_tiles);
#pragma unroll
                for (int r = 0; r < R; r++) multiply_add(d[h][(k + j) % CHAINS][r], a, b[r][2 * j], b[r][2 * j + 1]);
            }
    }
}

// Stores what mma leaves a warp of M tiles of W, from row m0 on, chains added up; `at`(row) is where sums of a row of the batch are.
template <int CHAINS, int R, int M, class At>
DEVICE void store_sums(const float (&d)[CHAINS][R][M][4], int lane, int m0, At at) {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float sum = d[0][r][m][i];
#pragma unroll
                for (int c = 1; c < CHAINS; c++) sum += d[c][r][m][i];
                at(r * 8 + lane % 4 * 2 + i % 2)[m0 + 16 * m + lane / 4 + 8 * (i / 2)] = sum;
            }
}

// ---- the units a thread owns ----------------------------------------------------------------------

// Each thread owns ITEMS items, an item being WIDE consecutive units of one row.
constexpr int WIDE = !SINGLE && ROWS * UNITS > 2 * THREADS ? 4 : 2;
constexpr int ITEMS_IN_ALL = ROWS * UNITS / WIDE;
constexpr int ITEMS = (ITEMS_IN_ALL + THREADS - 1) / THREADS;

typedef float Values[WIDE];
typedef Packed<WIDE> Stored;

struct Item {
    bool owned, has_row;        // the thread's; its row is of the batch
    int row, unit;              // inside this block
    int batch_row, layer_unit;  // in the batch; in the head
    int column;                 // in the arrays
    int real;                   // how many of its units are not padding; 0 for a row beyond the batch

    // The element of an array (…, blocks, COLUMNS) where the item lies, in block `block` of row `row`.
    __device__ __forceinline__ i64 in(i64 row, int blocks = 1, int block = 0) const { return (row * blocks + block) * COLUMNS + column; }
};

// Which rows, which head and which of its units a block has.
struct Place {
    int rank, team, group, head;

    // The same where the group has turns: `group` counts those, of ROWS rows each.
    __device__ __forceinline__ Place in_turn(int turn) const { return {rank, team, group * TURNS + turn, head}; }
};

DEVICE Place place_of(u32 block) {
    const u32 team = block / CLUSTER;
    return {(int)(block % CLUSTER), (int)team, (int)(team / HEADS), HEADS > 1 ? (int)(team % HEADS) : 0};
}

// The block of W_hh along its diagonal that is the head's.
DEVICE const void* matrix_of(const void* W, const Place& place) { return (const char*)W + (i64)place.head * SIZE * (COLUMNS + 1) * BYTES; }

// N units of a row from `unit` on.
template <int N>
DEVICE Item item_at(bool owned, int row, int unit, const Place& place, int batch) {
    Item it;
    it.owned = owned, it.row = row, it.unit = unit;
    it.batch_row = place.group * ROWS + it.row;
    it.layer_unit = place.rank * UNITS + it.unit;
    it.column = place.head * SIZE + it.layer_unit;
    it.has_row = it.batch_row < batch;
    it.real = !it.owned || !it.has_row ? 0 : SIZE == HIDDEN ? N : max(0, min(N, SIZE - it.layer_unit));
    return it;
}

#if !SINGLE
// The thread's q-th, of N units.
template <int N = WIDE>
DEVICE Item item(int q, const Place& place, int batch) {
    constexpr int IN_ALL = ROWS * UNITS / N;
    const int i = q * THREADS + threadIdx.x;
    return item_at<N>(IN_ALL % THREADS == 0 || i < IN_ALL, i / (UNITS / N), i % (UNITS / N) * N, place, batch);
}
#endif

// What may be stored where EMPTY means that nothing has been.
DEVICE Stored told_from_empty(Stored values) {
#pragma unroll
    for (int w = 0; w < Stored::WORDS; w++) values.word[w] = FAR ? not_empty(values.word[w]) : values.word[w];
    return values;
}

// The sum of `count` arrays of floats in shared memory, `stride` floats apart, always in the same order.
DEVICE void gather(Values& sum, const float* from, int count, int stride) {
#pragma unroll
    for (int s = 0; s < count; s++) {
        u32 w[WIDE];
        load_words(w, from + s * stride);
#pragma unroll
        for (int v = 0; v < WIDE; v++) sum[v] = s ? sum[v] + __uint_as_float(w[v]) : __uint_as_float(w[v]);
    }
}

// ---- what a thread reads from global memory, fetched ahead into a ring ---------------------------------

// Steps: latency of device memory, some 0.7 us, over that of a fast step. 0: a step's own, once the one before has read its.
// Of a group with turns, multiplications: as many as a step has.
constexpr int AHEAD = SINGLE ? 7 : HOPPER && !PAIRED ? 0 : FAR ? TURNS : 3;
#if !SINGLE
// Units fetched at a time: an item; of teams.cuh and crowds.cuh, where all threads wait for each other in between, 16 bytes, which pass by
// L1: it has little room beside so much shared memory, and would keep a line for each row.
constexpr int PIECE = AHEAD == 0 && UNITS % 8 == 0 ? 8 : WIDE;
constexpr int PIECES = (ROWS * UNITS / PIECE + THREADS - 1) / THREADS;  // of a thread
constexpr int SLOTS = AHEAD > 0 ? ITEMS * THREADS : ITEMS_IN_ALL;       // of one value of every item

DEVICE Item piece(int q, const Place& place, int batch) { return item<PIECE>(q, place, batch); }

template <int FIELDS, int AT>
struct Ring {
    static constexpr int SIZE_IN_BYTES = (AHEAD + 1) * FIELDS * SLOTS * WIDE * BYTES;

    template <int N = WIDE>
    static __device__ __forceinline__ char* place(int step, int field, int q) {
        return shared + AT + ((step % (AHEAD + 1) * FIELDS + field) * (SLOTS * WIDE) + (q * THREADS + threadIdx.x) * N) * BYTES;
    }
    static __device__ __forceinline__ void fetch(int step, int field, int q, const void* base, i64 element, int real) {
        char* to = place<PIECE>(step, field, q);
        const char* from = (const char*)base + (real ? element * BYTES : 0);
        if constexpr (PIECE > WIDE) start_copy_past_l1(to, from, real > 0);
        else if constexpr (WHOLE<WIDE>) start_copy<WIDE * BYTES>(to, from, real > 0);
        else if constexpr (BYTES == 4)
#pragma unroll
            for (int v = 0; v < WIDE; v++) start_copy<4>(to + 4 * v, v < real ? from + 4 * v : (const char*)base, v < real);
        else store_words(to, load<WIDE>(base, element, real).word);
    }
    static __device__ __forceinline__ void take(Values& x, int step, int field, int q) {
        Stored p;
        load_words(p.word, place(step, field, q));
        unpack(p, x);
    }
};

DEVICE void meet() { __syncthreads(); }
#endif

// ---- a described cell's numbers: one to a unit, the same at every step, in shared memory ---------------------

// Its parameters, and forward b_hh of the gates that are apart.
constexpr int NUMBERS = CELL != OWN ? 0 : TRANSPOSED ? PARAMETERS : PARAMETERS + APART;
constexpr int NUMBERS_BYTES = NUMBERS * UNITS * 4;

DEVICE float* number(int at, int n, int unit) { return (float*)(shared + at) + n * UNITS + unit; }

template <int N>
DEVICE void load_shared_floats(float (&x)[N], const float* from) {
    u32 w[N];
    load_words(w, from);
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = __uint_as_float(w[i]);
}

DEVICE void load_numbers(int at, const float* from, const Place& place) {
    for (int i = threadIdx.x; i < NUMBERS * UNITS; i += THREADS) {
        const int unit = place.rank * UNITS + i % UNITS;
        *number(at, i / UNITS, i % UNITS) = unit < SIZE ? from[(i64)(i / UNITS) * COLUMNS + place.head * SIZE + unit] : 0.0f;
    }
}

// ---- between blocks -------------------------------------------------------------------------------

// An array (time, batch, columns), as the driver describes it to the copy engine.
struct alignas(64) TensorMap {
    u64 words[16];
};

#if PAIRED || CROWDED
#define TRACK_PARAMETER const __grid_constant__ TensorMap track,
#define TRACK &track
#else
#define TRACK_PARAMETER
#define TRACK nullptr
#endif

// Where blocks meet in device memory (FAR); else unused.
struct Exchange {
    u32* shares;           // of dh, of the group (shares.cuh)
    const char* vectors;   // of the group's first row (far.cuh, pairs.cuh, crowds.cuh)
    i64 pitch;             // bytes from row to row
    int rows;              // of the batch, from there on
    const TensorMap* map;  // the array they lie in, as the copy engine sees it (pairs.cuh, crowds.cuh)
    int first_row, time;   // of the group there; of the step
    int rank;
};

// Blocks that write into each other's shared memory: a group, or of a far group those that share their da.
constexpr int NEIGHBOURS = !FAR ? CLUSTER : PARTNERS > 0 && !CROWDED ? PARTNERS : 1;

// Of shares.cuh: blocks of a team; shares of a unit; tiles of units in one block's part of them, and its units; words of a group.
constexpr int MEMBERS = CROWDED ? PARTNERS : NEIGHBOURS, TEAMS = CLUSTER / MEMBERS;
constexpr int TILE = HOPPER ? 64 : 16, TILES_EACH = (SIZE + TILE * MEMBERS - 1) / (TILE * MEMBERS), PART = TILE * TILES_EACH;
constexpr i64 SHARES = (i64)2 * TEAMS * CLUSTER * ROWS * UNITS * BYTES / 4;

// Two mailboxes at the start of shared memory, one for each buffer.
DEVICE u32 mailbox(int buffer) { return shared_address(shared) + 8 * buffer; }

DEVICE void open_mailboxes(u32 bytes) {
    if constexpr (NEIGHBOURS > 1) {
        if (threadIdx.x == 0) {
            mailbox_open(mailbox(0)), mailbox_open(mailbox(1));
            mailboxes_visible();
            mailbox_expect(mailbox(0), bytes), mailbox_expect(mailbox(1), bytes);
        }
        cluster_barrier();
    }
}

// Waits for what step `use` (counted from 1) reads, `bytes` in all from all neighbours.
DEVICE void receive(int use, u32 bytes) {
    if constexpr (NEIGHBOURS > 1) {
        mailbox_wait(mailbox(use % 2), (use - 1) / 2 % 2);
        if (threadIdx.x == 0) mailbox_expect(mailbox(use % 2), bytes);
    }
}

// Writes words to `place` in the shared memory of block `to`.
template <int WORDS>
DEVICE void send(void* place, const u32 (&w)[WORDS], int buffer, int to) {
    if constexpr (NEIGHBOURS == 1) store_words(place, w);
    else deliver(in_block(shared_address(place), to), w, in_block(mailbox(buffer), to));
}

// No block may leave while another can still write into its shared memory.
DEVICE void leave() {
    if constexpr (NEIGHBOURS > 1) cluster_barrier();
}

// One tile of shares of dh. mma leaves a thread two rows of each of two units; by two swaps with its neighbours
// it comes to have four units of one row, 16 bytes.
struct FourUnits {
    struct Place {
        int row, unit;  // inside the tile
        __device__ __forceinline__ Place() {
            const int lane = threadIdx.x % 32;
            row = lane % 4 * 2 + lane / 4 % 2, unit = lane / 8 % 2 * 8 + lane / 16 * 4;
        }
    } place;
    u32 word[4];

    __device__ __forceinline__ explicit FourUnits(const float (&d)[4]) {
        const int lane = threadIdx.x % 32, odd = lane / 4 % 2, upper = lane / 8 % 2;
        float pair[2][2];  // of the lower and the upper eight units: two units of row 2 (lane % 4) + odd
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float even_row = d[2 * half], odd_row = d[2 * half + 1];
            const float swapped = __shfl_xor_sync(~0u, odd ? even_row : odd_row, 4);
            pair[half][0] = odd ? swapped : even_row, pair[half][1] = odd ? odd_row : swapped;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float swapped = __shfl_xor_sync(~0u, upper ? pair[0][i] : pair[1][i], 8);
            word[i] = __float_as_uint(upper ? swapped : pair[0][i]), word[2 + i] = __float_as_uint(upper ? pair[1][i] : swapped);
        }
    }
};

DEVICE void clear(void* from, int bytes) {
    for (int i = threadIdx.x; i < bytes / 16; i += THREADS) ((uint4*)from)[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
}
