// x86-64-v4: 512-bit vectors, one cache line per store.
#if defined(__x86_64__)
#define SHOAL_LEVEL kAvx512
#include "kernels/table.h"
#endif
