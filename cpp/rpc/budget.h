// Limits the bytes of large parts that an endpoint has received and that no handler has taken.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace shoal {

class Budget : public std::enable_shared_from_this<Budget> {
 public:
  // `room` is called when bytes are returned after a refusal; it must not block.
  Budget(std::uint64_t limit, std::function<void()> room) : limit_(limit), room_(std::move(room)) {}

  // Takes bytes until the result is destroyed; null if there is no room now.  of_peer: number of the peer's
  // grants, guarded by this budget's lock.  If all of them are for one packet (`of_packet` of them), the next
  // is always given, so that every packet can be completed.
  std::shared_ptr<void> take(std::uint64_t bytes, const std::shared_ptr<int>& of_peer,
                             std::size_t of_packet) {
    {
      std::lock_guard lock(mutex_);
      if (static_cast<std::size_t>(*of_peer) > of_packet && (bytes > limit_ || used_ > limit_ - bytes)) {
        refused_ = true;
        return nullptr;
      }
      used_ += bytes;
      ++*of_peer;
    }
    return {static_cast<void*>(this),
            [self = shared_from_this(), bytes, of_peer](void*) { self->give_back(bytes, *of_peer); }};
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
