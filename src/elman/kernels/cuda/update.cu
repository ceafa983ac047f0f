// The small work around the recurrence of a language model's update, in few launches. A small model's
// update is a chain of short kernels, each of which takes about two microseconds however little it does.
//
//     nats, nats_back   -log softmax(o)[y] and its gradient, softmax(o) - one-hot(y)
//     columns           Σ da of every token: the gradient of one-hot rows' weights, and of both biases; or of embeddings
//     judge             ‖g‖ over all gradients; whether to step, and by how much to divide g
//     take_in           a running average of the weights, after the step
//
// and of writing text:
//
//     running           Σ of every row up to each place: what a draw looks its chance up in
//
// Sums that cross blocks are added up by whichever block comes last, always in the same order. Needs no
// header files. ELEMENT says how logits and da are stored: 0 fp16, 1 bf16, 2 fp32.
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
#define DEVICE static __device__ __forceinline__

constexpr int THREADS = 256, WARPS = THREADS / 32;

#if ELEMENT == 2
typedef float Element;
DEVICE float wide(Element x) { return x; }
DEVICE Element narrow(float x) { return x; }
#else
typedef u16 Element;
DEVICE float wide(Element x) {
    if (ELEMENT == 1) return __uint_as_float((u32)x << 16);
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
DEVICE Element narrow(float x) {
    Element y;
    if (ELEMENT == 1) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
#endif

template <class T>
DEVICE T warp_sum(T x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}
DEVICE float warp_max(float x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}

// The block's sum, in its first thread.
DEVICE double block_sum(double x) {
    __shared__ double sums[WARPS];
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    double all = 0;
    if (threadIdx.x == 0)
        for (int w = 0; w < WARPS; w++) all += sums[w];
    return all;
}

// Whether all blocks have come here, their stores seen; `arrived` is 0 before and after.
DEVICE bool comes_last(u32* arrived) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(arrived, 1) == gridDim.x - 1;
        if (last) *arrived = 0, __threadfence();
    }
    __syncthreads();
    return last;
}

// ---- the loss -------------------------------------------------------------------------------------------

constexpr i64 NO_TARGET = -100;  // as torch: a row that does not count

// Target of row n = (t, b) of y with strides.
DEVICE i64 target_of(const i64* y, int n, int batch, i64 over_time, i64 over_batch) { return y[n / batch * over_time + n % batch * over_batch]; }

// Σ exp(x - most) of what a thread has read, `most` being the largest of it: read once, whatever comes later.
struct Exponentials {
    float most = -__int_as_float(0x7f800000), total = 0;

    __device__ __forceinline__ void rescale(float to) {
        const float shift = to == -__int_as_float(0x7f800000) ? 0.0f : to;  // all of them -∞ so far
        total *= expf(most - shift), most = to;
    }
    __device__ __forceinline__ void add(const float (&x)[4]) {
        rescale(fmaxf(fmaxf(most, fmaxf(x[0], x[1])), fmaxf(x[2], x[3])));
        const float shift = most == -__int_as_float(0x7f800000) ? 0.0f : most;
        total += (expf(x[0] - shift) + expf(x[1] - shift)) + (expf(x[2] - shift) + expf(x[3] - shift));
    }
};

// log Σ exp of a row of a large vocabulary, by all threads of a block, each of which reads four places at a time.
DEVICE float log_sum_of(const Element* row, int vocabulary) {
    __shared__ float mosts[WARPS], totals[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Exponentials found;
    for (int v = threadIdx.x; v < vocabulary; v += 4 * THREADS) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = v + i * THREADS < vocabulary ? wide(row[v + i * THREADS]) : -__int_as_float(0x7f800000);
        found.add(x);
    }
    found.rescale(warp_max(found.most));
    const float total = warp_sum(found.total);
    __syncthreads();  // the row before has been read
    if (lane == 0) mosts[warp] = found.most, totals[warp] = total;
    __syncthreads();
    Exponentials all;
    for (int w = 0; w < WARPS; w++) all.most = fmaxf(all.most, mosts[w]);
    for (int w = 0; w < WARPS; w++) {
        Exponentials of_warp;
        of_warp.most = mosts[w], of_warp.total = totals[w];
        of_warp.rescale(all.most);
        all.total += of_warp.total;
    }
    return all.most + logf(all.total);
}

// The same of a small vocabulary, by a warp.
DEVICE float log_sum_by_warp(const Element* row, int vocabulary) {
    const int lane = threadIdx.x % 32;
    float most = -__int_as_float(0x7f800000), total = 0;
    for (int v = lane; v < vocabulary; v += 32) most = fmaxf(most, wide(row[v]));
    most = warp_max(most);
    for (int v = lane; v < vocabulary; v += 32) total += expf(wide(row[v]) - most);
    return most + logf(warp_sum(total));
}

// out: the mean nats, and how many rows count. `each` warps have a row of their own, or, of a large vocabulary, all
// of a block have one; `lse` is log Σ exp of every row.
extern "C" __global__ void __launch_bounds__(THREADS)
nats(const Element* logits, const i64* y, i64 over_time, i64 over_batch, float* lse, double* partials, u32* arrived, float* out, int rows, int batch, int vocabulary, int each) {
    const bool tells = threadIdx.x % (each == 1 ? THREADS : 32) == 0;
    double sum = 0, count = 0;
    for (int n = blockIdx.x * each + (each == 1 ? 0 : threadIdx.x / 32); n < rows; n += gridDim.x * each) {
        const Element* row = logits + (i64)n * vocabulary;
        const float log_sum = each == 1 ? log_sum_of(row, vocabulary) : log_sum_by_warp(row, vocabulary);
        const i64 target = target_of(y, n, batch, over_time, over_batch);
        if (tells) {
            lse[n] = log_sum;
            if (target != NO_TARGET) {
                if (target < 0 || target >= vocabulary) asm volatile("trap;");
                sum += log_sum - wide(row[target]), count += 1;
            }
        }
    }
    sum = block_sum(sum), count = block_sum(count);
    if (threadIdx.x == 0) partials[2 * blockIdx.x] = sum, partials[2 * blockIdx.x + 1] = count;
    if (!comes_last(arrived)) return;
    sum = count = 0;
    for (int b = threadIdx.x; b < gridDim.x; b += THREADS) sum += __ldcg(partials + 2 * b), count += __ldcg(partials + 2 * b + 1);
    sum = block_sum(sum), count = block_sum(count);
    if (threadIdx.x == 0) out[0] = (float)(sum / count), out[1] = (float)count;
}

// d = (softmax(o) - one-hot(y)) · pull / count.
extern "C" __global__ void __launch_bounds__(THREADS)
nats_back(const Element* logits, const i64* y, i64 over_time, i64 over_batch, const float* lse, const float* out, const float* pull, Element* d, int rows, int batch, int vocabulary) {
    const float scale = *pull / out[1];
    const i64 all = (i64)rows * vocabulary;
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < all; i += (i64)gridDim.x * THREADS) {
        const int n = i / vocabulary, v = i % vocabulary;
        const i64 target = target_of(y, n, batch, over_time, over_batch);
        const float p = expf(wide(logits[i]) - lse[n]) - (v == target ? 1.0f : 0.0f);
        d[i] = narrow(target == NO_TARGET ? 0.0f : p * scale);
    }
}

// ---- the gradient of a layer that reads tokens ------------------------------------------------------------

// dW[u, id] = Σ of da[n, u] over the rows n that read `id`, or `by_token` dW[id, u], and db[u] = Σ over all rows. A block
// has 32 of the `width` columns; each of its warps adds up rows of its own, in a table in shared memory.
extern "C" __global__ void __launch_bounds__(1024)
columns(const Element* das, int pitch, const i64* ids, float* dW, float* db, int rows, int width, int vocabulary, int by_token) {
    extern __shared__ float tables[];  // (warps, vocabulary, 32)
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, u = blockIdx.x * 32 + lane;
    const int size = vocabulary * 32;
    for (int i = threadIdx.x; i < warps * size; i += blockDim.x) tables[i] = 0;
    __syncthreads();
    float* own = tables + warp * size + lane;
    constexpr int AT_ONCE = 8;
    for (int first = warp; first < rows; first += AT_ONCE * warps) {
        float x[AT_ONCE];
        int id[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int n = first + k * warps;
            x[k] = n < rows && u < width ? wide(das[(i64)n * pitch + u]) : 0.0f;
            id[k] = n < rows ? (int)ids[n] : 0;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) own[id[k] * 32] += x[k];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        float sum = 0;
        for (int w = 0; w < warps; w++) sum += tables[w * size + i];
        tables[i] = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        const int column = by_token ? i % 32 : i / vocabulary, id = by_token ? i / 32 : i % vocabulary, unit = blockIdx.x * 32 + column;
        if (unit < width) dW[by_token ? (i64)id * width + unit : (i64)unit * vocabulary + id] = tables[id * 32 + column];
    }
    if (db && warp == 0 && u < width) {
        float sum = 0;
        for (int id = 0; id < vocabulary; id++) sum += tables[id * 32 + lane];
        db[u] = sum;
    }
}

// ---- the step ---------------------------------------------------------------------------------------------

constexpr int MOST = 64, CHUNK = 1024;

DEVICE bool finite(float x) { return fabsf(x) < __int_as_float(0x7f800000); }

struct Arrays {
    const float* at[MOST];
    i64 size[MOST];
};

// f(array, element) for every element of `count` arrays, CHUNK to a block at a time.
template <class F>
DEVICE void each_element(const Arrays& arrays, int count, F f) {
    i64 chunk = 0;
    for (int a = 0; a < count; a++) {
        const i64 chunks = (arrays.size[a] + CHUNK - 1) / CHUNK;
        for (i64 c = (blockIdx.x + gridDim.x - chunk % gridDim.x) % gridDim.x; c < chunks; c += gridDim.x)
#pragma unroll
            for (int k = 0; k < CHUNK / THREADS; k++) {
                const i64 i = c * CHUNK + k * THREADS + threadIdx.x;
                if (i < arrays.size[a]) f(a, i);
            }
        chunk += chunks;
    }
}

// What the step is told, and what is told about it. `stuck`: an update before has failed, and none after it
// may move anything until the host has heard of it.
struct Verdict {
    float scale;    // g is divided by it
    float refuse;   // 1: do not step
    u32 stuck;
    u32 updates;    // made so far: where the next numbers go
    u32 arrived;
};

// ‖g‖ over `count` arrays; then loss and norm into place `updates % places` of `told`, memory of the host.
extern "C" __global__ void __launch_bounds__(THREADS)
judge(const Arrays arrays, int count, const float* loss, float clip, double* partials, Verdict* verdict, unsigned char* broken, float* told, int places) {
    double sum = 0;
    each_element(arrays, count, [&](int a, i64 i) {
        const double g = arrays.at[a][i];
        sum += g * g;
    });
    sum = block_sum(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
    if (!comes_last(&verdict->arrived)) return;
    sum = 0;
    for (int b = threadIdx.x; b < gridDim.x; b += THREADS) sum += __ldcg(partials + b);
    sum = block_sum(sum);
    if (threadIdx.x != 0) return;
    const float norm = (float)sqrt(sum), nats = *loss;
    const bool stop = verdict->stuck || !finite(norm) || !finite(nats);
    verdict->scale = clip > 0 && norm > clip ? norm / clip : 1.0f;
    verdict->refuse = stop ? 1.0f : 0.0f;
    verdict->stuck = *broken = stop;
    float* place = told + 2 * (verdict->updates++ % places);
    place[0] = nats, place[1] = norm;
}

struct Averaged {
    Arrays weights;
    float* average[MOST];
};

// a ← a + s (w - a), rounded as torch's lerp; nothing where the step was refused, or nothing is to be taken in.
extern "C" __global__ void __launch_bounds__(THREADS)
take_in(const Averaged arrays, int count, const float* share, const unsigned char* broken) {
    const float s = *share;
    if (*broken || s == 0.0f) return;
    each_element(arrays.weights, count, [&](int n, i64 i) {
        const float w = arrays.weights.at[n][i], a = arrays.average[n][i], d = w - a;
        arrays.average[n][i] = s < 0.5f ? __fmaf_rn(s, d, a) : __fmaf_rn(-d, 1.0f - s, w);
    });
}

// ---- a draw -------------------------------------------------------------------------------------------------

constexpr int MANY = 1024;  // threads of a row

// sums[n, i] = Σ of x[n, 0 … i], added up in one order whatever runs beside it. A block has a row, a thread a stretch of it.
extern "C" __global__ void __launch_bounds__(MANY)
running(const double* x, double* sums, int size) {
    __shared__ double warps[MANY / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, stretch = (size + MANY - 1) / MANY;
    const int first = min(size, (int)threadIdx.x * stretch), end = min(size, first + stretch);
    x += (i64)blockIdx.x * size, sums += (i64)blockIdx.x * size;
    double own = 0;
    for (int i = first; i < end; i++) own += x[i];
    double reached = own;  // up to and with this thread: of its warp, then of all
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const double before = __shfl_up_sync(0xffffffffu, reached, d);
        if (lane >= d) reached += before;
    }
    if (lane == 31) warps[warp] = reached;
    __syncthreads();
    double sum = __shfl_up_sync(0xffffffffu, reached, 1);
    if (lane == 0) sum = 0;
    double all = 0;
    for (int w = 0; w < warp; w++) all += warps[w];
    sum += all;
    for (int i = first; i < end; i++) sums[i] = sum += x[i];
}
