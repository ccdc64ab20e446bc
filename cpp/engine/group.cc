#include "engine/group.h"

#include <algorithm>
#include <map>

#include "common/clock.h"
#include "engine/context.h"
#include "engine/describe.h"
#include "engine/mover.h"

namespace shoal {

Group::Group(std::shared_ptr<Context> context, Options options)
    : context_(std::move(context)),
      options_(std::move(options)),
      lanes_(*this, options_.lanes),
      inquiry_(*this),
      agreements_(*this, options_.agreements),
      members_(options_.ranks.size()) {
  std::map<int, int> index_of;  // by host
  for (int rank = 0; rank < size(); ++rank) {
    const auto [found, fresh] = index_of.emplace(options_.hosts[rank], static_cast<int>(hosts_.size()));
    if (fresh) hosts_.emplace_back();
    hosts_[found->second].push_back(rank);
    if (rank == options_.rank) host_ = found->second;
  }
  const auto& mine = hosts_[host_];
  if (mine.size() > 1 && !pairwise()) {
    int self = static_cast<int>(std::find(mine.begin(), mine.end(), rank()) - mine.begin());
    std::vector<int> others;
    for (int member : mine)
      if (member != rank()) others.push_back(global(member));
    context_->quarantine().open(ident(), std::move(others));
    team_ = std::make_unique<HostMembers>(*context_, ident(), mine, options_.ranks, self, options_.lanes);
  }
}

Group::~Group() = default;

int Group::rank_of(int global) const {
  auto found = std::find(options_.ranks.begin(), options_.ranks.end(), global);
  return found == options_.ranks.end() ? -1 : static_cast<int>(found - options_.ranks.begin());
}

int Group::world_rank(int rank) const { return context_->world_rank(global(rank)); }

Link* Group::link(int rank) const { return context_->link(global(rank)); }

void Group::set_mover(std::shared_ptr<Mover> mover) {
  mover_owner_ = std::move(mover);
  mover_.store(mover_owner_.get(), std::memory_order_release);
  context_->bell().wake();
}

OperationPtr Group::submit(Request request) {
  auto op = std::make_shared<Operation>(shared_from_this(), std::move(request));
  if (op->request().collective()) inquiry_.record_call(op->request(), op->call_);
  lanes_.submit(op);
  if (!op->done()) context_->submitted(op->large());
  return op;
}

void Group::check(std::int64_t now, std::int64_t& next) {
  answer_leaving();
  const auto [overdue, stalled] = lanes_.late(now, next);
  for (auto& op : stalled) inquiry_.compare_with_neighbour(*op);
  for (auto& op : overdue) {
    const Request& request = op->request();
    if (request.collective()) {
      inquiry_.start_timeout(request);
      continue;
    }
    Error error{ErrorCode::kTimeout,
                "did not finish within its timeout of " + seconds(request.timeout) +
                    (request.kind == Kind::kRecv ? ": no matching message came"
                                                 : ": the receiver took no notice of it"),
                {},
                describe(request)};
    if (request.peer >= 0) error.ranks.push_back(request.peer);
    if (pairwise()) {
      op->end(std::move(error));
      lanes_.drive(*op);
    } else {
      fail(std::move(error), true);
    }
  }
  inquiry_.check(now, next);
  agreements_.check(now, next);
}

std::shared_ptr<Block> Group::allocate(std::size_t bytes) {
  auto block = std::make_shared<Block>(context_->arena(), bytes);
  std::lock_guard lock(state_mutex_);
  std::erase_if(blocks_, [](const auto& entry) { return entry.expired(); });
  blocks_.push_back(block);
  return block;
}

FrameHeader Group::frame(FrameType type) const {
  FrameHeader header;
  header.type = type;
  header.group = ident();
  header.source = static_cast<std::uint32_t>(rank());
  return header;
}

void Group::send_to(int rank, const FrameHeader& header, const std::string& text) {
  std::lock_guard lock(goodbye_mutex_);
  Link* to = said_goodbye_ ? nullptr : link(rank);
  if (to != nullptr && !to->broken()) to->send_control(header, text.data(), text.size());
}

// kGroupClosed must be a group's last frame, because the peers then forget the group.
void Group::send_to_all(const FrameHeader& header, const std::string& text) {
  std::lock_guard lock(goodbye_mutex_);
  if (said_goodbye_) return;
  said_goodbye_ = header.type == FrameType::kGroupClosed;
  for (int r = 0; r < size(); ++r) {
    Link* to = r == rank() ? nullptr : link(r);
    if (to != nullptr && !to->broken()) to->send_control(header, text.data(), text.size());
  }
}

}  // namespace shoal
