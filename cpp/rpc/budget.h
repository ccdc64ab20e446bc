// Limits the bytes of large parts that an endpoint has received and that no handler has taken.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace shoal {

class Budget {
 public:
  // `room` is called when bytes are returned after a refusal; it must not block.
  Budget(std::uint64_t limit, std::function<void()> room) : limit_(limit), room_(std::move(room)) {}

  // Bytes taken from the budget; the destructor returns them.
  class Grant {
   public:
    Grant() = default;
    Grant(std::shared_ptr<Budget> budget, std::uint64_t bytes, std::shared_ptr<int> of_peer)
        : budget_(std::move(budget)), bytes_(bytes), of_peer_(std::move(of_peer)) {}
    Grant(Grant&&) = default;
    Grant& operator=(Grant&& other) noexcept {
      std::swap(budget_, other.budget_);
      std::swap(bytes_, other.bytes_);
      std::swap(of_peer_, other.of_peer_);
      return *this;
    }
    ~Grant() {
      if (budget_) budget_->give_back(bytes_, *of_peer_);
    }

   private:
    std::shared_ptr<Budget> budget_;
    std::uint64_t bytes_ = 0;
    std::shared_ptr<int> of_peer_;  // number of the peer's grants; requires the budget's lock
  };

  // False: there is no room now.  If all grants of a peer are for one packet (`of_packet` of them), the next
  // is always given, so that every packet can be completed.
  bool take(std::uint64_t bytes, int& of_peer, std::size_t of_packet) {
    std::lock_guard lock(mutex_);
    if (static_cast<std::size_t>(of_peer) > of_packet && (bytes > limit_ || used_ > limit_ - bytes)) {
      refused_ = true;
      return false;
    }
    used_ += bytes;
    ++of_peer;
    return true;
  }

  std::uint64_t used() {
    std::lock_guard lock(mutex_);
    return used_;
  }
  std::uint64_t left() {
    std::lock_guard lock(mutex_);
    return limit_ - std::min(limit_, used_);
  }

  // The endpoint has been closed: `room` is no longer called.
  void forget() {
    std::lock_guard lock(mutex_);
    room_ = nullptr;
  }

 private:
  void give_back(std::uint64_t bytes, int& of_peer) {
    std::lock_guard lock(mutex_);
    used_ -= bytes;
    --of_peer;
    if (std::exchange(refused_, false) && room_) room_();
  }

  const std::uint64_t limit_;
  std::function<void()> room_;
  std::mutex mutex_;
  std::uint64_t used_ = 0;
  bool refused_ = false;
};

}  // namespace shoal
