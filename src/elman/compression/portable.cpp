#define NAME "portable"
#define VARIANT elman_portable
#include "compressor.h"
