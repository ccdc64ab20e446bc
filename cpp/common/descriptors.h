// Functions on file descriptors.
#pragma once

#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <initializer_list>
#include <system_error>

namespace shoal {

// Throws std::system_error if a system call failed for lack of resources.
inline int checked(int result, const char* call) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), call);
  return result;
}

// Returns a descriptor that becomes readable when the process ends; -1 if it has ended, or if not supported.
inline int open_pidfd(int pid) {
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM)) checked(fd, "pidfd_open");
  return fd;
}

// Makes `epoll` report input on `fd` with the data `what`.
inline void watch_fd(int epoll, int fd, std::uint64_t what) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = what;
  checked(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
}

inline void close_all(std::initializer_list<int*> descriptors) {
  for (int* fd : descriptors) {
    if (*fd >= 0) ::close(*fd);
    *fd = -1;
  }
}

}  // namespace shoal
