// Queries about a process, identified by a pidfd: a pid may have been reused, or differ in the mounted /proc.
#pragma once

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <string>

namespace shoal {

// Whether the process has ended; false if unknown.
inline bool has_ended(int pidfd) {
  pollfd look{pidfd, POLLIN, 0};
  return pidfd >= 0 && ::poll(&look, 1, 0) == 1;
}

// Returns the first 256 bytes of a system file; empty if it cannot be read.
inline std::string beginning(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return {};
  char text[256];
  const std::size_t length = std::fread(text, 1, sizeof text, file);
  std::fclose(file);
  return {text, length};
}

// Whether a signal (SIGSTOP, Ctrl-Z) has stopped the process; false if a debugger did, or if unknown.
inline bool stopped_by_signal(int pidfd) {
  const std::string handle = beginning("/proc/self/fdinfo/" + std::to_string(pidfd));
  const std::size_t number = handle.find("\nPid:");
  int pid = 0;  // in the mounted /proc
  if (number == std::string::npos || std::sscanf(handle.c_str() + number, "\nPid: %d", &pid) != 1 || pid <= 0)
    return false;
  // Format: pid, program name in parentheses (at most 64 bytes, may contain parentheses), state.
  const std::string stat = beginning("/proc/" + std::to_string(pid) + "/stat").substr(0, 128);
  const std::size_t name_end = stat.rfind(')');
  return name_end != std::string::npos && stat.compare(name_end, 3, ") T") == 0 && !has_ended(pidfd);
}

// Sends a signal to the process; false if that fails.
inline bool send_signal(int pidfd, int number) {
  return syscall(SYS_pidfd_send_signal, pidfd, number, nullptr, 0) == 0;
}

}  // namespace shoal
