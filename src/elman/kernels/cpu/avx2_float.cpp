#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define REAL float
#define VECTOR_BYTES 32
#define REGISTERS 16
#define NAME "avx2"
#define VARIANT avx2_float
#include "variant.h"
#endif
