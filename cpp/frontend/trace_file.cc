#include "frontend/trace_file.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <utility>

#include "common/bytes.h"
#include "common/descriptors.h"
#include "frontend/packer.h"

namespace shoal::frontend_core {
namespace {

constexpr std::uint64_t kMaxOperations = 500'000;          // in a file, as in spool.py
constexpr auto kInterval = std::chrono::milliseconds(50);  // the core keeps Trace::kMaxEvents until then

Packer frame(const char* type, int fields) {
  Packer packer;
  packer.map(fields + 1);
  packer.text("type");
  packer.text(type);
  return packer;
}

}  // namespace

TraceFile::TraceFile(int fd, std::shared_ptr<Context> context) : context_(std::move(context)), fd_(fd) {
  try {
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    close_all({&fd_});
    throw;
  }
  context_->trace().turn(true);
}

TraceFile::~TraceFile() { close(); }

void TraceFile::add_group(std::uint64_t ident, const std::string& name, const std::vector<int>& ranks,
                          int lanes) {
  Packer packer = frame("group", 4);
  packer.text("ident");
  packer.integer(ident);
  packer.text("name");
  packer.text(name);
  packer.text("ranks");
  packer.array(ranks.size());
  for (const int rank : ranks) packer.integer(static_cast<std::uint64_t>(rank));
  packer.text("lanes");
  packer.integer(static_cast<std::uint64_t>(lanes));
  const std::lock_guard lock(mutex_);
  append(packer.bytes);
}

void TraceFile::close() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(stopped_, true)) return;
  }
  wake_.notify_all();
  thread_.join();
  context_->trace().turn(false);
  const std::lock_guard lock(mutex_);
  drain();
  close_all({&fd_});
}

void TraceFile::disown() {
  close_all({&fd_});
  thread_.detach();  // the child has no such thread
}

void TraceFile::run() {
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, kInterval, [this] { return stopped_; })) drain();
}

// Moves the operations of the context to the file; ends the trace if there is no room for more.
void TraceFile::drain() {
  auto [events, dropped] = context_->trace().take();
  if (fd_ < 0) return;
  const std::size_t room = static_cast<std::size_t>(kMaxOperations - operations_);
  const std::size_t count = std::min(events.size(), room);
  if (count > 0) {
    Packer packer = frame("operations", 1);
    packer.text("records");
    packer.number(0xc6, static_cast<std::uint32_t>(count * sizeof(TraceEvent)));
    packer.bytes.append(reinterpret_cast<const char*>(events.data()), count * sizeof(TraceEvent));
    operations_ += count;
    append(packer.bytes);
  }
  const bool full = events.size() > room;
  if (dropped > 0 || full) {
    Packer packer = frame("lost", 2);
    packer.text("operations");
    packer.integer(dropped + events.size() - count);
    packer.text("rest");
    packer.boolean(full);
    append(packer.bytes);
  }
  if (full) context_->trace().turn(false);
}

void TraceFile::append(const std::string& frame) {
  if (fd_ < 0) return;
  const auto length = static_cast<std::uint32_t>(frame.size());
  std::string bytes;
  put(bytes, length);
  bytes += frame;
  const off_t end = ::lseek(fd_, 0, SEEK_END);
  for (std::size_t at = 0; at < bytes.size();) {
    const ssize_t written = ::write(fd_, bytes.data() + at, bytes.size() - at);
    if (written >= 0) {
      at += static_cast<std::size_t>(written);
    } else if (errno != EINTR) {
      std::fprintf(stderr, "shoal: the trace ends early: its file cannot be written: %s\n",
                   std::strerror(errno));
      context_->trace().turn(false);
      // Whole frames, and the mark of a truncated trace, which needs no room on the disk.
      [[maybe_unused]] const bool marked =
          ::ftruncate(fd_, end) == 0 && ::ftruncate(fd_, end + static_cast<off_t>(sizeof length)) == 0;
      close_all({&fd_});
      return;
    }
  }
}

}  // namespace shoal::frontend_core
