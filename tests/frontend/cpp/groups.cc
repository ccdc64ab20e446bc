// The groups and futures of C++ programs; tests/frontend/test_groups.py runs it with several ranks.
//
//   groups NAME [ARGUMENT]    runs the test NAME below; exits with 0, or prints a failed check
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "shoal/shoal.h"

namespace {

#define CHECK(condition)                                                                        \
  do {                                                                                          \
    if (!(condition)) {                                                                         \
      std::fprintf(stderr, "%s:%d: rank %d: %s\n", __FILE__, __LINE__, shown_rank, #condition); \
      std::_Exit(99);                                                                           \
    }                                                                                           \
  } while (false)

int shown_rank = -1;
std::string argument;

shoal::Group join() {
  shoal::Group group = shoal::init();
  shown_rank = group.rank();
  return group;
}

// The text of the exception E that `fn` throws.
template <class E, class F>
std::string text_of(F fn) {
  try {
    fn();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: another exception: %s\n", shown_rank, error.what());
    std::_Exit(98);
  }
  std::fprintf(stderr, "rank %d: no exception\n", shown_rank);
  std::_Exit(97);
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

template <class E>
shoal::Array<E> filled(const shoal::Group& group, std::size_t count, E value) {
  auto array = group.empty<E>(count);
  std::fill(array.begin(), array.end(), value);
  return array;
}

void collectives() {
  shoal::Group group = join();
  const int rank = group.rank(), size = group.size();
  const auto total = static_cast<float>(size * (size + 1) / 2);
  for (std::size_t count : {std::size_t{1}, std::size_t{1000}, std::size_t{300'000}}) {
    auto x = filled<float>(group, count, static_cast<float>(rank + 1));
    CHECK(group.all_reduce(x).wait()[count - 1] == total);
    std::vector<double> own(count, rank + 1);
    group.all_reduce(shoal::Array<double>(own), shoal::max).wait();
    CHECK(own[count / 2] == size);
    std::fill(own.begin(), own.end(), rank + 1);
    group.reduce(shoal::Array<double>(own), size - 1, shoal::sum).wait();
    CHECK(own[0] == (rank == size - 1 ? total : rank + 1));
    std::vector<int> number(count, rank);
    group.broadcast(shoal::Array<int>(number), size - 1).wait();
    CHECK(number[count - 1] == size - 1);
    std::vector<int> mine(count, rank);
    const auto all = group.all_gather(shoal::Array<int>(mine)).wait();
    for (int other = 0; other < size; ++other) CHECK(all[static_cast<std::size_t>(other)][0] == other);
    std::vector<int> joined(count * static_cast<std::size_t>(size));
    group.all_gather_single(shoal::Array<int>(joined), shoal::Array<int>(mine)).wait();
    CHECK(joined.back() == size - 1);
    std::vector<int> part(count);
    group.reduce_scatter_single(shoal::Array<int>(part), shoal::Array<int>(joined)).wait();
    CHECK(part[0] == rank * size);
    std::vector<int> swapped(joined.size());
    for (std::size_t i = 0; i < joined.size(); ++i) joined[i] = rank * 100 + static_cast<int>(i / count);
    group.all_to_all_single(shoal::Array<int>(swapped), shoal::Array<int>(joined)).wait();
    for (int other = 0; other < size; ++other)
      CHECK(swapped[static_cast<std::size_t>(other) * count] == other * 100 + rank);
    const auto gathered = group.gather(shoal::Array<int>(mine), 0).wait();
    CHECK(gathered.size() == (rank == 0 ? static_cast<std::size_t>(size) : 0));
    if (rank == 0) CHECK(gathered.back()[0] == size - 1);
    std::vector<shoal::Array<int>> parts;
    for (int other = 0; rank == 0 && other < size; ++other)
      parts.push_back(filled<int>(group, count, other * 7));
    group.scatter(shoal::Array<int>(mine), parts).wait();
    CHECK(mine[count - 1] == rank * 7);
    std::vector<shoal::Array<int>> inputs, outputs;
    for (int other = 0; other < size; ++other) {
      inputs.push_back(filled<int>(group, count, rank * 10 + other));
      outputs.push_back(filled<int>(group, count, -1));
    }
    const auto exchanged = group.all_to_all(outputs, inputs).wait();
    for (int other = 0; other < size; ++other)
      CHECK(exchanged[static_cast<std::size_t>(other)][0] == other * 10 + rank);
    auto reduced = filled<int>(group, count, 0);
    group.reduce_scatter(reduced, inputs).wait();
    CHECK(reduced[0] == 10 * size * (size - 1) / 2 + rank * size);
  }
  group.barrier().wait();
  CHECK(group.state() == shoal::GroupState::open);
  group.close();
  CHECK(group.state() == shoal::GroupState::closed);
  CHECK(has(text_of<shoal::GroupClosed>([&] { group.barrier(); }), "is closed; make a new group"));
}

void messages() {
  shoal::Group group = join();
  const int rank = group.rank(), size = group.size(), next = (rank + 1) % size,
            before = (rank + size - 1) % size;
  std::vector<float> out(1000, static_cast<float>(rank)), in(1000);
  auto sent = group.send(shoal::Array<float>(out), next, 5);
  const auto message = group.recv_message(shoal::Array<float>(in), shoal::any_source, 5).wait();
  sent.wait();
  CHECK(message.source == before && in[999] == static_cast<float>(before));
  auto never = group.recv(shoal::Array<float>(in), before, 6);
  CHECK(!never.done());
  CHECK(has(text_of<shoal::WaitTimeout>([&] { never.wait(shoal::Seconds(0.01)); }), "still in progress"));
  CHECK(never.cancel());
  text_of<shoal::OperationCancelled>([&] { never.wait(); });
  CHECK(has(text_of<shoal::UsageError>([&] { group.send(shoal::Array<float>(out), size); }), "not a rank"));
  CHECK(has(text_of<shoal::UsageError>([&] { group.send(shoal::Array<float>(out), rank); }), "to itself"));
  CHECK(has(text_of<shoal::UsageError>([&] { group.send(shoal::Array<float>(out), next, 1ULL << 30); }),
            "tag"));
  group.barrier().wait();
}

void futures() {
  shoal::Group group = join();
  const int size = group.size();
  auto x = filled<int>(group, 100, 1);
  std::vector<shoal::Future<int>> results;
  for (int i = 0; i < 50; ++i) {
    auto y = filled<int>(group, 10, i);
    // Operations in callbacks are matched by key, also where callbacks run in different orders.
    results.push_back(group.all_reduce(y).then([group, i](shoal::Future<shoal::Array<int>> done) {
      auto sum = done.wait();
      CHECK(sum[0] == i * group.size());
      if ((group.rank() + i) % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      return group.all_reduce(sum).wait()[0];
    }));
  }
  for (int i = 0; i < 50; ++i) CHECK(results[static_cast<std::size_t>(i)].wait() == i * size * size);
  // Errors: of the operation, of the callback.
  auto failed = group.all_reduce(x).then([](auto) -> int { throw std::runtime_error("mine"); });
  CHECK(text_of<std::runtime_error>([&] { failed.wait(); }) == "mine");
  CHECK(failed.exception() != nullptr && failed.done());
  // A callback that waits for a later callback: each has a thread.
  shoal::Promise<int> promise;
  text_of<shoal::InvalidFutureState>([&] { promise.future().value(); });
  auto first = promise.future().then([group](auto) { return 1; });
  auto waits = group.barrier().then([first](auto) { return first.wait() + 1; });
  promise.set_value(3);
  CHECK(waits.wait() == 2 && promise.future().value() == 3);
  text_of<shoal::InvalidFutureState>([&] { promise.set_value(4); });
  const auto broken = shoal::Promise<int>().future();
  auto after = broken.then([group](auto done) { return done.wait(); });
  CHECK(has(text_of<shoal::InvalidFutureState>([&] { after.wait(); }), "destroyed without an outcome"));
  // A callback that cannot be copied and returns a reference; a wait that is as long as can be.
  shoal::Promise<int> later;
  auto moved = later.future().then([owned = std::make_unique<int>(5)](auto) -> const int& { return *owned; });
  std::thread setter([later] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    later.set_value(1);
  });
  CHECK(later.future().wait(shoal::Seconds(std::numeric_limits<double>::infinity())) == 1);
  CHECK(moved.wait(shoal::Seconds(1e300)) == 5);
  setter.join();
  // Several callbacks of an operation that is not complete.
  const int next = (group.rank() + 1) % size, before = (group.rank() + size - 1) % size;
  std::vector<int> in(1), out(1, 7);
  const auto received = group.recv(shoal::Array<int>(in), before);
  std::vector<shoal::Future<int>> several;
  for (int i = 0; i < 5; ++i) several.push_back(received.then([i](auto done) { return done.wait()[0] + i; }));
  group.barrier().wait();
  group.send(shoal::Array<int>(out), next).wait();
  for (int i = 0; i < 5; ++i) CHECK(several[static_cast<std::size_t>(i)].wait() == 7 + i);
  // All of several, or the first of them.
  const shoal::Seconds soon(0.15);
  const shoal::Promise<int> open;
  const std::vector<shoal::Future<int>> one_open{open.future(), several[1]};
  CHECK(shoal::wait_all(several) == (std::vector<int>{7, 8, 9, 10, 11}));
  CHECK(shoal::wait_any(one_open).wait() == 8);
  text_of<shoal::WaitTimeout>([&] { shoal::wait_all(one_open, soon); });
  text_of<shoal::WaitTimeout>([&] { shoal::wait_any(std::vector{open.future()}, soon); });
  text_of<shoal::UsageError>([&] { shoal::wait_any(std::vector<shoal::Future<int>>()); });
  CHECK(text_of<std::runtime_error>([&] { shoal::wait_all(std::vector{open.future(), failed}); }) == "mine");
  std::vector<shoal::Future<void>> messages;
  if (group.rank() == size - 1) {
    for (int peer = 0; peer < size - 1; ++peer) messages.push_back(group.send(shoal::Array<int>(out), peer));
  } else {
    messages.push_back(group.recv(shoal::Array<int>(in), size - 1).then([](auto done) { done.wait(); }));
    CHECK(shoal::wait_any(std::vector{open.future().then([](auto) {}), messages[0]}).done());
  }
  shoal::wait_all(messages, shoal::Seconds(60));
  open.set_value(1);
  // A dropped future keeps its tensors until the operation is complete.
  for (int i = 0; i < 20; ++i) group.all_reduce(filled<float>(group, 100'000, 1.0F));
  group.barrier().wait();
}

void split() {
  shoal::Group group = join();
  const int rank = group.rank(), size = group.size();
  auto half = group.split(rank % 2, -rank);
  CHECK(half && half->size() == (size + 1 - rank % 2) / 2);
  CHECK(half->ranks().front() == (size - 1) - ((size - 1) % 2 != rank % 2));
  std::vector<int> x(10, rank);
  half->all_reduce(shoal::Array<int>(x)).wait();
  int expected = 0;
  for (int other = rank % 2; other < size; other += 2) expected += other;
  CHECK(x[0] == expected);
  auto nobody = group.split(rank == 0 ? std::optional<std::int64_t>() : 3);
  CHECK(nobody.has_value() == (rank != 0));
  CHECK(has(half->name(), "split:"));
  group.close();  // the others stay open
  half->barrier().wait();
}

void errors() {
  shoal::Group group = join();
  const int rank = group.rank(), size = group.size();
  std::vector<float> x(10), y(10);
  CHECK(has(
      text_of<shoal::UnsupportedOperation>([&] { group.all_reduce(shoal::Array<float>(x), shoal::band); }),
      "BAND is not defined for float32"));
  CHECK(has(text_of<shoal::UsageError>([&] { group.broadcast(shoal::Array<float>(x), size); }),
            "is not a rank"));
  CHECK(has(text_of<shoal::UsageError>(
                [&] { group.all_gather_single(shoal::Array<float>(y), shoal::Array<float>(x)); }),
            size == 1 ? "share" : "times the number of ranks"));
  CHECK(has(text_of<shoal::UsageError>([&] {
              group.all_to_all_single(shoal::Array<float>(x.data(), static_cast<std::size_t>(size)),
                                      shoal::Array<float>(x.data() + 1, static_cast<std::size_t>(size)));
            }),
            "share memory"));
  const std::string before = text_of<shoal::UsageError>([&] { group.broadcast(shoal::Array<float>(x), -1); });
  CHECK(has(before, "broadcast on rank " + std::to_string(rank) + " of group 'world': root -1"));
  text_of<shoal::OutOfSharedMemory>([&] { group.empty<double>(std::size_t{1} << 62); });
  group.barrier().wait();
  // A mismatch names both calls on every rank, and breaks the group.
  const std::string text = text_of<shoal::CollectiveMismatch>([&] {
    (rank == 0 ? group.all_reduce(shoal::Array<float>(x)) : group.broadcast(shoal::Array<float>(x))).wait();
  });
  CHECK(has(text, "all_reduce") && has(text, "broadcast") && has(text, "rank 0"));
  CHECK(group.state() == shoal::GroupState::broken);
  CHECK(has(text_of<shoal::CollectiveMismatch>([&] { group.barrier(); }), "is broken"));
}

void timeout() {
  shoal::Group group = join();
  if (group.rank() == 0) {
    std::vector<float> x(10);
    try {
      group.all_reduce(shoal::Array<float>(x), shoal::sum, shoal::Seconds(0.2)).wait();
      CHECK(false);
    } catch (const shoal::OperationTimeout& error) {
      CHECK(has(error.what(), "all_reduce") && error.ranks() == std::vector<int>{1});
    }
  } else {
    text_of<shoal::OperationTimeout>([&] {
      for (;;) {
        if (group.state() != shoal::GroupState::open) group.barrier();
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    });
  }
}

void abort() {
  shoal::Group group = join();
  if (group.rank() == 0) group.abort("no reason");
  const std::string text = text_of<shoal::GroupAborted>([&] { group.barrier().wait(); });
  CHECK(has(text, "rank 0 aborted the group: no reason"));
}

// An exception that leaves the scope of the group aborts it.
void exception() {
  try {
    shoal::Group group = join();
    group.barrier().wait();
    if (group.rank() == 0) throw std::runtime_error("mine");
    group.barrier().wait();
    CHECK(false);
  } catch (const shoal::GroupAborted& error) {
    CHECK(has(error.what(), "an exception left the scope"));
  } catch (const std::runtime_error& error) {
    CHECK(shown_rank == 0);
  }
}

// The last rank is killed; the others end as a consequence.
void killed() {
  shoal::Group group = join();
  group.barrier().wait();
  if (group.rank() == group.size() - 1) std::raise(SIGKILL);
  std::vector<float> x(1000);
  try {
    for (;;) group.all_reduce(shoal::Array<float>(x)).wait();
  } catch (const shoal::PeerLost& error) {
    CHECK(error.ranks() == std::vector<int>{group.size() - 1});
    CHECK(has(error.what(), "is lost"));
  }
  std::exit(7);
}

// The last rank aborts, and ends after the others, which see that first when they call an operation.
void ends_late() {
  shoal::Group group = join();
  group.barrier().wait();
  if (group.rank() == group.size() - 1) {
    group.abort("bad data");
    std::this_thread::sleep_for(std::chrono::seconds(1));
    std::exit(9);
  }
  while (group.state() == shoal::GroupState::open) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  text_of<shoal::GroupAborted>([&] { group.barrier(); });
  std::exit(7);
}

// Rank 1 is late, a group is split, a child is forked; the last rank is killed after the others have ended.
void traced() {
  {
    shoal::Group group = join();
    group.barrier().wait();
    std::vector<float> x(1000);
    for (int i = 0; i < 3; ++i) {
      if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      group.all_reduce(shoal::Array<float>(x)).wait();
    }
    auto part = group.split(0);  // an all_gather
    part->barrier().wait();
    const pid_t child = fork();
    if (child == 0) std::_Exit(0);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    group.barrier().wait();
    if (group.rank() == group.size() - 1) {
      std::this_thread::sleep_for(std::chrono::seconds(2));
      std::raise(SIGKILL);
    }
    group.abort("the others need not wait");
  }
  std::exit(0);
}

// exit() with an open group closes it: the others see a regular close.
void exits() {
  static shoal::Group group = join();
  group.barrier().wait();
  if (group.rank() == 0) std::exit(0);
  text_of<shoal::GroupClosed>([&] { group.barrier().wait(); });
  std::exit(0);
}

void forks() {
  shoal::Group group = join();
  group.barrier().wait();
  const pid_t child = fork();
  if (child == 0) {
    text_of<shoal::ForkedProcess>([&] { group.barrier(); });
    CHECK(group.state() == shoal::GroupState::forked);
    std::exit(5);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 5);
  group.barrier().wait();
}

// Beside a Python rank; tests/frontend/test_groups.py has its part.
void beside_python() {
  shoal::Group group = join();
  std::vector<float> x(100, 2);
  group.all_reduce(shoal::Array<float>(x)).wait();
  CHECK(x[0] == 5);
  auto chained = group.all_reduce(shoal::Array<float>(x)).then([group](auto done) {
    return group.all_reduce(done.wait()).wait()[0];
  });
  CHECK(chained.wait() == 20);
  auto half = group.split(0, -group.rank());
  std::vector<std::int64_t> y(3, half->rank());
  half->broadcast(shoal::Array<std::int64_t>(y), 0).wait();
  CHECK(y[0] == 0);
  CHECK(has(text_of<shoal::UsageError>([&] { group.split(1); }), "asked for different groups"));
  group.recv(shoal::Array<float>(x), shoal::any_source, 1).wait();
  CHECK(x[99] == 42);
  group.send(shoal::Array<float>(x), 1 - group.rank(), 2).wait();
}

void count_loop() {  // a rank that runs until it is killed
  shoal::Group group = join();
  std::printf("ready\n");
  std::fflush(stdout);
  for (;;) group.barrier().wait();
}

void fails_to_join() {
  try {
    join();
  } catch (const shoal::Error& error) {
    std::printf("%s\n", error.what());
    std::exit(3);
  }
}

// Time of an all_reduce of 8 bytes, in microseconds.
void latency() {
  shoal::Group group = join();
  auto x = filled<double>(group, 1, 1.0);
  for (int i = 0; i < 1000; ++i) group.all_reduce(x, shoal::max).wait();
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 20'000; ++i) group.all_reduce(x, shoal::max).wait();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  if (group.rank() == 0) std::printf("%.2f\n", took.count() / 20'000 * 1e6);
}

// Prints the digests of 0, 1, 127, 128, 129 and 1000 bytes.
void digests() {
  for (std::size_t count : {0, 1, 127, 128, 129, 1000}) {
    const std::string data(count, 'x');
    unsigned char digest[32];
    shoal_digest(data.data(), data.size(), digest);
    for (unsigned char byte : digest) std::printf("%02x", byte);
    std::printf("\n");
  }
}

// Ranks that connect and close again and again in one process.
void again() {
  const char* helper = std::getenv("SHOAL_HELPER_FD");
  for (int i = 0; i < 5; ++i) {
    shoal::Group group = shoal::init();
    group.barrier().wait();
    // Closing limits the time for the helper's answer; the next rendezvous may take longer.
    timeval limit{};
    socklen_t size = sizeof limit;
    if (helper != nullptr) CHECK(getsockopt(std::atoi(helper), SOL_SOCKET, SO_RCVTIMEO, &limit, &size) == 0);
    CHECK(limit.tv_sec == 0);
  }
}

void arguments() {
  shoal::InitOptions options;
  options.name = std::string(1 << 20, 'x');
  CHECK(has(text_of<shoal::OutOfResources>([&] { shoal::init(options); }), "shorten the arguments"));
  options.name.clear();
  options.timeout = shoal::Seconds(60.5);
  shoal::Group group = shoal::init(options);
  CHECK(group.name().empty() && group.timeout() == *options.timeout);
}

// The last handle of a group is a part of a tensor, which is released when its operation is complete.
void last_handle() {
  struct Owner {
    shoal::Group group;
    std::vector<float> elements;
  };
  const auto owner = std::make_shared<Owner>(Owner{join(), std::vector<float>(1'000'000)});
  auto tensor = shoal::Array<float>(owner->elements.data(), owner->elements.size(), owner);
  // The other rank waits, so that the operation is complete after the handles here are destroyed.
  if (shown_rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  owner->group.all_reduce(tensor);
}

// The last handle is released in the thread of a callback, while the process exits.
void exits_in_callback() {
  shoal::Group group = join();
  group.barrier().then([group](auto) { return 1; }).wait();
  // The other rank closes the group later.
  if (shown_rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
}

// A program that reaps all of its children, also the helper.
void reaps() {
  std::signal(SIGCHLD, [](int) {
    const int before = errno;
    while (waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    errno = before;
  });
  join().barrier().wait();
}

// Threads with a group each: chains of callbacks, dropped futures, promises, pauses of random lengths.
// argument: seconds.
void random_rounds() {
  shoal::Group world = join();
  const double seconds = argument.empty() ? 1 : std::stod(argument);
  std::vector<shoal::Group> groups;
  for (int i = 0; i < 3; ++i) groups.push_back(*world.split(0));
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < groups.size(); ++i)
    threads.emplace_back([group = groups[i], i, seconds] {
      std::mt19937 same(static_cast<unsigned>(i));  // equal on all ranks: which operations
      std::mt19937 own(static_cast<unsigned>(group.rank() * 100) + static_cast<unsigned>(i));
      const auto pause = [](std::mt19937& random) {
        if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      };
      const int size = group.size();
      const auto begin = std::chrono::steady_clock::now();
      for (int round = 0;; ++round) {
        std::vector<int> more(1, std::chrono::steady_clock::now() - begin < shoal::Seconds(seconds));
        group.all_reduce(shoal::Array(more), shoal::min).wait();
        if (more[0] == 0) break;
        auto x = filled<int>(group, 1 + same() % 2000, round);
        const unsigned seed = same();
        const auto operation = group.all_reduce(x);
        auto chain = operation.then([group, seed, pause](auto done) {
          std::mt19937 random(seed + static_cast<unsigned>(group.rank()));
          pause(random);
          return group.all_reduce(done.wait()).then([](auto again) { return again.wait()[0]; }).wait();
        });
        auto second = operation.then([](auto done) { return done.done() ? 1 : 0; });
        shoal::Promise<int> promise;
        auto sum = promise.future().then([chain](auto given) { return given.wait() + chain.wait(); });
        std::thread setter([promise, &own, pause] {
          pause(own);
          promise.set_value(1);
        });
        if (same() % 3 == 0) group.broadcast(filled<float>(group, 5000, 1.0F), 0);  // dropped
        const int expected = round * size * size;
        switch (same() % 3) {
          case 0:
            CHECK(chain.wait() == expected && sum.wait() == expected + 1);
            break;
          case 1:
            while (!sum.done()) std::this_thread::yield();
            CHECK(sum.value() == expected + 1);
            break;
          default:
            CHECK(sum.then([](auto done) { return done.wait(); }).wait() == expected + 1);
        }
        CHECK(second.wait() == 1);
        setter.join();
      }
    });
  for (std::thread& thread : threads) thread.join();
}

const std::map<std::string, std::function<void()>> tests = {
    {"collectives", collectives},
    {"messages", messages},
    {"futures", futures},
    {"split", split},
    {"errors", errors},
    {"timeout", timeout},
    {"abort", abort},
    {"exception", exception},
    {"killed", killed},
    {"traced", traced},
    {"ends_late", ends_late},
    {"exits", exits},
    {"forks", forks},
    {"beside_python", beside_python},
    {"count_loop", count_loop},
    {"fails_to_join", fails_to_join},
    {"latency", latency},
    {"digests", digests},
    {"again", again},
    {"random_rounds", random_rounds},
    {"arguments", arguments},
    {"last_handle", last_handle},
    {"exits_in_callback", exits_in_callback},
    {"reaps", reaps},
};

}  // namespace

int main(int count, char** words) {
  const auto test = tests.find(count > 1 ? words[1] : "");
  if (test == tests.end()) {
    std::fprintf(stderr, "groups: no test of this name\n");
    return 2;
  }
  if (count > 2) argument = words[2];
  test->second();
  return 0;
}
