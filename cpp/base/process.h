// What the system tells of other processes.
#pragma once

#include <cstdio>
#include <cstring>
#include <string>

namespace shoal {

// Whether a signal has stopped the process, as Ctrl-Z and SIGSTOP do; false if a debugger holds it, and when
// unknown.
inline bool stopped_by_signal(int pid) {
  std::FILE* file = std::fopen(("/proc/" + std::to_string(pid) + "/stat").c_str(), "re");
  if (file == nullptr) return false;
  char text[128];  // the number, the program's name (at most 64 bytes) in brackets, the state
  text[std::fread(text, 1, sizeof text - 1, file)] = 0;
  std::fclose(file);
  const char* name_end = std::strrchr(text, ')');  // a name may hold brackets itself
  return name_end != nullptr && name_end[1] == ' ' && name_end[2] == 'T';
}

}  // namespace shoal
