// BLAKE2b without a key (RFC 7693), for identifiers that Python computes with hashlib.blake2b.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace shoal::frontend_core {

// Writes `digest_size` bytes, at most 64.  person: as in hashlib, at most 16 bytes.
void blake2b(std::string_view data, std::string_view person, unsigned char* digest, std::size_t digest_size);

// The digest of 8 bytes as a little-endian number.
std::uint64_t digest64(std::string_view data, std::string_view person = {});

}  // namespace shoal::frontend_core
