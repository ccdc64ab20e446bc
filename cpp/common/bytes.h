// Values in a string of bytes, for messages.
#pragma once

#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

namespace shoal {

template <class T>
void put(std::string& bytes, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// Reads consecutive values; after the first missing one, all reads fail.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : left_(bytes) {}

  bool well() const { return well_; }
  bool ended() const { return left_.empty(); }
  void require(bool valid) { well_ = well_ && valid; }

  template <class T>
  T get() {
    T value{};
    const std::string_view bytes = text(sizeof value);
    if (well_) std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  }
  std::string_view text(std::size_t bytes) {
    require(bytes <= left_.size());
    if (!well_) return {};
    const std::string_view found = left_.substr(0, bytes);
    left_.remove_prefix(bytes);
    return found;
  }
  std::string_view rest() { return text(left_.size()); }

 private:
  std::string_view left_;
  bool well_ = true;
};

}  // namespace shoal
