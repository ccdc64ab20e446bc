// A set of the ranks of one group.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace shoal::consensus {

class RankSet {
 public:
  explicit RankSet(int size = 0) : size_(size), words_((static_cast<std::size_t>(size) + 63) / 64) {}

  static RankSet all(int size) {
    RankSet result(size);
    for (int rank = 0; rank < size; ++rank) result.add(rank);
    return result;
  }

  int size() const { return size_; }  // of the group
  bool has(int rank) const { return (words_[word(rank)] >> (rank & 63)) & 1; }
  void add(int rank) { words_[word(rank)] |= std::uint64_t{1} << (rank & 63); }
  void remove(int rank) { words_[word(rank)] &= ~(std::uint64_t{1} << (rank & 63)); }

  int count() const {
    int result = 0;
    for (std::uint64_t bits : words_) result += std::popcount(bits);
    return result;
  }
  bool any() const {
    for (std::uint64_t bits : words_)
      if (bits != 0) return true;
    return false;
  }
  bool within(const RankSet& other) const { return !(*this - other).any(); }
  // The lowest member, or the group's size if there is none.
  int lowest() const {
    for (std::size_t i = 0; i < words_.size(); ++i)
      if (words_[i] != 0) return static_cast<int>(i) * 64 + std::countr_zero(words_[i]);
    return size_;
  }
  std::vector<int> list() const {
    std::vector<int> result;
    for (std::size_t i = 0; i < words_.size(); ++i)
      for (std::uint64_t bits = words_[i]; bits != 0; bits &= bits - 1)
        result.push_back(static_cast<int>(i) * 64 + std::countr_zero(bits));
    return result;
  }

  RankSet& operator|=(const RankSet& other) {
    for (std::size_t i = 0; i < words_.size(); ++i) words_[i] |= other.words_[i];
    return *this;
  }
  RankSet& operator&=(const RankSet& other) {
    for (std::size_t i = 0; i < words_.size(); ++i) words_[i] &= other.words_[i];
    return *this;
  }
  RankSet& operator-=(const RankSet& other) {
    for (std::size_t i = 0; i < words_.size(); ++i) words_[i] &= ~other.words_[i];
    return *this;
  }
  friend RankSet operator|(RankSet a, const RankSet& b) { return a |= b; }
  friend RankSet operator&(RankSet a, const RankSet& b) { return a &= b; }
  friend RankSet operator-(RankSet a, const RankSet& b) { return a -= b; }
  bool operator==(const RankSet&) const = default;

 private:
  static std::size_t word(int rank) { return static_cast<std::size_t>(rank) / 64; }

  int size_;
  std::vector<std::uint64_t> words_;
};

}  // namespace shoal::consensus
