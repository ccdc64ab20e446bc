// x86-64-v3: 256-bit vectors and hardware conversion of float16.
#if defined(__x86_64__)
#define SHOAL_LEVEL kAvx2
#include "kernels/table.h"
#endif
