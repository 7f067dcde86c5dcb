#include "reporter.h"

#include <algorithm>
#include <iterator>
#include <thread>

namespace {

// Upper bounds of what a message holds beside the payloads, in bytes.
constexpr std::size_t kMessageOverhead = 1024;
constexpr std::size_t kReportOverhead = 128;

// Before batches that were missing are sent again.
constexpr auto kGapPause = std::chrono::milliseconds(50);

// Packed columns: a block per outcome and reason, a row per group and word. Reports of a row come in order of their
// index.
void Pack(const Report& report, pb::ReportBatch& batch) {
  const bool is_completed = report.outcome == pb::OUTCOME_COMPLETED;
  auto& blocks = *batch.mutable_rollouts();
  if (blocks.empty() || blocks.rbegin()->outcome() != report.outcome || blocks.rbegin()->reason() != report.reason) {
    auto& block = *blocks.Add();
    block.set_outcome(report.outcome);
    block.set_reason(report.reason);
    if (is_completed) block.set_payload_codec("bytes");
  }
  auto& block = *blocks.rbegin();
  const std::uint32_t word = report.index / 64;
  const int last = block.masks_size() - 1;
  if (last < 0 || block.leases(last) != report.lease || block.words(last) != word) {
    block.add_groups(report.group);
    block.add_leases(report.lease);
    block.add_words(word);
    block.add_masks(0);
    if (is_completed) {
      block.add_lowest_versions(report.weights_version);
      block.add_highest_versions(report.weights_version);
    }
  }
  *block.mutable_masks()->rbegin() |= std::uint64_t{1} << (report.index % 64);
  if (is_completed) {
    block.add_rewards(report.reward);
    block.add_payloads(report.payload);
  }
}

}  // namespace

Reporter::Reporter(Session& session, OnCancelled on_cancelled)
    : session_(session), on_cancelled_(std::move(on_cancelled)) {
  session_.OnRegistered([this](std::uint64_t applied) { OnRegistered(applied); });
}

void Reporter::Add(std::vector<Report> reports) {
  std::unique_lock lock(mutex_);
  std::move(reports.begin(), reports.end(), std::back_inserter(waiting_));
  FormBatches();
  changed_.wait(lock, [this] { return waiting_.empty(); });
}

bool Reporter::End(const std::string& reason, std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  end_reason_ = reason;
  FormBatches();
  return changed_.wait_for(lock, timeout, [this] { return IsOver(); });
}

void Reporter::Run() {
  while (const auto request = NextRequest()) {
    try {
      Handle(session_.Call(&pb::ControllerService::Stub::SubmitReports, *request).ack());
    } catch (const SequenceGap& gap) {
      Rewind(gap);
      std::this_thread::sleep_for(kGapPause);
    }
  }
}

std::optional<pb::SubmitReportsRequest> Reporter::NextRequest() {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, heartbeat_at_, [this] { return sent_ < batches_.size() || has_news_ || IsOver(); });
  if (IsOver()) return std::nullopt;
  pb::SubmitReportsRequest request;
  request.set_acked_through(applied_);
  request.set_notices_through(notices_);
  if (sent_ < batches_.size()) *request.mutable_batch() = batches_[sent_++];
  has_news_ = false;
  heartbeat_at_ = Session::Clock::now() + session_.lease_time() / 4;
  return request;
}

void Reporter::Rewind(const SequenceGap& gap) {
  const std::lock_guard lock(mutex_);
  if (gap.expected <= applied_ || gap.expected > formed_) throw gap;
  sent_ = 0;
}

void Reporter::Handle(const pb::ReportAck& ack) {
  std::vector<pb::LeasesCancelled> cancelled;
  {
    const std::lock_guard lock(mutex_);
    Forget(ack.applied());
    for (const auto& notice : ack.notices()) {
      if (notice.number() <= notices_) continue;
      notices_ = notice.number();
      has_news_ = true;  // confirmed at once: the controller sends further notices only then
      // A refused row is done with, payloads are not kept here, and a kind that is not known is confirmed like the
      // others.
      if (notice.has_cancelled()) cancelled.push_back(notice.cancelled());
    }
  }
  for (const auto& leases : cancelled) on_cancelled_(leases);
}

void Reporter::OnRegistered(std::uint64_t applied) {
  const std::lock_guard lock(mutex_);
  Forget(applied);
  sent_ = 0;
}

void Reporter::Forget(std::uint64_t applied) {
  if (applied > formed_) {
    throw Exit(kFailed,
               "batch " + std::to_string(applied) + " is acknowledged, only " + std::to_string(formed_) + " were made");
  }
  while (!batches_.empty() && batches_.front().number() <= applied) {
    batches_.pop_front();
    if (sent_ > 0) --sent_;
  }
  applied_ = std::max(applied_, applied);
  FormBatches();
}

void Reporter::FormBatches() {
  const auto limits = session_.limits();
  while ((!waiting_.empty() || (end_reason_ && !end_formed_)) &&
         batches_.size() < limits.max_unacknowledged_batches()) {
    batches_.push_back(Form(limits));
  }
  changed_.notify_all();
}

pb::ReportBatch Reporter::Form(const pb::Limits& limits) {
  pb::ReportBatch batch;
  batch.set_number(++formed_);
  std::uint32_t count = 0;
  for (std::size_t bytes = kMessageOverhead; !waiting_.empty(); ++count) {
    const auto& report = waiting_.front();
    bytes += report.payload.size() + report.reason.size() + kReportOverhead;
    if (count > 0 && (count >= limits.max_batch_completions() || bytes > limits.max_message_bytes())) break;
    Pack(report, batch);
    waiting_.pop_front();
  }
  if (end_reason_ && waiting_.empty()) {
    batch.mutable_end()->set_reason(*end_reason_);
    end_formed_ = true;
  }
  return batch;
}
