#include "worker.h"

#include <bit>
#include <thread>

#include "durations.h"

using namespace std::chrono_literals;

namespace {

// How long the controller may wait for work before it answers that there is none. Leaving waits for that answer.
constexpr auto kLeaseWait = 2s;
// A controller that has none and does not wait is asked again after this.
constexpr auto kEmptyPause = 50ms;

}  // namespace

Worker::Worker(Session& session, std::uint32_t in_flight)
    : session_(session),
      in_flight_(in_flight),
      reporter_(session, [this](const pb::LeasesCancelled& cancelled) { Drop(cancelled); }) {}

void Worker::Run() {
  while (const auto room = WaitForRoom()) Lease(room);
  std::vector<Report> unfinished;
  std::string reason;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return stopping_ || held_.empty(); });
    for (const auto& [lease, group] : held_) Become(group, pb::OUTCOME_RETURNED, unfinished);
    reason = stopping_ ? "told to stop" : "no more work";
  }
  reporter_.Add(std::move(unfinished));
  if (!reporter_.End(reason, kEndTime)) throw Exit(kFailed, "the end was not acknowledged within 10 s");
}

void Worker::Stop() {
  const std::lock_guard lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
}

// Returns how many groups may be leased; 0: no more are to be.
std::uint32_t Worker::WaitForRoom() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return stopping_ || no_more_ || held_.size() < in_flight_; });
  return stopping_ || no_more_ ? 0 : in_flight_ - static_cast<std::uint32_t>(held_.size());
}

void Worker::Lease(std::uint32_t room) {
  pb::LeasePromptsRequest request;
  request.set_number(++requests_);
  request.set_max_groups(room);
  *request.mutable_wait() = ToProto(kLeaseWait);
  const auto asked = Session::Clock::now();
  const auto response = session_.Call(&pb::ControllerService::Stub::LeasePrompts, request, kLeaseWait);
  weights_version_ = std::max(weights_version_, response.weights().version());
  no_more_ = response.no_more();
  std::vector<Report> reports;
  for (const auto& group : response.groups()) Generate(group, reports);
  reporter_.Add(std::move(reports));
  // A controller that does not wait is not asked in a circle.
  if (response.groups().empty() && !no_more_ && Session::Clock::now() - asked < kEmptyPause) {
    std::this_thread::sleep_for(kEmptyPause);
  }
}

void Worker::Generate(const pb::LeasedGroup& group, std::vector<Report>& reports) {
  const auto& source = group.source();
  if (source == "hold") {
    const std::lock_guard lock(mutex_);
    held_.emplace(group.lease(), group);
  } else if (source == "fail") {
    Become(group, pb::OUTCOME_FAILED, reports);
  } else if (source == "discard") {
    Become(group, pb::OUTCOME_DISCARDED, reports);
  } else if (source == "return" && returned_.insert(group.prompt_key()).second) {
    Become(group, pb::OUTCOME_RETURNED, reports);
  } else {
    Become(group, pb::OUTCOME_COMPLETED, reports);
  }
}

void Worker::Become(const pb::LeasedGroup& group, pb::Outcome outcome, std::vector<Report>& reports) const {
  const bool needs_reason = outcome == pb::OUTCOME_FAILED || outcome == pb::OUTCOME_DISCARDED;
  for (int word = 0; word < group.masks_size(); ++word) {
    // Bit b of word w is completion 64 × w + b.
    for (auto left = group.masks(word); left != 0; left &= left - 1) {
      const auto index = static_cast<std::uint32_t>(64 * word + std::countr_zero(left));
      reports.push_back({.group = group.group(),
                         .lease = group.lease(),
                         .index = index,
                         .outcome = outcome,
                         .reason = needs_reason ? "told_to" : "",
                         .payload = group.payload() + "#" + std::to_string(index),
                         .reward = static_cast<double>(index),
                         .weights_version = weights_version_});
    }
  }
}

// The controller does not want these any more: nothing is reported for them.
void Worker::Drop(const pb::LeasesCancelled& cancelled) {
  const std::lock_guard lock(mutex_);
  for (const auto lease : cancelled.leases()) held_.erase(lease);
  changed_.notify_all();
}
