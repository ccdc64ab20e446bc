// A link over one authenticated, connected, non-blocking stream socket, TCP or Unix.
#pragma once

#include "net/link.h"

namespace shoal {

class SocketLink final : public Link {
 public:
  // Takes the descriptor.  `epoll` watches it for input and, while the link waits for it, for room to write.
  SocketLink(int peer, FrameSink& sink, int fd, int epoll);
  ~SocketLink() override;

  int fd() const { return fd_; }
  // Shuts down the writing side and waits until the peer's kernel has received everything, at most until
  // `deadline` (ns), and at most `patience` (ns) without progress.
  void drain(std::int64_t deadline, std::int64_t patience);
  // In a forked child: closes the descriptor without notifying the peer.
  void disown();
  // Ends the connection without a goodbye, like a cut cable (fault injection).
  void disconnect();

 protected:
  std::ptrdiff_t write_some(const iovec* parts, int count) override;
  std::ptrdiff_t read_some(std::byte* data, std::size_t bytes) override;
  void want_write(bool wanted) override;
  void unwatch() override;
  bool holds_bytes() const override { return ahead_begin_ != ahead_end_; }
  void release_descriptor() override { disown(); }

 private:
  // Reads from the socket; returns bytes; 0: no data; -1: the peer closed it.
  std::ptrdiff_t take(std::byte* data, std::size_t bytes);

  // Reads a header together with the following bytes, so that a small message costs one system call.
  static constexpr std::size_t kAhead = 4096;

  int fd_;
  int epoll_;
  bool waiting_ = false;
  bool drained_ = false;  // the last read was short: another would get nothing
  std::size_t ahead_begin_ = 0, ahead_end_ = 0;
  std::byte ahead_[kAhead];
};

}  // namespace shoal
