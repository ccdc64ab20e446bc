// A frame that arrives after one thread has read a link completely, while another thread is turned away.

#include <algorithm>
#include <cstring>
#include <thread>

#include "net/link.h"
#include "tests/scenes.h"
#include "tests/support.h"

namespace shoal::stress {
namespace {

struct Counter final : FrameSink {
  int frames = 0;
  Destination on_header(Link&, const FrameHeader&) override { return {}; }
  void on_frame(Link&, const FrameHeader&, const Destination&) override { ++frames; }
  void on_link_lost(Link&, LinkEnd, const char* why) override { die(why); }
  void on_sent() override {}
};

// Its only frame arrives when the first reader has found nothing, and still holds the link.
class LateLink final : public Link {
 public:
  explicit LateLink(FrameSink& sink) : Link(1, sink) { frame_.type = FrameType::kHeartbeat; }

 protected:
  std::ptrdiff_t write_some(const iovec*, int) override { return 0; }
  std::ptrdiff_t read_some(std::byte* data, std::size_t bytes) override {
    if (!there_) {
      there_ = true;
      std::thread([this] { check(!receive(), "two threads read one link"); }).join();
      return 0;
    }
    const std::size_t moved = std::min(bytes, sizeof frame_ - read_);
    std::memcpy(data, reinterpret_cast<const std::byte*>(&frame_) + read_, moved);
    read_ += moved;
    return static_cast<std::ptrdiff_t>(moved);
  }

 private:
  FrameHeader frame_;
  bool there_ = false;
  std::size_t read_ = 0;
};

}  // namespace

void late_frames() {
  for (const bool all : {false, true}) {
    Counter counter;
    LateLink link(counter);
    if (all)
      link.receive_all();
    else
      link.receive();
    check(counter.frames == 1, "a frame stays in a link that no thread reads");
  }
}

}  // namespace shoal::stress
