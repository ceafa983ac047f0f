// Shares of dh in device memory, of which the owners of the units add up those of all teams, in one order (spread.cuh,
// teams.cuh, crowds.cuh). Shares have two places, in turn, and the last bit says in which turn they were stored, so that nothing
// else has to be waited for. Nor is one overwritten too early: a share of step u + 2 is made of its team's dh of step
// u + 1, to which every block has given a share, and for that it had read all its own of step u.
//
// In half precision shares are of that precision, too: the roundings of all of them add up to about one of their sum,
// dh. Four of them, of one row, are stored and loaded as one word of 8 bytes, and have one last bit for all.
#pragma once
#include "recurrence.cuh"

static_assert(UNITS % 4 == 0, "four units have one owner");

constexpr int FOUR_WORDS = BYTES, FOUR_BYTES = 4 * FOUR_WORDS;  // of four shares

// What team `team` gives to block `owner` in step `use`: four shares for every row, and the next four units. A warp writes
// 16 units of 8 rows, and whole sectors of 32 bytes: where those of a row would be none, it has the rows beside each other.
DEVICE char* shares_from(const Exchange& at, int use, int team, int owner) { return (char*)at.shares + ((use % 2 * TEAMS + team) * CLUSTER + owner) * (ROWS * UNITS * BYTES); }
DEVICE int four_at(int row, int unit) {
    if (UNITS % 16 == 0) return (row * UNITS + unit / 4 * 4) * BYTES;
    return (row / 8 * (UNITS / 4) + unit / 4) * (8 * FOUR_BYTES) + row % 8 * FOUR_BYTES;
}

// The last bit: whether the place, at first 0, has been written an odd number of times.
DEVICE u32 turn_of(int use) { return (use + 1) / 2 % 2; }
DEVICE u32 with_turn(u32 word, u32 turn) { return word & ~1u | turn; }

// Which unit of 16 the rows of a tile of W' are, so that mma leaves a thread two neighbours.
DEVICE int unit_of_row(int row) { return row / 16 * 16 + row % 8 * 2 + row / 8 % 2; }

// A share that has a bit less, to nearest; as it is where it has not. (Below 6e-5, where float16 has fewer bits anyway, the
// last is cut off.)
DEVICE float rounded(float share, bool has_less) {
    constexpr u32 LAST = DTYPE == BF16 ? 0x10000 : 0x2000;
    const u32 word = __float_as_uint(share);
    return has_less && share == share ? __uint_as_float((word + LAST) & ~(2 * LAST - 1)) : share;  // (an infinity is one still)
}

// Four shares of a row. mma leaves a thread two rows of each of two units: by a swap it comes to have four units of one.
struct FourShares {
    struct Place {
        int row, unit;  // inside the tile
        __device__ __forceinline__ Place() {
            const int lane = threadIdx.x % 32;
            row = lane % 4 * 2 + lane / 4 % 2, unit = lane / 8 * 4;
        }
    };
    u32 word[FOUR_WORDS];

    __device__ __forceinline__ FourShares(const float (&d)[4], u32 turn) {
        const bool odd = threadIdx.x / 4 % 2;
        constexpr int TWO = FOUR_WORDS / 2;
        u32 of_row[2][TWO];  // 2 (lane % 4), and the next
#pragma unroll
        for (int row = 0; row < 2; row++) {
            if constexpr (BYTES == 2) of_row[row][0] = pack2(rounded(d[row], !odd), d[row + 2]);
            else of_row[row][0] = __float_as_uint(d[row]), of_row[row][TWO - 1] = __float_as_uint(d[row + 2]);
        }
#pragma unroll
        for (int i = 0; i < TWO; i++) {
            const u32 swapped = __shfl_xor_sync(~0u, odd ? of_row[0][i] : of_row[1][i], 4);
            word[i] = odd ? swapped : of_row[0][i], word[TWO + i] = odd ? of_row[1][i] : swapped;
        }
#pragma unroll
        for (int i = 0; i < (BYTES == 2 ? 1 : 4); i++) word[i] = with_turn(word[i], turn);
    }
};

// Where the shares of one tile go, 16 units from unit `first` of the block's part on, of all rows: a thread has four
// units of a row.
struct Meeting {
    char* place;
    int row;
    bool there;
    u32 turn;

    __device__ __forceinline__ Meeting(int first, int use, int rank, const Exchange& at) {
        asm volatile("" : "+r"(first));  // addresses of all tiles, found before the loop over time, would fit no registers
        const FourShares::Place four;
        const int unit = rank % MEMBERS * PART + first + four.unit;
        row = four.row, there = first < PART && unit < SIZE, turn = turn_of(use);
        place = shares_from(at, use, rank / MEMBERS, unit / UNITS) + four_at(row, unit % UNITS);
    }
    __device__ __forceinline__ void store(const float (&d)[4], int row_tile, const Exchange& at) const {
        const FourShares four(d, turn);
        if (there && row_tile * 8 + row < at.rows) store_words_past_l1(place + row_tile * (8 * UNITS * BYTES), four.word);
    }
};

// One team's shares of an item, or what lies there instead.
struct Share {
    u32 word[BYTES == 2 ? 2 : WIDE];

    __device__ __forceinline__ void load(const char* four, int unit) { load_words_past_l1(word, four + (BYTES == 2 ? 0 : unit % 4 * BYTES)); }
    __device__ __forceinline__ bool is_of(u32 turn) const {
        bool all = (word[0] & 1) == turn;
#pragma unroll
        for (int i = 1; i < (BYTES == 2 ? 1 : WIDE); i++) all &= (word[i] & 1) == turn;
        return all;
    }
    __device__ __forceinline__ void unpack_to(Values& x, int unit) const {
        if constexpr (BYTES == 4) {
#pragma unroll
            for (int v = 0; v < WIDE; v++) x[v] = __uint_as_float(word[v] & ~1u);
        } else {
            const u32 first = word[0] & ~1u;
            Stored own;
#pragma unroll
            for (int w = 0; w < Stored::WORDS; w++) own.word[w] = WIDE == 4 ? (w ? word[1] : first) : unit % 4 ? word[1] : first;
            unpack(own, x);
        }
    }
};

constexpr int FROM_TEAM_TO_TEAM = CLUSTER * ROWS * UNITS * BYTES;

// The sum of the shares of `count` teams from `own` on, COUNT at most, that `find` finds in them: waits for them.
template <int COUNT, int N, class Find>
DEVICE void add_up(float (&x)[N], const char* own, int unit, int use, int count, Find find) {
    constexpr int ROOM = 128 / sizeof(Share), TIMES = (COUNT + ROOM - 1) / ROOM, AT_ONCE = (COUNT + TIMES - 1) / TIMES;  // loads in flight
    const long long start = clock64();
    Share share[AT_ONCE];
#pragma unroll
    for (int first = 0; first < COUNT; first += AT_ONCE) {
#pragma unroll
        for (int s = 0; s < AT_ONCE; s++)
            if (first + s < count) share[s].load(own + (first + s) * FROM_TEAM_TO_TEAM, unit);
        for (bool missing = true; missing;) {
            missing = false;
#pragma unroll
            for (int s = 0; s < AT_ONCE; s++)
                if (first + s < count && !share[s].is_of(turn_of(use))) {
                    share[s].load(own + (first + s) * FROM_TEAM_TO_TEAM, unit);
                    missing = true;
                }
            if (missing) lose_patience(start);
        }
#pragma unroll
        for (int s = 0; s < AT_ONCE; s++)
            if (first + s < count) {
                float y[N];
                find(share[s], y);
#pragma unroll
                for (int v = 0; v < N; v++) x[v] = first + s ? x[v] + y[v] : y[v];
            }
    }
}

// Where an item is two units, two lanes would read the same words: each adds up the shares of all four units of one half of
// the teams instead, and they swap. (Whole warps, since all lanes must be there.)
constexpr bool IN_HALVES = BYTES == 2 && WIDE == 2 && TEAMS > 1 && ITEMS_IN_ALL % 32 == 0;

// W' times all gates' da, for one item: waits for the shares of all teams.
DEVICE void sum(Values& dh, const Item& it, int gate, int use, const Exchange& at) {
    const char* own = shares_from(at, use, 0, at.rank) + four_at(it.row, it.unit);
    if constexpr (IN_HALVES) {
        constexpr int HALF = (TEAMS + 1) / 2;
        const bool second = it.unit % 4;
        float four[4] = {};
        if (it.real > 0)
            add_up<HALF>(four, own + second * HALF * FROM_TEAM_TO_TEAM, 0, use, TEAMS % 2 && second ? HALF - 1 : HALF, [](const Share& share, float (&y)[4]) {
                const Packed<4> all = {{share.word[0] & ~1u, share.word[1]}};
                unpack(all, y);
            });
        __syncwarp();
#pragma unroll
        for (int v = 0; v < 2; v++) {
            const float swapped = __shfl_xor_sync(~0u, second ? four[v] : four[2 + v], 1);
            dh[v] = second ? swapped + four[2 + v] : four[v] + swapped;
        }
    } else if (it.real > 0)
        add_up<TEAMS>(dh, own, it.unit, use, TEAMS, [&](const Share& share, Values& y) { share.unpack_to(y, it.unit); });
}
