// Text of calls, for errors.
#pragma once

#include <string>

#include "engine/operation.h"

namespace shoal {

std::string describe(const Fingerprint& call);
std::string describe(const Request& request);

}  // namespace shoal
