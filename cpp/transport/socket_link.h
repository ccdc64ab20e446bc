// A link over one authenticated, connected, non-blocking stream socket, TCP or Unix.
#pragma once

#include "transport/link.h"

namespace shoal {

class SocketLink final : public Link {
 public:
  // Takes the descriptor; `epoll` watches it from now on, also for room to write while the link waits for it.
  SocketLink(int peer, FrameSink& sink, int fd, int epoll);
  ~SocketLink() override;

  int fd() const { return fd_; }
  // Stops the writing side and waits until the peer's kernel has everything, at most until `deadline` (ns),
  // and no longer than `patience` (ns) while it takes nothing.
  void drain(std::int64_t deadline, std::int64_t patience);
  // In a forked child: close the descriptor without a word to the peer.
  void disown();
  // Ends the connection as a cut cable would (fault injection).
  void sever();

 protected:
  std::ptrdiff_t write_some(const iovec* parts, int count) override;
  std::ptrdiff_t read_some(std::byte* data, std::size_t bytes) override;
  void want_write(bool wanted) override;
  void unwatch() override;
  bool holds_bytes() const override { return ahead_begin_ != ahead_end_; }
  void let_go() override { disown(); }

 private:
  // Reads from the socket: bytes; 0: nothing there; -1: the peer is gone.
  std::ptrdiff_t take(std::byte* data, std::size_t bytes);

  // A header is read together with what follows it, so that a small message costs one system call.
  static constexpr std::size_t kAhead = 4096;

  int fd_;
  int epoll_;
  bool waiting_ = false;
  bool drained_ = false;  // the last read got less than it asked for: the next would get nothing
  std::size_t ahead_begin_ = 0, ahead_end_ = 0;
  std::byte ahead_[kAhead];
};

}  // namespace shoal
