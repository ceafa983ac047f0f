#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2")
#define NAME "avx512"
#define VARIANT elman_avx512
#include "compressor.h"
#endif
