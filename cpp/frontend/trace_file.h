// The file to which a traced C++ program appends its operations; src/shoal/tracing/spool.py has the format.
//
// The helper process creates it, and makes the trace of it when the program has closed its last group.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/context.h"

namespace shoal::frontend_core {

class TraceFile {
 public:
  // Takes over the descriptor, and traces the context from now on.
  TraceFile(int fd, std::shared_ptr<Context> context);
  ~TraceFile();
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  // Describes a group, before its first operation; `ranks` are numbered in the world.
  void add_group(std::uint64_t ident, const std::string& name, const std::vector<int>& ranks, int lanes);
  // Ends the trace after the last operation.
  void close();
  // In a forked child: closes its descriptor.  The object must not be destroyed there.
  void disown();

 private:
  void run();
  void drain();
  void append(const std::string& frame);

  std::shared_ptr<Context> context_;
  std::mutex mutex_;
  std::condition_variable wake_;
  int fd_;
  std::uint64_t operations_ = 0;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace shoal::frontend_core
