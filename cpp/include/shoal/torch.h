// shoal for C++ programs with libtorch: process groups, futures, and data-parallel training.
#pragma once

#include "shoal/shoal.h"
#include "shoal/torch/distributed_data_parallel.h"
#include "shoal/torch/tensor.h"
