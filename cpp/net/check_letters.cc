// Checks of letters, the messages between posts (cpp/post).
#include <algorithm>
#include <cstring>

#include "net/check.h"
#include "net/letter.h"

namespace shoal {
namespace {

bool all_zero(const std::byte* begin, const std::byte* end) {
  return std::all_of(begin, end, [](std::byte byte) { return byte == std::byte{0}; });
}

}  // namespace

const char* flaw_of_letter(const FrameHeader& header, const LetterState& state) {
  const LetterFields& letter = header.letter;
  auto fields = reinterpret_cast<const std::byte*>(&header.shape);
  if (header.source != 0 || header.group != 0 || letter.reserved != 0 || letter.unused != 0 ||
      !all_zero(fields + sizeof(LetterFields), fields + sizeof(Shape)))
    return "bytes in what is reserved";
  if (letter.verb == Verb::kPart) {
    if (state.parts_due == 0) return "a part of no letter";
    if (header.channel != state.call || header.step != state.next_part) return "another part than the next";
    const std::size_t used = header.code == kLent ? offsetof(LoanFields, place) : sizeof(LetterFields);
    return all_zero(fields + sizeof(Verb), fields + used) ? nullptr : "bytes in what is reserved";
  }
  if (header.code == kLent) return "a letter in lent memory, where only parts may be";
  if (state.parts_due != 0) return "a letter before the parts of the last one";
  if (header.step != 0) return "a step of a letter, which has none";
  if (letter.apart > letter.parts) return "a letter with more parts apart than parts";
  if (header.total < layout::head_at(letter) + letter.head) return "a letter that is shorter than its head";
  const bool call = letter.verb == Verb::kCall, post = letter.verb == Verb::kPost;
  if (!call && letter.deadline_ms != 0) return "a deadline of a letter that is not a call";
  if ((call || post) && header.code == kWithheld) return "a letter that had to wait for its window";
  if (post) return header.channel == 0 ? nullptr : "a call number on a letter that is not a call";
  if (call) return header.channel > state.last ? nullptr : "a call that came before";
  if (letter.verb != Verb::kReply && letter.verb != Verb::kFailure) return "a letter of no known kind";
  if (letter.mailbox != 0) return "a mailbox of a reply";
  return header.channel != 0 && header.channel <= state.made ? nullptr
                                                             : "a reply to a call that was not made";
}

const char* flaw_of_parts(const FrameHeader& header, const std::byte* payload,
                          const std::vector<std::uint64_t>& apart) {
  const LetterFields& letter = header.letter;
  std::uint64_t end = layout::head_at(letter) + letter.head;
  std::size_t next = 0;
  for (std::size_t i = 0; i < letter.parts; ++i) {
    layout::Entry entry;
    std::memcpy(&entry, payload + i * sizeof entry, sizeof entry);
    if (entry.place == layout::kApart) {
      if (next == apart.size() || entry.bytes != apart[next++]) return "a part of another size than it has";
    } else if (entry.place == layout::kInside) {
      end = layout::aligned(end);
      if (entry.bytes > header.total || end > header.total - entry.bytes) return "a part beyond its letter";
      end += entry.bytes;
    } else {
      return "a part with an invalid place";
    }
  }
  if (next != apart.size()) return "a part that its letter does not list";
  return end == header.total ? nullptr : "a letter that is longer than its parts";
}

}  // namespace shoal
