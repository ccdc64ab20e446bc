// The functions of shoal/abi.h, except those of the gradient reducer.
#include "shoal/abi.h"

#include <memory>
#include <utility>

#include "collectives/calls.h"
#include "frontend/blake2b.h"
#include "frontend/callbacks.h"
#include "frontend/failure.h"
#include "frontend/group.h"

using namespace shoal::frontend_core;

struct shoal_group {
  std::shared_ptr<ProgramGroup> group;
};

struct shoal_operation {
  ProgramOperation operation;
};

namespace {

shoal_error* submitted(shoal_group* group, const auto& call, shoal_operation** operation) {
  return guarded([&] { *operation = new shoal_operation{group->group->submit(call)}; });
}

}  // namespace

extern "C" {

shoal_error* shoal_init(const char* const* options, size_t option_count, shoal_group** group) {
  return guarded([&] {
    Options given;
    for (size_t i = 0; i + 1 < option_count; i += 2) given.emplace_back(options[i], options[i + 1]);
    *group = new shoal_group{ProgramGroup::of_all(World::connect(given))};
  });
}

shoal_group_info shoal_group_describe(const shoal_group* group) {
  const ProgramGroup& own = *group->group;
  const Member& member = own.world().member();
  return {own.rank(),         own.size(),         member.local_rank, member.context.local_size,
          own.name().c_str(), own.ranks().data(), own.timeout()};
}

int32_t shoal_group_state(shoal_group* group) { return static_cast<int32_t>(group->group->state()); }

shoal_error* shoal_group_collective(shoal_group* group, const shoal_call* call, shoal_operation** operation) {
  return submitted(group, *call, operation);
}

shoal_error* shoal_group_send_or_receive(shoal_group* group, const shoal_message* message,
                                         shoal_operation** operation) {
  return submitted(group, *message, operation);
}

shoal_error* shoal_group_split(shoal_group* group, const int64_t* color, int64_t key, double timeout,
                               shoal_group** made) {
  return guarded([&] {
    auto split = group->group->split(color, key, timeout);
    *made = split ? new shoal_group{std::move(split)} : nullptr;
  });
}

shoal_error* shoal_group_allocate(shoal_group* group, uint64_t bytes, void** data, void** owner) {
  return guarded([&] {
    auto block = std::make_unique<std::shared_ptr<shoal::Block>>(group->group->allocate(bytes));
    *data = (*block)->data();
    *owner = block.release();
  });
}

void shoal_memory_free(void* owner) { delete static_cast<std::shared_ptr<shoal::Block>*>(owner); }

void shoal_group_abort(shoal_group* group, const char* reason) {
  shoal_error_free(guarded([&] { group->group->abort(reason); }));
}

shoal_error* shoal_group_close(shoal_group* group, double timeout) {
  return guarded([&] { group->group->close(timeout); });
}

void shoal_group_free(shoal_group* group) { delete group; }

int32_t shoal_operation_done(shoal_operation* operation) {
  shoal::Operation& own = *operation->operation.operation;
  if (own.done() || own.orphaned()) return true;
  own.group().context().polled_by_caller();
  return false;
}

shoal_error* shoal_operation_wait(shoal_operation* operation, double timeout, int32_t* done) {
  *done = 1;
  return guarded([&] { *done = wait(operation->operation, shoal::until(timeout)); });
}

void shoal_operation_notify(shoal_operation* operation, void (*fn)(void*), void* argument) {
  const ProgramOperation& own = operation->operation;
  own.world->notify(own.operation, fn, argument);
}

int32_t shoal_operation_cancel(shoal_operation* operation) {
  return operation->operation.operation->cancel();
}

void shoal_operation_received(const shoal_operation* operation, int32_t* source, uint64_t* bytes) {
  const auto& received = operation->operation.operation->received;
  if (source != nullptr) *source = received ? static_cast<int32_t>(received->header.source) : -1;
  if (bytes != nullptr) *bytes = received ? received->header.total : 0;
}

uint64_t shoal_operation_key(const shoal_operation* operation) { return operation->operation.key; }

void shoal_operation_free(shoal_operation* operation) { delete operation; }

shoal_error* shoal_run(void (*fn)(void*), void* argument) {
  return guarded([&] { run_in_callback_thread(fn, argument); });
}

uint64_t shoal_then_key(uint64_t key, uint64_t index) { return derive_key("then", {key, index}); }

void* shoal_callback_enter(uint64_t key, uint64_t index) { return new CallbackScope(key, index); }

void shoal_callback_leave(void* token) { delete static_cast<CallbackScope*>(token); }

void shoal_digest(const void* data, size_t bytes, unsigned char digest[32]) {
  blake2b({static_cast<const char*>(data), bytes}, {}, digest, 32);
}

}  // extern "C"
