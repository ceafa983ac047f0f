// As far.cuh, by what a Hopper GPU has for it: blocks in pairs (clusters of two), each of which multiplies the rows
// of both with its half of the vector:
//
//     stream      the copy engine brings the half, chunk by chunk, from device memory (that is, from L2) to shared
//                 memory in the layout that wgmma reads, as soon as a look at one value of every block that makes
//                 the chunk finds it stored
//     multiply    wgmma, 64 rows of W to a tile, in registers as far as they reach, then in shared memory
//     swap        sums of the partner's rows go to the partner, in one copy
//
// Or (JOINED, forward) each multiplies its own rows with the whole vector, of which each has one half brought to both: then
// nothing is swapped, and the two warpgroups, each with every second chunk, have their sums added up.
//
// So an SM reads half of what far.cuh reads, and with a few instructions. A value that was not stored yet when its chunk
// was copied is EMPTY, a NaN, and makes a NaN of every sum of its row: only where there is one has anybody to look closer.
// (Stores and the engine's reads meet in L2. Nothing orders them, nor has to: what was read says itself whether it is new.)
// All blocks must be on the GPU at once: the launch is cooperative, or refused.
//
// A group may have TURNS times ROWS rows, and W serves them in turn: while the sums of one turn are swapped, its equations
// computed and its new values on their way to the others, the next is multiplied. Then a block has warps for each:
//
//     the first WARPS        have the units: wait for a turn's sums, compute, store
//     WARPGROUPS times four  have W: wait for chunks, multiply, store the sums
//     three                  look for the next turn's values and ask for their chunks
//     one                    sends sums to the partner
//
// Multiplications are counted: `use` u is that of turn u % (turns that have rows); sums have two places in turn. What a warp
// does for u waits for what was done for smaller numbers, in whichever block (values: a step's turns before; a chunk's place:
// the multiplication of the chunk that had it; the places of sums: until both partners have read those of u - 2), and for what
// the warps above do for u in the order asked for, multiplied, sent, read. So nothing waits for ever.
#pragma once
#include "recurrence.cuh"
#include "hopper.cuh"

constexpr int WARPGROUPS = TURNS > 1 ? MULTIPLIERS : WARPS / 4;
constexpr int FIRST_THREAD = TURNS > 1 ? THREADS : 0, MULTIPLYING = 128 * WARPGROUPS;  // of those that multiply, and how many
DEVICE u32 multiplier() { return threadIdx.x - FIRST_THREAD; }
static_assert(LAUNCHED == (TURNS > 1 ? THREADS + MULTIPLYING + 128 : THREADS), "the plan counts as the kernel does");
constexpr int OWN_M = TRANSPOSED ? UNITS : GATES * UNITS;                       // rows of W that make a block's own units
constexpr int ALL_M = JOINED ? OWN_M : 2 * OWN_M;                               // that it multiplies
constexpr int M_TILES = JOINED ? (ALL_M + 63) / 64 : (ALL_M + 64 * WARPGROUPS - 1) / (64 * WARPGROUPS);  // of 64 rows, of one warpgroup
constexpr int CHUNK = 128 / BYTES;                                              // elements of a row: what a swizzle spans
constexpr int CHUNKS = (SIZE + 2 * CHUNK - 1) / (2 * CHUNK);                    // of a half
constexpr int K_STEPS = 4;                                                      // of a chunk: 32 bytes each
constexpr int SHARED_CHUNKS = CHUNKS - REGISTER_CHUNKS;
constexpr int PRODUCERS = (CHUNK - 2) / UNITS + 2 > CLUSTER ? CLUSTER : (CHUNK - 2) / UNITS + 2;  // blocks that make a chunk, at most

static_assert(SIZE % 8 == 0 && UNITS % 2 == 0, "two elements are a word");
static_assert(BYTES == 2 && HEADS == 1 && PARTNERS == 2 && CLUSTER % 2 == 0, "half precision, whole pairs");
static_assert(!JOINED || !TRANSPOSED && TURNS == 1 && WARPGROUPS == 2 && STAGES == 2 * CHUNKS && STAGES <= 32, "a place and a lane for every chunk of both halves");
static_assert(!JOINED || (CLUSTER - 1) * UNITS < SIZE, "no block without units, by which it says that it has done with a vector");
static_assert(TRANSPOSED == 0 || GATES == 1, "one value per unit is read");
static_assert(TURNS == 1 || CHUNKS == STAGES || CHUNKS % STAGES == 0 && STAGES >= 5, "places are used equally often; see ask_in_turns");
static_assert(REGISTER_TILES == REGISTER_CHUNKS * K_STEPS * M_TILES && (JOINED || STAGES <= CHUNKS) && CHUNKS <= 32, "a lane asks for a chunk");

// ---- the shared memory of a block: mailboxes, chunks' barriers; chunks; tiles of W; sums: own, to send, twice received
// (in turns: twice each, and a chunk's place more; joined: both warpgroups', twice); the ring -------------------------------------------------------------

constexpr int CHUNK_BYTES = ROWS * 128;
constexpr int PARTIAL_PITCH = OWN_M + 4;  // floats
constexpr int SLICE_BYTES = ROWS * PARTIAL_PITCH * 4;
constexpr int FULL_AT = 16, FREE_AT = FULL_AT + 8 * STAGES;
constexpr int STAGES_AT = 1024;
constexpr int PLACES = TURNS > 1 ? STAGES + 1 : STAGES;
constexpr int WEIGHTS_AT = STAGES_AT + PLACES * CHUNK_BYTES;
constexpr int PARTIALS_AT = WEIGHTS_AT + SHARED_CHUNKS * WARPGROUPS * M_TILES * 8192;
constexpr int RING_AT = PARTIALS_AT + (TURNS > 1 ? 6 : 4) * SLICE_BYTES;
static_assert(FREE_AT + 8 * STAGES + (TURNS > 1 ? 40 : 8) <= STAGES_AT, "barriers fit before the chunks");

#if TURNS > 1
enum { OWN_SUMS = 0, SENT_SUMS = 2, RECEIVED_SUMS = 4 };  // and a second of each
#else
enum { OWN_SUMS, SENT_SUMS, RECEIVED_SUMS };  // and a second of the last
#endif
DEVICE float* partials(int slice, int row) { return (float*)(shared + PARTIALS_AT + slice * SLICE_BYTES) + row * PARTIAL_PITCH; }
DEVICE int* repeated() { return (int*)(shared + FREE_AT + 8 * STAGES); }  // how many multiplications were repeated
DEVICE u32 full(int chunk) { return shared_address(shared) + FULL_AT + 8 * (chunk % STAGES); }
DEVICE u32 freed(int chunk) { return shared_address(shared) + FREE_AT + 8 * (chunk % STAGES); }
// In turns: the sums of a use are made, and read by both partners; a chunk has come again.
DEVICE u32 turn_mailbox(int n) { return shared_address(shared) + FREE_AT + 8 * (STAGES + n); }
DEVICE u32 made(int use) { return turn_mailbox(use % 2); }
DEVICE u32 taken(int use) { return turn_mailbox(2 + use % 2); }
DEVICE u32 come_again() { return turn_mailbox(4); }
DEVICE u32 stage(int chunk) { return shared_address(shared) + STAGES_AT + chunk % STAGES * CHUNK_BYTES; }
// 64 rows of W by one chunk: the first tile of a warpgroup.
DEVICE char* shared_tile(int group) { return shared + WEIGHTS_AT + group * M_TILES * 8192; }

// Uses of a chunk's place in one multiplication, and how many were before: multiplication n, counted from 0.
DEVICE constexpr int uses(int chunk) { return (CHUNKS - chunk % STAGES + STAGES - 1) / STAGES; }
DEVICE u32 parity_of_full(int chunk, int n) { return (n * uses(chunk) + chunk / STAGES) % 2; }
DEVICE u32 parity_of_free(int chunk, int n) { return (n * (uses(chunk) - 1) + chunk / STAGES) % 2; }

// The first element of the half that a block multiplies, or has brought for both.
DEVICE int half_of(int rank) { return rank % 2 * CHUNKS * CHUNK; }

// The n-th chunk that a warpgroup multiplies, counted from its first: where partners share the vector every second one, of
// both halves in turn, as they come.
DEVICE constexpr int nth_chunk(int n) { return JOINED ? (n % 2 * ((CHUNKS + 1) / 2) + n / 2) * 2 : n; }
DEVICE int first_chunk(int group) { return JOINED ? group : 0; }

// The word with columns k and k + 1 (k is even) of the half, of row m: first the first partner's rows, gate by gate, then the
// second's; or of the whole, of the block's own rows. Of W' it is two elements, far from each other; in turns, where tiles and
// addresses of so many do not fit registers, the lanes that have rows m and m ^ 1, `apart` from each other, read one of its
// columns each, and swap.
DEVICE u32 weight_word(const char* W, int rank, int m, int k, int apart) {
    const int gate = m % OWN_M / UNITS, i = (JOINED ? rank : rank / 2 * 2 + m / OWN_M) * UNITS + m % UNITS;
    if (!JOINED) k += half_of(rank);
    if (TRANSPOSED && TURNS == 1) {
        auto element = [&](int k) { return m >= ALL_M || i >= SIZE || k >= SIZE ? 0 : weight(W, 0, k, i); };
        return element(k) | element(k + 1) << 16;
    }
    const bool real = m < ALL_M && i < SIZE && k < SIZE, odd = m % 2;
    const i64 element = TRANSPOSED ? (i64)(k + odd) * SIZE + i - odd : (i64)(gate * SIZE + i) * SIZE + k;
    const u32 word = real ? *(const u32*)(W + element * BYTES) : 0;
    if (!TRANSPOSED) return word;
    const u32 other = __shfl_xor_sync(~0u, word, apart);
    return odd ? other >> 16 | (word & 0xffff0000u) : (word & 0xffffu) | other << 16;
}

DEVICE void load_matrix(Matrix& A, const void* W, int rank) {
    const int lane = threadIdx.x % 32, warp = multiplier() / 32, m0 = (JOINED ? 0 : warp / 4 * M_TILES * 64) + warp % 4 * 16;
    auto column_of = [&](int group, int n) { return (nth_chunk(n) + first_chunk(group)) * CHUNK; };
#pragma unroll
    for (int i = 0; i < REGISTER_TILES; i++)
        load_tile(A.tile[i], lane, [&](int row, int column) {
            return weight_word((const char*)W, rank, m0 + i % M_TILES * 64 + row, column_of(warp / 4, i / M_TILES / K_STEPS) + i / M_TILES % K_STEPS * (CHUNK / K_STEPS) + column, 4);
        });
    for (int i = multiplier(); i < SHARED_CHUNKS * WARPGROUPS * M_TILES * 512; i += MULTIPLYING) {  // 16 bytes each, swizzled
        const int tile = i / 512, row = i / 8 % 64, piece = i % 8, chunk = REGISTER_CHUNKS + tile / (WARPGROUPS * M_TILES), m = tile % (WARPGROUPS * M_TILES);
        u32 w[4];
#pragma unroll
        for (int j = 0; j < 4; j++) w[j] = weight_word((const char*)W, rank, (JOINED ? m % M_TILES : m) * 64 + row, column_of(m / M_TILES, chunk) + (piece * 4 + j) * 4 / BYTES, 8);
        store_words(shared + WEIGHTS_AT + tile * 8192 + row * 128 + (piece ^ row % 8) * 16, w);
    }
    order_before_engines();
}

// Whether one value of each of these blocks, PRODUCERS at most, is stored, of the last item of its busiest warp: so, most
// likely, are all.
DEVICE bool seem_stored(int first, int last, const Exchange& from) {
    constexpr int ROW = (ITEMS - 1) * THREADS / (UNITS / WIDE);
    const char* row = from.vectors + min(ROW, from.rows - 1) * from.pitch;
    u32 w[PRODUCERS][1];
#pragma unroll
    for (int p = 0; p < PRODUCERS; p++) load_words_past_l1(w[p], row + (i64)min(first + p, last) * (UNITS * BYTES));
    bool all = true;
#pragma unroll
    for (int p = 0; p < PRODUCERS; p++) all &= !any_empty(w[p]);
    return all;
}

// The same of those blocks that make a chunk of the half.
DEVICE bool seems_stored(int chunk, int rank, const Exchange& from) {
    const int first = half_of(rank) + chunk * CHUNK, last = min(first + CHUNK, SIZE) - 1;
    return first >= SIZE || seem_stored(first / UNITS, last / UNITS, from);
}

DEVICE void start_chunk(int chunk, int rank, const Exchange& from) {
    mailbox_expect(full(chunk), CHUNK_BYTES);
    start_box(stage(chunk), from.map, half_of(rank) + chunk * CHUNK, from.first_row, from.time, full(chunk));
}

// Cycles from a block's own values to its first look for the others': they cannot be there sooner, and looks keep L2 from
// storing. In two turns looking begins during the one before; of 16 chunks, or more turns, any rest makes a step longer.
// (Backward none was measured.)
constexpr int REST = TRANSPOSED ? 0 : TURNS > 1 ? (TURNS == 2 && CHUNKS < 16 ? 900 : 0) : ROWS < 32 ? (JOINED ? 300 : 0) : JOINED ? 600 : 300;

#if JOINED
// Has the half brought to both partners: the first warp asks for it, each lane for a chunk, and expects what the partner sends.
// Nothing goes to the partner before it has stored a value of the step, and so has done with the vector before.
DEVICE void start_stream(int rank, const Exchange& from) {
    if (threadIdx.x >= 32) return;
    const int lane = threadIdx.x, chunk = rank % 2 * CHUNKS + lane, column = chunk * CHUNK;
    const bool makes = lane < CHUNKS && column < SIZE;
    const int first = makes ? column / UNITS : rank ^ 1, last = makes ? (min(column + CHUNK, SIZE) - 1) / UNITS : rank ^ 1;
    const long long start = clock64();
    rest(REST);
    while (!__all_sync(~0u, seem_stored(first, last, from))) lose_patience(start);
    if (lane < STAGES) mailbox_expect(full(lane), CHUNK_BYTES);
    if (lane < CHUNKS) start_box_for_both(stage(chunk), from.map, column, from.first_row, from.time, full(chunk));
    __syncwarp();
}

// Has all of it brought, here alone.
DEVICE void start_again(const Exchange& from) {
    if (threadIdx.x >= STAGES) return;
    mailbox_expect(full(threadIdx.x), CHUNK_BYTES);
    start_box(stage(threadIdx.x), from.map, threadIdx.x * CHUNK, from.first_row, from.time, full(threadIdx.x));
}
#else
// Has the half brought, as far as there is room: the first warp asks for it, each lane for a chunk.
DEVICE void start_stream(int rank, const Exchange& from) {
    if (threadIdx.x >= 32) return;
    if (threadIdx.x < CHUNKS) {
        const long long start = clock64();
        if (REST > 0) rest(REST);
        while (!seems_stored(threadIdx.x, rank, from)) lose_patience(start);
        if (threadIdx.x < STAGES) start_chunk(threadIdx.x, rank, from);
    }
    __syncwarp();
}
#endif

DEVICE void no_sums(float (&d)[M_TILES][ROW_TILES][4]) {
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int i = 0; i < 4; i++) d[m][r][i] = 0.0f;
        settle(d[m]);
    }
}

// d += (its tiles of W in a chunk's columns) x (the chunk in that place), as soon as the tensor cores come to it.
DEVICE void add_chunk(float (&d)[M_TILES][ROW_TILES][4], const Matrix& A, int chunk, int place, Operand vector, Operand tiles) {
#pragma unroll
    for (int k = 0; k < K_STEPS; k++)
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            const u64 b = vector.at(place * CHUNK_BYTES + k * 32);
            if (chunk < REGISTER_CHUNKS) multiply_64(d[m], A.tile[chunk < REGISTER_CHUNKS ? (chunk * K_STEPS + k) * M_TILES + m : 0], b);
            else multiply_64(d[m], tiles.at(((chunk - REGISTER_CHUNKS) * WARPGROUPS * M_TILES + m) * 8192 + k * 32), b);
        }
}

// d = (its tiles of W) x (the half of the vectors), multiplication n.
DEVICE void multiply(float (&d)[M_TILES][ROW_TILES][4], const Matrix& A, int n, int rank, const Exchange& from) {
    const int lane = threadIdx.x % 32, warp = multiplier() / 32;
    const Operand vector = Operand::swizzled(shared + STAGES_AT + first_chunk(warp / 4) * CHUNK_BYTES), tiles = Operand::swizzled(shared_tile(warp / 4));
    no_sums(d);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        mailbox_wait_here(full(nth_chunk(chunk) + first_chunk(warp / 4)), JOINED ? n % 2 : parity_of_full(chunk, n));
        sums_begin();
        add_chunk(d, A, chunk, nth_chunk(chunk) % STAGES, vector, tiles);
        sums_commit();
        if (TURNS > 1 ? chunk > 0 : STAGES < CHUNKS && chunk > 0 && chunk - 1 + STAGES < CHUNKS) {  // the place of the chunk before is filled anew
            sums_wait<1>();
            if (lane == 0) {
                mailbox_arrive(freed(chunk - 1));
                if (TURNS == 1 && warp == 0) {
                    mailbox_wait_here(freed(chunk - 1), parity_of_free(chunk - 1, n));
                    start_chunk(chunk - 1 + STAGES, rank, from);
                }
            }
            __syncwarp();
        }
    }
    sums_wait<0>();
    if (TURNS > 1 && lane == 0) mailbox_arrive(freed(CHUNKS - 1));
#pragma unroll
    for (int m = 0; m < M_TILES; m++) settle(d[m]);
}

// Waits until every value of the half is stored, together with other threads.
DEVICE void await_all(int rank, const Exchange& from, int thread, int threads) {
    constexpr int PER_ROW = (JOINED ? 2 : 1) * CHUNKS * CHUNK * BYTES / 16;
    const long long start = clock64();
    for (int i = thread; i < ROWS * PER_ROW; i += threads) {
        const int row = i / PER_ROW, byte = (JOINED ? 0 : half_of(rank)) * BYTES + i % PER_ROW * 16;
        if (row >= from.rows || byte >= SIZE * BYTES) continue;
        u32 w[4];
        do {
            load_words_past_l1(w, from.vectors + row * from.pitch + byte);
            lose_patience(start);
        } while (any_empty(w));
    }
    order_before_engines();
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

#if JOINED
// A warpgroup's sums to where they are added up.
DEVICE void keep_sums(const float (&d)[M_TILES][ROW_TILES][4], int use) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        const int place = m * 64 + warp % 4 * 16 + FourUnits::Place().unit;
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            const FourUnits four(d[m][r]);
            if (place < OWN_M) store_words(partials(use % 2 * 2 + warp / 4, r * 8 + four.place.row) + place, four.word);
        }
    }
}
#else
// Sums of the own rows to where they are added up, those of the partner's to where they are sent from.
DEVICE void keep_sums(const float (&d)[M_TILES][ROW_TILES][4], int rank, int use = 0) {
    const int warp = multiplier() / 32, second = TURNS > 1 ? use % 2 : 0;
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        const int place = (warp / 4 * M_TILES + m) * 64 + warp % 4 * 16 + FourUnits::Place().unit, partner = place / OWN_M;
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            const FourUnits four(d[m][r]);
            if (partner < 2) store_words(partials((partner == rank % 2 ? OWN_SUMS : SENT_SUMS) + second, r * 8 + four.place.row) + place % OWN_M, four.word);
        }
    }
    order_shared_before_engines();
}
#endif

// ---- a step, in the words of forward.cu and backward.cu -------------------------------------------------

DEVICE void open_exchange() {
    if (threadIdx.x == 0) {
        *repeated() = 0;
        for (int i = 0; i < STAGES; i++) {
            mailbox_open(full(i), 1);
            mailbox_open(freed(i), 4 * WARPGROUPS);
        }
    }
#if TURNS > 1
    if (threadIdx.x == 0) {
        mailbox_open(come_again(), 1);
        for (int i = 0; i < 2; i++) {
            mailbox_open(made(i), 1);
            mailbox_open(taken(i), 2 * WARPS);  // by its own warps that have units, and the partner's
            mailbox_open(mailbox(i));
        }
        mailboxes_visible();
        for (int i = 0; i < 2; i++) mailbox_expect(mailbox(i), SLICE_BYTES);
    }
    cluster_barrier();
#else
    open_mailboxes(SLICE_BYTES);
#endif
}

// The caller stores the values where the others read them.
DEVICE void hand_on(Stored values, const Item& it, int gate, int use, int rank) {}

constexpr bool FETCHES_FIRST = ROWS >= 32;  // else chunks, which are more urgent; but of many rows some are stored late

#if TURNS > 1
static_assert(WARPGROUPS <= 2 && THREADS == 128, "warpgroups with W, and one with units");

// Registers of a thread: the block's at the launch, then by what its warpgroup does. Tiles of W that were moved between
// products would have these wait for each other, so those who multiply have what they need.
constexpr int REGISTERS = 65536 / LAUNCHED / 8 * 8, BRINGING_REGISTERS = 40;
constexpr int MULTIPLYING_REGISTERS = WARPGROUPS == 1 ? 232 : 4 * REGISTER_TILES + M_TILES * ROWS / 2 > 144 ? 192 : 184;
constexpr int LEFT = (REGISTERS * LAUNCHED - 128 * BRINGING_REGISTERS - MULTIPLYING * MULTIPLYING_REGISTERS) / THREADS / 8 * 8;
constexpr int UNITS_REGISTERS = LEFT > 232 ? 232 : LEFT;

// How many of the group's turns have rows of the batch.
DEVICE int live_turns(int group, int batch) { return min(TURNS, (batch - group * (TURNS * ROWS) + ROWS - 1) / ROWS); }

// Has a chunk of the half brought to a place, and `mailbox` told.
DEVICE void ask_for(int chunk, int place, u32 mailbox, int rank, const Exchange& from) {
    mailbox_expect(mailbox, CHUNK_BYTES);
    start_box(shared_address(shared) + STAGES_AT + place * CHUNK_BYTES, from.map, half_of(rank) + chunk * CHUNK, from.first_row, from.time, mailbox);
}

// Whether any thread that multiplies says so, all of which wait for each other.
DEVICE bool any_multiplying(bool one) { return any_of(1, MULTIPLYING, one); }

// Multiplies once all values are stored: chunk by chunk through a place of its own, since the others have the next turn's
// already. `before`: how often that was used.
DEVICE void multiply_again(float (&d)[M_TILES][ROW_TILES][4], const Matrix& A, int before, int rank, const Exchange& from) {
    await_all(rank, from, multiplier(), MULTIPLYING);
    any_multiplying(false);
    const Operand vector = Operand::swizzled(shared + STAGES_AT), tiles = Operand::swizzled(shared_tile(multiplier() / 128));
    no_sums(d);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        if (multiplier() == 0) ask_for(chunk, STAGES, come_again(), rank, from);
        mailbox_wait_here(come_again(), (before + chunk) % 2);
        sums_begin();
        add_chunk(d, A, chunk, STAGES, vector, tiles);
        sums_commit();
        sums_wait<0>();
        any_multiplying(false);
    }
#pragma unroll
    for (int m = 0; m < M_TILES; m++) settle(d[m]);
}

template <class At>
DEVICE void multiply_in_turns(const void* W, int rank, int steps, int turns, At at) {
    Matrix A;
    load_matrix(A, W, rank);
    any_multiplying(false);
    float d[M_TILES][ROW_TILES][4];
    int use = 0, again = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++)
#pragma unroll 1
        for (int turn = 0; turn < turns; turn++, use++) {
            const Exchange from = at(step, turn);
            multiply(d, A, use, rank, from);
            if (use > 1) mailbox_wait_here(taken(use), (use / 2 - 1) % 2);
            keep_sums(d, rank, use);
            if (any_multiplying(any_nan(d))) {
                multiply_again(d, A, again, rank, from);
                again += CHUNKS;
                keep_sums(d, rank, use);
                any_multiplying(false);
            }
            if (multiplier() == 0) mailbox_arrive(made(use));
        }
}

// Asks for every third chunk, once all of these seem stored, one after the other as soon as there is room: a lane has a chunk.
// (`freed` tells odd uses of a place from even ones, no more. Where each chunk has a place of its own, its lane was the last to
// ask for it. Else: the asker's last chunk was five chunks before at most. It could ask for that, so what had that place before
// is multiplied, and all that came earlier; with five places or more, what had this place the time before last is among them.)
template <class At>
DEVICE void ask_in_turns(int asker, int rank, int steps, int turns, At at) {
    const u32 lane = threadIdx.x % 32, chunk = asker + 3 * lane, before = (1u << lane) - 1;
    int used = chunk / STAGES;  // times that its place was
#pragma unroll 1
    for (int step = 0; step < steps; step++)
#pragma unroll 1
        for (int turn = 0; turn < turns; turn++, used += CHUNKS / STAGES) {
            const Exchange from = at(step, turn);
            const long long start = clock64();
            bool asked = chunk >= CHUNKS, stored = asked;
            if (REST > 0) rest(REST);
            while (!__all_sync(~0u, stored)) {
                if (!stored) stored = seems_stored(chunk, rank, from);
                lose_patience(start);
            }
            for (u32 all = __ballot_sync(~0u, asked); all != ~0u; all = __ballot_sync(~0u, asked)) {
                if (!asked && (all & before) == before && (used == 0 || mailbox_full_here(freed(chunk), (used - 1) % 2))) {
                    ask_for(chunk, chunk % STAGES, full(chunk), rank, from);
                    asked = true;
                }
                lose_patience(start);
            }
        }
}

DEVICE void send_in_turns(int rank, int uses) {
    const u32 to = rank % 2 ^ 1;
    if (threadIdx.x % 32 == 0)
        for (int use = 0; use < uses; use++) {
            const int second = use % 2;
            mailbox_wait_here(made(use), use / 2 % 2);
            send_block(in_block(shared_address(partials(RECEIVED_SUMS + second, 0)), to), shared_address(partials(SENT_SUMS + second, 0)), SLICE_BYTES, in_block(mailbox(second), to));
        }
    __syncwarp();
}

// What warps do that have no units; `at`(step, turn) is where the values are that a step multiplies.
template <class At>
DEVICE void serve(const void* W, int rank, int steps, int turns, At at) {
    if (threadIdx.x < FIRST_THREAD + MULTIPLYING) {
        have_registers<MULTIPLYING_REGISTERS, REGISTERS>();
        multiply_in_turns(W, rank, steps, turns, at);
    } else {
        have_registers<BRINGING_REGISTERS, REGISTERS>();
        const int warp = threadIdx.x / 32 % 4;
        if (warp < 3) ask_in_turns(warp, rank, steps, turns, at);
        else send_in_turns(rank, steps * turns);
    }
}

// Begins, `load_own` having loaded what units need. Warps that have none serve the others until the last step, and are done: false.
template <class At, class Load>
DEVICE bool begin_turns(const void* W, int rank, int steps, int turns, At at, Load load_own) {
    open_exchange();
    load_own();
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        serve(W, rank, steps, turns, at);
        leave();
        return false;
    }
    have_registers<UNITS_REGISTERS, REGISTERS>();
    return true;
}

// Of those that have units: waits for the sums of both partners.
template <class Fetch>
DEVICE void collect(int use, Fetch fetch) {
    fetch();
    mailbox_wait_here(made(use), use / 2 % 2);
    mailbox_wait(mailbox(use % 2), use / 2 % 2);
    if (threadIdx.x == 0) mailbox_expect(mailbox(use % 2), SLICE_BYTES);
}

DEVICE void sum(Values& a, const Item& it, int gate, int use, const Exchange&) {
    gather(a, partials(OWN_SUMS + use % 2, it.row) + gate * UNITS + it.unit, 2, RECEIVED_SUMS * (SLICE_BYTES / 4));
}

// A warp's items are done: their sums are read, here and where the partner sends from.
DEVICE void conclude(int use, int rank) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        mailbox_arrive(taken(use));
        mailbox_arrive_at(in_block(taken(use), rank % 2 ^ 1));
    }
}
#elif JOINED
template <class Fetch>
DEVICE void collect(const Matrix& A, int use, const Exchange& from, Fetch fetch) {
    float d[M_TILES][ROW_TILES][4];
    const int before = *repeated();
    if (FETCHES_FIRST) fetch();
    start_stream(from.rank, from);
    if (!FETCHES_FIRST) fetch();
#pragma unroll 1
    for (int round = 0; round < 2; round++) {  // once; or again, where something was missing, or a NaN is the user's
        multiply(d, A, use + before + round, from.rank, from);
        keep_sums(d, use);
        if (!__syncthreads_or(round == 0 && any_nan(d))) break;
        if (threadIdx.x == 0) *repeated() = before + 1;
        await_all(from.rank, from, threadIdx.x, THREADS);
        __syncthreads();
        start_again(from);
    }
}

// W times the vector, for one gate of an item.
DEVICE void sum(Values& a, const Item& it, int gate, int use, const Exchange&) {
    gather(a, partials(use % 2 * 2, it.row) + gate * UNITS + it.unit, 2, SLICE_BYTES / 4);
}

// Sums have two places in turn, and before any are stored in one all threads have met.
DEVICE void conclude(const Matrix& A, int use, int rank, const Exchange& from) {}
#else
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
        await_all(rank, from, threadIdx.x, THREADS);
        __syncthreads();
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

// After the items of all threads: their sums are read, and those sent are gone.
DEVICE void conclude(const Matrix& A, int use, int rank, const Exchange& from) {
    if (threadIdx.x == 0) blocks_sent();
    __syncthreads();
}
#endif
