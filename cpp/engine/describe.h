// Calls and times in words, for errors.
#pragma once

#include <cstdint>
#include <string>

#include "engine/operation.h"

namespace shoal {

std::string seconds(std::int64_t nanoseconds);
std::string describe(const Fingerprint& call);
std::string describe(const Request& request);

}  // namespace shoal
