// Reports, as numbered batches, one call for each.
//
// - Batches are numbered from 1 without gaps. One that was formed never changes, and is kept until it is acknowledged.
// - What is not acknowledged is sent again in a new session; the controller applies a number once.
// - A call is made at least every quarter of the session's lease time, with a batch or as a heartbeat.
// - A notice is handled once, in order, however often it comes.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cosmos_ctrl/v1/reports.pb.h"
#include "session.h"

// What became of one completion.
struct Report {
  std::uint64_t group;
  std::uint64_t lease;
  std::uint32_t index;
  pb::Outcome outcome;
  std::string reason;  // DISCARDED and FAILED
  std::string payload;
  double reward;
  std::uint64_t weights_version;
};

class Reporter {
 public:
  using OnCancelled = std::function<void(const pb::LeasesCancelled&)>;

  Reporter(Session& session, OnCancelled on_cancelled);

  // Adds to what is to be sent; waits while that is as much as may be unacknowledged.
  void Add(std::vector<Report> reports);

  // Reports the end of this worker, last of all; false: not everything was acknowledged in time.
  bool End(const std::string& reason, std::chrono::nanoseconds timeout);

  // Sends until the end is acknowledged; throws what is final.
  void Run();

 private:
  std::optional<pb::SubmitReportsRequest> NextRequest();
  // Sends all that is kept again; throws if that does not begin with the batch that is due, or before it.
  void Rewind(const SequenceGap& gap);
  void Handle(const pb::ReportAck& ack);
  void OnRegistered(std::uint64_t applied);

  // With the mutex held.
  void Forget(std::uint64_t applied);
  void FormBatches();
  pb::ReportBatch Form(const pb::Limits& limits);
  bool IsOver() const { return end_formed_ && batches_.empty(); }

  Session& session_;
  const OnCancelled on_cancelled_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Report> waiting_;
  std::deque<pb::ReportBatch> batches_;
  std::size_t sent_ = 0;  // of `batches_`, in this session
  std::uint64_t formed_ = 0;
  std::uint64_t applied_ = 0;
  std::uint64_t notices_ = 0;
  bool has_news_ = false;  // notices that the controller does not know to be handled
  std::optional<std::string> end_reason_;
  bool end_formed_ = false;
  Session::Clock::time_point heartbeat_at_{};
};
