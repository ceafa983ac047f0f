#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
#define REAL double
#define VECTOR_BYTES 64
#define REGISTERS 32
#define NAME "avx512"
#define VARIANT avx512_double
#include "variant.h"
#endif
