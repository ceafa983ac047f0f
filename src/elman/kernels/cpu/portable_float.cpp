#define REAL float
#define VECTOR_BYTES 16
#if defined(__aarch64__)
#define REGISTERS 32
#else
#define REGISTERS 16
#endif
#define NAME "portable"
#define VARIANT portable_float
#include "variant.h"
