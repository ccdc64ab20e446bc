// A link over one authenticated, connected, non-blocking TCP socket.
#pragma once

#include "transport/link.h"

namespace shoal {

class TcpLink final : public Link {
 public:
  // Takes the descriptor; `epoll` is told whether the link waits for room to write.
  TcpLink(int peer, FrameSink& sink, int fd, int epoll);
  ~TcpLink() override;

  int fd() const { return fd_; }
  // Stops the writing side and waits until the peer's kernel has everything, at most until `deadline` (ns).
  void drain(std::int64_t deadline);
  // In a forked child: close the descriptor without a word to the peer.
  void disown();
  // Ends the connection as a cut cable would (fault injection).
  void sever();

 protected:
  std::ptrdiff_t write_some(const iovec* parts, int count) override;
  std::ptrdiff_t read_some(std::byte* data, std::size_t bytes) override;
  void want_write(bool wanted) override;
  void release() override { disown(); }

 private:
  int fd_;
  int epoll_;
  bool waiting_ = false;
};

}  // namespace shoal
