// x86-64-v4: 512-bit vectors, a cache line at a time.
#if defined(__x86_64__)
#define SHOAL_LEVEL kAvx512
#include "kernels/table.h"
#endif
