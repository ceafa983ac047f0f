// Shares of dh in device memory, of which the owners of the units add up those of all teams, in one order (spread.cuh,
// teams.cuh). Shares have two places, in turn, and the last bit of each says in which turn it was stored, so that nothing
// else has to be waited for. Nor is one overwritten too early: a share of step u + 2 is made of its team's dh of step
// u + 1, to which every block has given a share, and for that it had read all its own of step u.
#pragma once
#include "recurrence.cuh"

static_assert(UNITS % 4 == 0, "four units have one owner");

// What team `team` gives to block `owner` in step `use`: a share for every unit of every row, rows of UNITS.
DEVICE float* shares_from(const Exchange& at, int use, int team, int owner) { return at.shares + ((use % 2 * TEAMS + team) * CLUSTER + owner) * (ROWS * UNITS); }

// The last bit of a share: whether the place, at first 0, has been written an odd number of times.
DEVICE u32 turn_of(int use) { return (use + 1) / 2 % 2; }
DEVICE u32 with_turn(u32 word, u32 turn) { return word & ~1u | turn; }
DEVICE float without_turn(u32 word) { return __uint_as_float(word & ~1u); }  // an infinity is one again

template <int WORDS>
DEVICE bool all_of_turn(const u32 (&w)[WORDS], u32 turn) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < WORDS; i++) all &= (w[i] & 1) == turn;
    return all;
}

// Where the shares of one tile go, 16 units from unit `first` of the block's part on, of all rows: a thread has four
// units of a row.
struct Meeting {
    float* place;
    bool there;
    u32 turn;

    __device__ __forceinline__ Meeting(int first, int use, int rank, const Exchange& at) {
        asm volatile("" : "+r"(first));  // addresses of all tiles, found before the loop over time, would fit no registers
        const FourUnits::Place four;
        const int unit = rank % PARTNERS * PART + first + four.unit;
        there = first < PART && unit < SIZE, turn = turn_of(use);
        place = shares_from(at, use, rank / PARTNERS, unit / UNITS) + four.row * UNITS + unit % UNITS;
    }
    __device__ __forceinline__ void store(const float (&d)[4], int row_tile, const Exchange& at) const {
        FourUnits four(d);
#pragma unroll
        for (int i = 0; i < 4; i++) four.word[i] = with_turn(four.word[i], turn);
        if (there && row_tile * 8 + four.place.row < at.rows) store_words_past_l1(place + row_tile * 8 * UNITS, four.word);
    }
};

// W' times all gates' da, for one item: waits for the shares of all teams.
DEVICE void sum(Values& dh, const Item& it, int gate, int use, const Exchange& at) {
    const float* own = shares_from(at, use, 0, at.rank) + it.row * UNITS + it.unit;
    constexpr int AT_ONCE = TEAMS * WIDE <= 32 ? TEAMS : 32 / WIDE;  // loads in flight
    if (it.real == 0) return;
    const long long start = clock64();
    u32 w[AT_ONCE][WIDE];
#pragma unroll
    for (int first = 0; first < TEAMS; first += AT_ONCE) {
#pragma unroll
        for (int s = 0; s < AT_ONCE; s++)
            if (first + s < TEAMS) load_words_past_l1(w[s], own + (first + s) * (CLUSTER * ROWS * UNITS));
        for (bool missing = true; missing;) {
            missing = false;
#pragma unroll
            for (int s = 0; s < AT_ONCE; s++)
                if (first + s < TEAMS && !all_of_turn(w[s], turn_of(use))) {
                    load_words_past_l1(w[s], own + (first + s) * (CLUSTER * ROWS * UNITS));
                    missing = true;
                }
            if (missing) lose_patience(start);
        }
#pragma unroll
        for (int s = 0; s < AT_ONCE; s++)
#pragma unroll
            for (int v = 0; v < WIDE; v++)
                if (first + s < TEAMS) dh[v] = first + s ? dh[v] + without_turn(w[s][v]) : without_turn(w[s][v]);
    }
}
