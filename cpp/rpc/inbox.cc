#include "rpc/inbox.h"

#include <algorithm>
#include <utility>

namespace shoal {
namespace {

// A call needs no handler if it was cancelled, its deadline has passed, or its caller is lost.
bool worth_taking(const Letter& letter) {
  const auto& handling = letter.handling;
  return !handling || (!handling->cancelled() && handling->advance(Handling::kQueued, Handling::kRunning));
}

}  // namespace

bool Inbox::put(LetterPtr letter) {
  letter->arrived = now_ns();
  std::lock_guard lock(mutex_);
  if (closed()) return true;
  auto found = mailboxes_.find(letter->header.letter.mailbox);
  if (found == mailboxes_.end()) return false;
  Mailbox& mailbox = found->second;
  if (!mailbox.asleep.empty()) {
    if (!worth_taking(*letter)) return true;
    taken_ += letter->header.letter.mailbox == 0;
    Sleeper& sleeper = *mailbox.asleep.back();
    mailbox.asleep.pop_back();
    sleeper.letter = std::move(letter);
    sleeper.woken.open();  // last: then the sleeper may be destroyed
    return true;
  }
  letter->place = ++arrivals_;
  letter->taken_before = taken_;
  const std::uint64_t place = letter->place;
  mailbox.letters.emplace_hint(mailbox.letters.end(), place, std::move(letter));
  return true;
}

void Inbox::remove(const Letter& letter) {
  LetterPtr removed;  // destroyed after the lock is released: it returns what it held
  std::lock_guard lock(mutex_);
  auto mailbox = mailboxes_.find(letter.header.letter.mailbox);
  if (mailbox == mailboxes_.end()) return;
  auto found = mailbox->second.letters.find(letter.place);
  if (found == mailbox->second.letters.end() || found->second.get() != &letter) return;
  removed = std::move(found->second);
  mailbox->second.letters.erase(found);
}

bool Inbox::take(std::uint32_t number, std::int64_t until, std::size_t most,
                 std::vector<LetterPtr>& letters) {
  std::vector<LetterPtr> stale;  // destroyed after the lock is released, as above
  Sleeper self;
  {
    std::lock_guard lock(mutex_);
    auto found = mailboxes_.find(number);
    if (found == mailboxes_.end()) return false;
    Mailbox& mailbox = found->second;
    while (!mailbox.letters.empty() && letters.size() < most) {
      auto first = mailbox.letters.begin();
      (worth_taking(*first->second) ? letters : stale).push_back(std::move(first->second));
      mailbox.letters.erase(first);
    }
    if (number == 0) taken_ += letters.size();
    if (!letters.empty() || most == 0 || until <= now_ns()) return true;
    mailbox.asleep.push_back(&self);
  }
  stale.clear();
  if (!self.woken.wait(until)) {
    std::lock_guard lock(mutex_);
    if (auto found = mailboxes_.find(number); found != mailboxes_.end())
      std::erase(found->second.asleep, &self);
  }
  // With the lock held, no letter can be handed over; one that came at the last moment is here now.
  std::lock_guard lock(mutex_);
  if (self.letter) letters.push_back(std::move(self.letter));
  return !letters.empty() || mailboxes_.contains(number);
}

std::size_t Inbox::waiting(std::uint32_t mailbox) {
  std::lock_guard lock(mutex_);
  auto found = mailboxes_.find(mailbox);
  return found == mailboxes_.end() ? 0 : found->second.letters.size();
}

std::size_t Inbox::waiting() {
  std::lock_guard lock(mutex_);
  std::size_t sum = 0;
  for (const auto& [number, mailbox] : mailboxes_) sum += mailbox.letters.size();
  return sum;
}

std::optional<std::size_t> Inbox::ahead_of(const Letter& letter) {
  std::lock_guard lock(mutex_);
  auto mailbox = mailboxes_.find(letter.header.letter.mailbox);
  if (mailbox == mailboxes_.end()) return std::nullopt;
  const auto& letters = mailbox->second.letters;
  auto found = letters.find(letter.place);
  if (found == letters.end() || found->second.get() != &letter) return std::nullopt;
  return static_cast<std::size_t>(std::distance(letters.begin(), found));
}

Inbox::Neglect Inbox::neglect() {
  std::lock_guard lock(mutex_);
  auto found = mailboxes_.find(0);
  if (found == mailboxes_.end() || !found->second.asleep.empty() || found->second.letters.empty()) return {};
  const Letter& oldest = *found->second.letters.begin()->second;
  return {oldest.arrived, oldest.taken_before, taken_};
}

void Inbox::open(std::uint32_t number) {
  std::lock_guard lock(mutex_);
  if (!closed()) mailboxes_.try_emplace(number);
}

void Inbox::release(std::uint32_t number) {
  if (number == 0) return;
  Mailbox dropped;  // destroyed after the lock is released, as above
  std::lock_guard lock(mutex_);
  auto found = mailboxes_.find(number);
  if (found == mailboxes_.end()) return;
  for (Sleeper* sleeper : found->second.asleep) sleeper->woken.open();
  dropped = std::move(found->second);
  mailboxes_.erase(found);
}

void Inbox::close() {
  std::unordered_map<std::uint32_t, Mailbox> dropped;  // destroyed after the lock is released, as above
  std::lock_guard lock(mutex_);
  for (auto& [number, mailbox] : mailboxes_) {
    for (Sleeper* sleeper : mailbox.asleep) sleeper->woken.open();
    mailbox.asleep.clear();
  }
  dropped.swap(mailboxes_);
}

}  // namespace shoal
