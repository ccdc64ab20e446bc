// shoal for C++ programs, without torch: process groups and futures.  `shoal/torch.h` adds tensors of torch.
//
// The headers need C++17 or newer, and libshoal.a.  docs/cpp.md is the tutorial.
#pragma once

#include "shoal/error.h"
#include "shoal/future.h"
#include "shoal/group.h"
#include "shoal/types.h"
