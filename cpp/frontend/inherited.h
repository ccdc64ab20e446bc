// Sockets that the launcher passes to this process, by variables such as SHOAL_REPORT_FD=7:4026.
#pragma once

#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>

namespace shoal::frontend_core {

// The descriptor that the variable names, if it is still the socket with that inode; else -1.
inline int inherited_socket(const char* variable) {
  const char* named = std::getenv(variable);
  int fd = -1;
  unsigned long long inode = 0;
  struct stat status{};
  if (named == nullptr || std::sscanf(named, "%d:%llu", &fd, &inode) != 2 || ::fstat(fd, &status) != 0)
    return -1;
  return S_ISSOCK(status.st_mode) && status.st_ino == inode ? fd : -1;
}

}  // namespace shoal::frontend_core
