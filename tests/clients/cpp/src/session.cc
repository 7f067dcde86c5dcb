#include "session.h"

#include <unistd.h>

#include <algorithm>
#include <random>
#include <thread>

#include "durations.h"

using namespace std::chrono_literals;

namespace {

constexpr auto kFirstPause = 50ms;
constexpr auto kLongestPause = 2000ms;
// Nobody answered for so long: the controller is gone.
constexpr auto kSilence = 30s;

std::string RandomHex(int bytes) {
  std::random_device random;
  std::string hex;
  for (int digit = 0; digit < 2 * bytes; ++digit) hex += "0123456789abcdef"[random() % 16];
  return hex;
}

std::string HostName() {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  return name;
}

std::unique_ptr<pb::ControllerService::Stub> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  // What the controller sends is within its own limits, which may be above the library's default.
  arguments.SetMaxReceiveMessageSize(-1);
  // The library's own pause between connections grows to two minutes, in which every call fails at once.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, std::chrono::milliseconds(kFirstPause).count());
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, std::chrono::milliseconds(kLongestPause).count());
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, std::chrono::milliseconds(kLongestPause).count());
  return pb::ControllerService::NewStub(
      grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
}

std::chrono::nanoseconds PauseBefore(int attempt) {
  static thread_local std::minstd_rand random{std::random_device{}()};
  const std::chrono::duration<double> longest =
      std::min<std::chrono::milliseconds>(kLongestPause, kFirstPause * (1 << std::min(attempt, 10)));
  return std::chrono::duration_cast<std::chrono::nanoseconds>(longest *
                                                              std::uniform_real_distribution<double>(0.5, 1.0)(random));
}

}  // namespace

Session::Session(Place place)
    : place_(std::move(place)),
      incarnation_(RandomHex(16)),
      stub_(Connect(place_.address)),
      execution_id_(place_.execution_id) {}

pb::Limits Session::limits() const {
  const std::lock_guard lock(mutex_);
  return limits_;
}

std::chrono::nanoseconds Session::lease_time() const {
  const std::lock_guard lock(mutex_);
  return lease_time_;
}

pb::WorkerIdentity Session::Identity() const {
  const std::lock_guard lock(mutex_);
  pb::WorkerIdentity identity;
  identity.set_execution_id(execution_id_);
  identity.set_session_id(session_id_);
  return identity;
}

void Session::CheckOpen() const {
  const std::lock_guard lock(mutex_);
  if (closed_) throw *closed_;
}

void Session::Close(ExitCode code, const std::string& why) {
  if (!closed_) closed_.emplace(code, why);
  throw *closed_;
}

void Session::Heard(const pb::ResponseHeader& header) {
  const std::lock_guard lock(mutex_);
  silent_since_.reset();
  if (header.execution_id() != execution_id_) {
    throw Exit(kStale,
               "execution " + header.execution_id() + " answers; this process belongs to execution " + execution_id_);
  }
}

void Session::Recover(const Fault& fault, const std::string& session_id, int attempt) {
  if (fault.kind == Fault::Kind::kGap) throw SequenceGap(fault.expected, fault.text);
  {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    if (fault.kind == Fault::Kind::kFinal) {
      Close(fault.code, fault.text);
    } else if (fault.kind != Fault::Kind::kUnreachable) {
      silent_since_.reset();
    } else if (now - silent_since_.value_or(now) >= kSilence) {
      Close(kFailed, "no answer from " + place_.address + " for 30 s: " + fault.text);
    } else if (!silent_since_) {
      silent_since_ = now;
    }
  }
  if (fault.kind != Fault::Kind::kRegister) {
    std::this_thread::sleep_for(std::max(fault.delay, PauseBefore(attempt)));
    return;
  }
  if (attempt > 0) std::this_thread::sleep_for(PauseBefore(attempt));
  const std::lock_guard registering(registering_);
  // Another thread may have registered meanwhile: then there is a new session already.
  if (Identity().session_id() == session_id) Register();
}

void Session::Register() {
  pb::RegisterWorkerRequest request;
  request.set_execution_id(Identity().execution_id());
  request.set_role(pb::ROLE_ROLLOUT);
  request.set_group(place_.group);
  request.set_replica(place_.replica);
  request.set_world_size(1);
  request.set_incarnation(incarnation_);
  request.set_host(HostName());
  request.set_pid(static_cast<std::uint32_t>(getpid()));
  pb::RegisterWorkerResponse response;
  for (int attempt = 0;; ++attempt) {
    const auto status = Once(&pb::ControllerService::Stub::RegisterWorker, request, 0s, &response);
    if (status.ok()) break;
    auto fault = FaultOf(status);
    // A session is what is being asked for: one that lapsed on the way is a reason to ask again.
    if (fault.kind == Fault::Kind::kRegister) fault.kind = Fault::Kind::kLater;
    Recover(fault, "", attempt);
  }
  {
    const std::lock_guard lock(mutex_);
    // A controller without an execution takes any ID, and answers with none.
    const auto& found = response.header().execution_id();
    if (session_id_.empty() && (execution_id_.empty() || found.empty())) execution_id_ = found;
  }
  Heard(response.header());
  {
    const std::lock_guard lock(mutex_);
    session_id_ = response.session_id();
    limits_ = response.limits();
    lease_time_ = FromProto(response.lease_time());
  }
  on_registered_(response.applied());
}
