#include "engine/describe.h"

#include <cstdio>
#include <iterator>
#include <string>

namespace shoal {

const char* name(Kind kind) {
  static const char* const names[] = {"?",          "all_reduce",     "reduce", "broadcast",
                                      "all_gather", "reduce_scatter", "gather", "scatter",
                                      "all_to_all", "barrier",        "send",   "recv"};
  return kind <= Kind::kRecv ? names[static_cast<int>(kind)] : names[0];
}

const char* name(Algorithm algorithm) {
  static const char* const names[] = {"auto", "direct", "doubling", "halving", "ring"};
  static_assert(std::size(names) == kAlgorithms);
  return names[static_cast<int>(algorithm)];
}

std::string describe(const Fingerprint& call) {
  const auto kind = static_cast<Kind>(call.kind & ~Fingerprint::kOnDevice);
  std::string out = std::string(name(kind)) + '(';
  if (kind != Kind::kBarrier) {
    out += name(static_cast<DType>(call.dtype));
    if (call.count > 0 || call.sizes == 0) out += '[' + std::to_string(call.count) + ']';
    if (call.sizes != 0) {
      char hash[24];
      std::snprintf(hash, sizeof hash, " sizes#%08x", static_cast<unsigned>(call.sizes));
      out += hash;
    }
    if (reduces(kind)) out += std::string(", op=") + name(static_cast<RedOp>(call.op));
    if (call.root >= 0) out += ", root=" + std::to_string(call.root);
  }
  return out + ((call.kind & Fingerprint::kOnDevice) != 0 ? ") on a device" : ")");
}

std::string describe(const Request& request) {
  const std::string kind = name(request.kind);
  if (request.keyed()) return kind + " issued in a callback";
  if (request.collective()) return kind + " (operation " + std::to_string(request.channel) + ")";
  const std::string peer = request.peer < 0 ? "any rank" : "rank " + std::to_string(request.peer);
  return kind + (request.kind == Kind::kSend ? " to " : " from ") + peer + " (tag " +
         std::to_string(request.tag) + ")";
}

}  // namespace shoal
