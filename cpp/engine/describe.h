// Text of calls, for errors.
#pragma once

#include <string>

#include "engine/operation.h"

namespace shoal {

const char* name(Kind kind);
const char* name(Algorithm algorithm);
std::string describe(const Fingerprint& call);
std::string describe(const Request& request);

}  // namespace shoal
