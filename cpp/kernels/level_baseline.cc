// Supported by every CPU of the architecture.
#define SHOAL_LEVEL kBaseline
#include "kernels/table.h"
