#include "frontend/membership.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "collectives/calls.h"
#include "common/bytes.h"
#include "common/descriptors.h"
#include "frontend/failure.h"
#include "frontend/inherited.h"

extern char** environ;

namespace shoal::frontend_core {
namespace {

enum Kind : std::uint32_t {
  kStart = 1,
  kMemory = 2,
  kRelease = 3,
  kAbandon = 4,
  kMember = 11,
  kPeer = 12,
  kConnected = 13,
  kReleased = 14,
  kFailed = 15,
};

// The module is started without the working directory on its path: a file there could hide one of Python's.
constexpr const char* kProgram =
    "import sys; '' in sys.path and sys.path.remove(''); "
    "from shoal.backend.native.helper import main; main()";

constexpr std::size_t kMaxDescriptors = 2;
std::atomic<bool> inherited_is_used{false};  // a membership uses the helper that the launcher started
constexpr int kEndMilliseconds = 5000;       // for the helper to end after its socket was closed
constexpr double kReleaseMargin = 5.0;  // seconds for the helper to answer beyond the time that it may take

// Waits for the end of a child; without a process id if the program has reaped it.
siginfo_t reap(int pidfd) {
  constexpr auto kPidfd = static_cast<idtype_t>(3);  // P_PIDFD, which older headers lack
  siginfo_t status{};
  while (::waitid(kPidfd, static_cast<id_t>(pidfd), &status, WEXITED) < 0 && errno == EINTR) {
  }
  return status;
}

}  // namespace

// A received message, and a reader of its fields.
struct Membership::Packet {
  std::uint32_t kind = 0;
  std::string bytes;
  std::vector<int> descriptors;
  std::size_t at = sizeof kind;

  Packet() = default;
  Packet(Packet&& other) noexcept
      : kind(other.kind),
        bytes(std::move(other.bytes)),
        descriptors(std::exchange(other.descriptors, {})),
        at(other.at) {}
  ~Packet() {
    for (int fd : descriptors) ::close(fd);
  }

  template <class Number>
  Number number() {
    Number value;
    if (bytes.size() - at < sizeof value)
      throw Failure{"WireError", "the helper process sent a short message"};
    std::memcpy(&value, bytes.data() + at, sizeof value);
    at += sizeof value;
    return value;
  }
  std::string rest() { return bytes.substr(std::exchange(at, bytes.size())); }
  int take(std::size_t index) { return std::exchange(descriptors.at(index), -1); }
};

Connection::Connection(Connection&& other) noexcept
    : rank(other.rank),
      pid(other.pid),
      capacity(other.capacity),
      out(other.out),
      in(other.in),
      socket(std::exchange(other.socket, -1)),
      memory(std::exchange(other.memory, -1)) {}

Connection::~Connection() { close_all({&socket, &memory}); }

Membership::Membership(const Options& options) {
  std::string python, fields;
  for (const auto& [name, value] : options) {
    if (name == "python") {
      if (::access(value.c_str(), X_OK) == 0) python = value;
      continue;
    }
    fields += name + '\0' + value + '\0';
  }
  const char* chosen = std::getenv("SHOAL_PYTHON");
  if (!use_inherited_helper())
    start(chosen != nullptr && *chosen != '\0' ? chosen : python.empty() ? "python3" : python);
  try {
    send(kStart, fields);
    Packet answer = expect(kMember);
    Member& own = member_;
    Context::Options& context = own.context;
    for (int* field : {&context.rank, &context.size, &own.local_rank, &context.local_size, &own.lanes,
                       &own.algorithm, &context.progress_threads})
      *field = answer.number<std::int32_t>();
    context.patient = answer.number<std::uint8_t>() != 0;
    own.agreements.losses_are_deaths = answer.number<std::uint8_t>() != 0;
    own.timeout = answer.number<double>();
    context.heartbeat = nanoseconds(answer.number<double>());
    own.agreements.vote_timeout = nanoseconds(answer.number<double>());
    context.capacity = answer.number<std::uint64_t>();
    context.limit = answer.number<std::uint64_t>();
    own.ident = answer.number<std::uint64_t>();
    const std::string texts = answer.rest();
    own.name = texts.substr(0, texts.find('\0'));
    context.job = texts.substr(std::min(texts.size(), own.name.size() + 1));
  } catch (...) {
    end();
    throw;
  }
}

Membership::~Membership() {
  end();
  close_all({&trace_});
}

bool Membership::use_inherited_helper() {
  const int fd = inherited_socket("SHOAL_HELPER_FD");
  if (fd < 0 || inherited_is_used.exchange(true)) return false;
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  const timeval unlimited{};  // release() of an earlier membership has set a limit
  ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &unlimited, sizeof unlimited);
  socket_ = fd;
  inherited_ = true;
  python_ = "of shoal run --connect";
  return true;
}

void Membership::start(const std::string& python) {
  python_ = python;
  int pair[2];
  checked(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), "socketpair");
  socket_ = pair[0];
  const std::string number = std::to_string(pair[1]);
  const std::vector<const char*> argv = {python.c_str(), "-c", kProgram, number.c_str(), nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, pair[1], pair[1]);  // clears close-on-exec in the child
  pid_t pid = -1;
  const int error =
      ::posix_spawnp(&pid, python.c_str(), &actions, nullptr, const_cast<char* const*>(argv.data()), environ);
  posix_spawn_file_actions_destroy(&actions);
  ::close(pair[1]);
  if (error == 0) {
    try {
      process_ = open_pidfd(pid);  // the id may be reused if the program waits for all of its children
    } catch (...) {
      close_all({&socket_});
      ::waitpid(pid, nullptr, 0);
      throw;
    }
    return;
  }
  close_all({&socket_});
  throw Failure{"ConfigurationError", "cannot start '" + python +
                                          "' for the rendezvous: " + std::strerror(error) +
                                          "; set SHOAL_PYTHON to a Python in which shoal is installed"};
}

void Membership::send(std::uint32_t kind, const std::string& fields, const std::vector<int>& descriptors) {
  std::string bytes;
  put(bytes, kind);
  bytes += fields;
  iovec part{bytes.data(), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
  }
  ssize_t sent;
  do {
    sent = ::sendmsg(socket_, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent >= 0) return;
  if (errno == EMSGSIZE)
    throw Failure{"OutOfResources",
                  "a message of " + std::to_string(bytes.size()) +
                      " bytes to the helper process exceeds the buffer of a socket: shorten "
                      "the arguments of shoal::init, or raise net.core.wmem_default"};
  if (errno != EPIPE && errno != ECONNRESET) checked(-1, "sendmsg");
  expect(kFailed);  // the helper ended, perhaps after it reported a failure
}

// The next message; throws if it reports a failure.
Membership::Packet Membership::receive() {
  ssize_t length;
  do {
    length = ::recv(socket_, nullptr, 0, MSG_PEEK | MSG_TRUNC);
  } while (length < 0 && errno == EINTR);
  Packet packet;
  if (length < static_cast<ssize_t>(sizeof packet.kind)) fail_without_helper();
  packet.bytes.resize(length);
  iovec part{packet.bytes.data(), packet.bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  do {
    length = ::recvmsg(socket_, &message, MSG_CMSG_CLOEXEC);
  } while (length < 0 && errno == EINTR);
  if (length != static_cast<ssize_t>(packet.bytes.size())) fail_without_helper();
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const auto* fds = reinterpret_cast<const int*>(CMSG_DATA(header));
    packet.descriptors.assign(fds, fds + (header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0) checked((errno = EMFILE, -1), "recvmsg");
  std::memcpy(&packet.kind, packet.bytes.data(), sizeof packet.kind);
  if (packet.kind == kFailed) {
    Failure failure;
    for (std::uint32_t left = packet.number<std::uint32_t>(); left > 0; --left)
      failure.ranks.push_back(packet.number<std::int32_t>());
    const std::string text = packet.rest();
    const std::size_t end = text.find('\0');
    failure.name = text.substr(0, end);
    failure.message = end == std::string::npos ? std::string() : text.substr(end + 1);
    throw failure;
  }
  return packet;
}

Membership::Packet Membership::expect(std::uint32_t kind) {
  Packet packet = receive();
  if (packet.kind == kind) return packet;
  throw Failure{"WireError", "the helper process sent a message of kind " + std::to_string(packet.kind) +
                                 ", expected " + std::to_string(kind)};
}

std::vector<int> Membership::connect(int memory, std::uint64_t capacity,
                                     const std::vector<std::uint64_t>& rings,
                                     const std::function<void(Connection&)>& add) {
  int pidfd = open_pidfd(::getpid());
  if (pidfd < 0)
    throw Failure{"OutOfResources",
                  "the system has no pidfd_open, which came with Linux 5.3: other ranks could "
                  "not observe this process"};
  std::string fields;
  put(fields, capacity);
  for (const std::uint64_t ring : rings) put(fields, ring);
  try {
    send(kMemory, fields, {memory, pidfd});
  } catch (...) {
    close_all({&pidfd});
    throw;
  }
  close_all({&pidfd});
  for (;;) {
    Packet packet = receive();
    if (packet.kind == kConnected) {
      std::vector<int> hosts;
      for (int rank = 0; rank < member_.context.size; ++rank) hosts.push_back(packet.number<std::int32_t>());
      if (!packet.descriptors.empty()) trace_ = packet.take(0);
      return hosts;
    }
    if (packet.kind != kPeer) throw Failure{"WireError", "the helper process sent no connection"};
    Connection peer;
    peer.rank = packet.number<std::int32_t>();
    peer.pid = packet.number<std::int32_t>();
    for (std::uint64_t* field : {&peer.capacity, &peer.out, &peer.in})
      *field = packet.number<std::uint64_t>();
    if (packet.descriptors.empty() || packet.descriptors.size() > kMaxDescriptors)
      throw Failure{"WireError", "the helper process sent a connection without a socket"};
    peer.socket = packet.take(0);
    if (packet.descriptors.size() > 1) peer.memory = packet.take(1);
    packet.descriptors.clear();
    add(peer);
  }
}

void Membership::abandon(const std::string& why) {
  if (socket_ < 0) return;
  try {
    send(kAbandon, why);
    while (receive().kind != kReleased) {  // connections that it had sent before
    }
  } catch (const Failure&) {  // it has ended, or reported an error to the other ranks itself
  }
  end();
}

void Membership::release(double timeout) {
  if (socket_ < 0) return;
  const timeval limit{static_cast<time_t>(std::min(timeout, 1e6) + kReleaseMargin), 0};
  ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  try {
    std::string fields;
    put(fields, timeout);
    send(kRelease, fields);
    expect(kReleased);
  } catch (const Failure&) {  // the store has ended with its host: there is nobody left to notify
  }
  end();
}

int Membership::take_trace() { return std::exchange(trace_, -1); }

void Membership::disown() { close_all({&socket_, &process_}); }

// Ends the helper by closing its socket, and reaps it.  The helper of the launcher waits for the next start.
void Membership::end() {
  if (inherited_ && socket_ >= 0) {
    socket_ = -1;
    inherited_is_used = false;
    return;
  }
  close_all({&socket_});
  if (process_ < 0) return;
  pollfd ended{process_, POLLIN, 0};
  if (::poll(&ended, 1, kEndMilliseconds) != 1)  // it is stopped
    ::syscall(SYS_pidfd_send_signal, process_, SIGKILL, nullptr, 0);
  reap(process_);
  close_all({&process_});
}

// The helper has ended before its time.
void Membership::fail_without_helper() {
  close_all({&socket_});
  const siginfo_t status = process_ < 0 ? siginfo_t{} : reap(process_);
  close_all({&process_});
  const std::string helper = "the helper process for the rendezvous ('" + python_ + "') ";
  if (status.si_pid == 0) throw Failure{"RendezvousError", helper + "has ended"};
  if (status.si_code != CLD_EXITED)
    throw Failure{"RendezvousError", helper + "was killed by signal " + std::to_string(status.si_status)};
  throw Failure{"RendezvousError",
                helper + "ended with exit code " + std::to_string(status.si_status) +
                    "; is shoal installed in that Python?  Set SHOAL_PYTHON to one in which it is"};
}

}  // namespace shoal::frontend_core
