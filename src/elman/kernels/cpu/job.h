/* What Python hands over: one layer, one direction, a piece of time. Mirrored by `LayerArguments` in library.py. */
#pragma once
#include <cstdint>

enum Cell : int64_t { TANH, RELU, LINEAR, GRU, LSTM, OWN };

#ifndef OWN_GATES /* a described cell is compiled by itself, with its sizes: see kernels/described.py */
#define OWN_GATES 1
#define OWN_APART 0
#define OWN_STATES 1
#define OWN_PARAMETERS 0
#define OWN_NOISE 0
#endif

inline int64_t gates_of(int64_t cell) {
    return cell == GRU ? 3 : cell == LSTM ? 4 : cell == OWN ? OWN_GATES : 1;
}
/* Blocks of H numbers that a step keeps for the way back: r z n and W_hn h + b_hn; i f g o; or of a described
 * cell what it makes of a_x + a_h of each gate, and of a_h by itself of those that use it so. */
inline int64_t kept_of(int64_t cell) { return cell == OWN ? OWN_GATES + OWN_APART : 4; }
/* Blocks of H numbers in the state beside h. */
inline int64_t extra_of(int64_t cell) { return cell == OWN ? OWN_STATES - 1 : 1; }

/* The output layer and its loss: o = h Wᵀ + b, the mean of -log softmax(o)[target]. */
struct Head {
    int64_t T, B, H, V, threads; /* S = T·B rows */
    const void *hs;              /* (S, H) */
    const void *W, *b;           /* (V, H), (V) */
    const int64_t *targets;      /* (S) */
    void *nats, *each;           /* one number, the mean; (S), those of every row, or null */
    void *dhs;                   /* (S, H), or null: not wanted */
    void *dW, *db;               /* (V, H), (V), or null */
};

/* Row-major tensors of the kernel's real type; a null pointer is an absent tensor.
 * S = T·B rows of time and batch, M = gates·H. */
struct Job {
    int64_t cell, T, B, I, H, threads;
    const void *xs;          /* (S, I), or null: */
    const int64_t *ids;      /* (S): one-hot rows, or rows of E */
    const void *W_ih;        /* (M, I) */
    const void *W_hh;        /* (M, H) */
    const void *b_ih, *b_hh; /* (M) */
    const int64_t *lengths;  /* (B): rows that have ended hold their state; or, the longest row first: */
    const int64_t *sizes;    /* (T): rows still running, and B before them; no others are there, S is their sum, */
    const int64_t *starts;   /* (T+1): and here each step's begin */
    /* forward writes, backward reads */
    const void *h_0, *c_0; /* (B, H), forward only */
    void *hs;              /* (T+1, B, H) */
    void *cs;              /* (T+1, B, H), lstm; (T+1, B, extra, H) */
    void *gates;           /* (S, kept, H) */
    /* backward only */
    const void *dhs;         /* (S, H) */
    const void *dh_T, *dc_T; /* (B, H) */
    const void *xi;          /* (T) or (T, B) */
    int64_t xi_per_row;
    int64_t fresh;     /* 0: weight gradients are added to what is there */
    void *dxs;         /* (S, I), null: not wanted */
    void *dW_ih;       /* (M, I), or (I, M) for ids; all of these null: not wanted */
    void *dW_hh;       /* (M, H) */
    void *db_ih, *db_hh; /* (M) */
    void *dh_0, *dc_0; /* (B, H), null: not wanted */
    /* a described cell's own numbers, and their gradient */
    const void *own; /* (P, H) */
    void *down;
    /* an embedding whose rows the ids name, or null, and its gradient (dW_ih's is then fresh too) */
    int64_t V;
    const void *E; /* (V, I) */
    void *dE;
    /* an output layer that pulls on hs in place of dhs, its loss and gradients found on the way back; or null */
    const Head *head;
    int64_t c_in_place; /* forward of an lstm that is not gone back through: cs is (B, H), c_t takes the place of c_{t-1} */
#ifdef OWN_CELL
    const void *noise; /* (S, N, H): drawn for every step; `OwnArguments` in library.py */
#endif
};

/* Rows of a step, the first of them among all rows, and where the states before it lie among B + S rows of states. */
inline int64_t rows_at(const Job *job, int64_t t) { return job->sizes ? job->sizes[t] : job->B; }
inline int64_t start_of(const Job *job, int64_t t) { return job->sizes ? job->starts[t] : t * job->B; }
inline int64_t before(const Job *job, int64_t t) { return start_of(job, t) + (job->sizes ? job->B - job->sizes[t - 1] : 0); }

/* How many ids there are. */
inline int64_t names_of(const Job *job) { return job->E ? job->V : job->I; }

/* Layers that read one another over a piece of time, all of one type. Mirrored by `StackArguments` in library.py. */
struct Stack {
    const Job *layers; /* sizes and weights only; both directions of a layer side by side */
    int64_t count, directions, reads_ids;
    int64_t copies; /* y takes (T, B, directions·H); 0, in one direction: the whole track (T+1, B, H) */
    int64_t kind, level;
};

/* What else a call of a stack may be: packed, or with dropout. Mirrored by `UseArguments` in library.py. */
struct Use {
    const int64_t *sizes;        /* (T): rows still running, of inputs that are packed, the longest row first; null: all */
    const int64_t *order, *back; /* (B): which of the caller's states row b has; which row has state b; null: as they come */
    int64_t seed;                /* of the masks between layers */
    int64_t below;               /* numbers of 2⁻²⁴ that drop what they are drawn for; 0: nothing is dropped */
    double scale;                /* of what is not */
};

/* A tensor as it was seen. Mirrored by `TensorArguments` in library.py. */
struct Tensor {
    const void *object; /* Python's, which whoever has seen it keeps; null: another at every call */
    const void *data;   /* where it lies; null: anywhere */
    int64_t code, bits; /* of its numbers, as DLPack has them */
    int64_t dims, shape[3];
};

/* The tensors of calls of one kind. Mirrored by `SeenArguments` in library.py. */
struct Seen {
    const void *describe; /* `dltensor_from_py_object_no_sync` of DLPack */
    const Tensor *weights;
    int64_t count;
    Tensor x, state;
};

/* Losses that go back through one layer, from each step to those before it: see travel.h. */
struct Travel {
    int64_t T, H, states, gates, first, lags, threads; /* losses of the steps from `first` ≥ `lags` on */
    const void *pulls;                                 /* (T, H): of each loss on the h of its step */
    const void *slopes;                                /* (T, states, gates, H): of each state by a_h of each gate */
    const void *before;                                /* (T, states, states, H): by each state before, a_h held */
    const void *W;                                     /* (gates·H, H) */
    void *norms;                                       /* (T - first, lags + 1) */
};

/* One layer around the states of its forward pass, along a change of what it reads: see twice.h. Mirrored by
 * `TwiceArguments` in library.py. */
struct Twice {
    const Job *job; /* what the forward pass read and wrote, the pulls of the loss on it, and dxs: those on xs */
    const void *xs_u, *W_ih_u, *W_hh_u, *b_ih_u, *b_hh_u, *h_0_u, *c_0_u; /* the change; null: none */
    void *hs_u, *cs_u; /* (T+1, B, H): what it makes of the states, */
    void *as_u;        /* (S, 4, H): and, of a gru or lstm, of r z W_hn h + b_hn and W_in x + b_in, or i f g o before the gate */
    const void *ddhs;  /* (S, H), or null */
    void *ddxs, *ddW_ih, *ddW_hh, *ddb_ih, *ddb_hh, *ddh_0, *ddc_0; /* null: not wanted */
};

/* What may be written next, and how likely it is: see draw.h. Mirrored by `RulesArguments` in library.py. */
struct Rules {
    double temperature;     /* 0: the likeliest */
    double top_p;           /* 1: all of it */
    int64_t top_k;          /* as many as there are tokens, or more: all */
    const int64_t *exclude; /* these are never written */
    int64_t excluded;
};

enum Status : int { OK = 0, NO_MEMORY = 1, BAD_ID = 2, BAD_TARGET = 3, NO_NUMBERS = 4 };

/* One compiled variant of recurrence.h. */
struct Variant {
    const char *name;
    int (*forward)(const Job *);
    int (*backward)(const Job *);
    int (*head)(const Head *);
    int (*travel)(const Travel *);
    int (*along)(const Twice *);
    int (*back_twice)(const Twice *);
    void (*linear)(const void *x, const void *W, const void *b, void *y, int64_t rows, int64_t K, int64_t N, int64_t threads);
    int (*draw)(const Rules *, const void *scores, bool wide, int64_t rows, int64_t V, const double *chances, int64_t *tokens,
                int64_t threads); /* of doubles only, as the next */
    int (*widen)(const Rules *, const void *scores, bool wide, int64_t rows, int64_t V, double *sums, int64_t *from, int64_t *tokens,
                 int64_t threads);
    double (*sum_of_squares)(const void *x, int64_t n);
    void (*scale)(void *x, int64_t n, double factor);
    void (*tanh)(const void *x, void *y, int64_t n);
    void (*sigmoid)(const void *x, void *y, int64_t n);
    void (*keep)(void *generator, void *mask, int64_t n, double p, double value);
    void (*drop)(uint32_t seed, const void *from, void *to, int64_t steps, int64_t step, const int64_t *rows, int64_t row,
                 uint32_t below, double scale);
};

/* Memory that the next call of the same size is likely to find again: fresh pages cost more than the
 * work done in them. `borrow` returns null where there is none. */
void *borrow(int64_t bytes);
void give_back(void *memory, int64_t bytes);

/* Run task(data, 0) … task(data, tasks-1) on up to `threads` threads; returns when all are done. */
void parallel(int64_t threads, int64_t tasks, void (*task)(void *, int64_t), void *data);

/* Whether torch's threads were lately kept waiting by other programs. */
bool is_busy();

/* What a layer multiplies, roughly; and whether a second thread would come in time to share it. Beside other
 * programs, where threads sleep between calls, it takes longer to wake up. */
inline int64_t work_of(const Job *job) { return job->T * job->B * gates_of(job->cell) * job->H * (job->H + 64); }
inline bool worth_two(int64_t work) { return work >= (is_busy() ? 1 << 24 : 3 << 19); }

template <class F> void each(int64_t threads, int64_t tasks, F &&body) {
    parallel(threads, tasks, [](void *data, int64_t i) { (*static_cast<F *>(data))(i); }, &body);
}
