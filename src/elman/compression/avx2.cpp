#if defined(__x86_64__)
#pragma GCC target("avx2")
#define NAME "avx2"
#define VARIANT elman_avx2
#include "compressor.h"
#endif
