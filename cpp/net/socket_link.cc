#include "net/socket_link.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "common/clock.h"

namespace shoal {

SocketLink::SocketLink(int peer, FrameSink& sink, int fd, int epoll)
    : Link(peer, sink), fd_(fd), epoll_(epoll) {
  int flags = fcntl(fd_, F_GETFL);
  fcntl(fd_, F_SETFL, flags | O_NONBLOCK);
  int one = 1;
  setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  last_heard_.store(now_ns(), std::memory_order_relaxed);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = static_cast<std::uint64_t>(peer);
  epoll_ctl(epoll_, EPOLL_CTL_ADD, fd_, &event);
}

void SocketLink::unwatch() { epoll_ctl(epoll_, EPOLL_CTL_DEL, fd_, nullptr); }

SocketLink::~SocketLink() { disown(); }

void SocketLink::disown() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void SocketLink::disconnect() { shutdown(fd_, SHUT_RDWR); }

void SocketLink::drain(std::int64_t deadline, std::int64_t patience) {
  if (broken()) return;
  shutdown(fd_, SHUT_WR);
  // Closing with unread or unacknowledged bytes would make the kernel reset the connection while the peer
  // reads.  The watch thread continues reading, so that arriving frames (a peer's goodbye) are not lost.
  int left = 0, before = -1;
  std::int64_t until = 0;
  for (std::int64_t now = now_ns(); now < deadline; now = now_ns()) {
    if (ioctl(fd_, SIOCOUTQ, &left) != 0 || left == 0) return;
    if (left != before) until = now + patience;
    if (now >= until) return;  // the peer's kernel accepts nothing any more
    before = left;
    // A connection that the peer has reset keeps its count of unsent bytes forever.
    tcp_info info{};
    socklen_t size = sizeof info;
    if (getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 || info.tcpi_state == TCP_CLOSE) return;
    usleep(200);
  }
}

std::ptrdiff_t SocketLink::write_some(const iovec* parts, int count) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = static_cast<std::size_t>(count);
  while (true) {
    ssize_t sent = sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) return sent;
    if (errno == EINTR) continue;
    return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : kPeerClosed;
  }
}

std::ptrdiff_t SocketLink::take(std::byte* data, std::size_t bytes) {
  // Epoll is level-triggered: new data will be reported, so reading again now would waste a call.
  if (std::exchange(drained_, false)) return 0;
  while (true) {
    ssize_t got = recv(fd_, data, bytes, MSG_DONTWAIT);
    if (got > 0) {
      last_heard_.store(now_ns(), std::memory_order_relaxed);
      drained_ = static_cast<std::size_t>(got) < bytes;
      return got;
    }
    if (got == 0) return kPeerClosed;
    if (errno == EINTR) continue;
    return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : kPeerClosed;
  }
}

std::ptrdiff_t SocketLink::read_some(std::byte* data, std::size_t bytes) {
  if (!holds_bytes()) {
    if (bytes >= kAhead) return take(data, bytes);
    std::ptrdiff_t got = take(ahead_, kAhead);
    if (got <= 0) return got;
    ahead_begin_ = 0;
    ahead_end_ = static_cast<std::size_t>(got);
  }
  bytes = std::min(bytes, ahead_end_ - ahead_begin_);
  std::memcpy(data, ahead_ + ahead_begin_, bytes);
  ahead_begin_ += bytes;
  return static_cast<std::ptrdiff_t>(bytes);
}

void SocketLink::want_write(bool wanted) {
  if (wanted == waiting_ || fd_ < 0) return;
  waiting_ = wanted;
  epoll_event event{};
  event.events = EPOLLIN | (wanted ? EPOLLOUT : 0u);
  event.data.u64 = static_cast<std::uint64_t>(peer());
  epoll_ctl(epoll_, EPOLL_CTL_MOD, fd_, &event);
}

}  // namespace shoal
