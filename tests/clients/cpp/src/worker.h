// Leases groups and works on them: the part that a real worker replaces by its engine.
//
// What is done with a group is decided by its `source`, so that a test can ask for every outcome; the answer to a
// prompt is the prompt itself and the number of the completion.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "reporter.h"
#include "session.h"

// How long the acknowledgement of the end may take.
constexpr std::chrono::seconds kEndTime{10};

class Worker {
 public:
  Worker(Session& session, std::uint32_t in_flight);

  // Works until there is nothing more to do; throws if that cannot be. Once the session is open.
  void Run();

  // Hands back what is unfinished and ends. From any thread.
  void Stop();

  Reporter& reporter() { return reporter_; }

 private:
  std::uint32_t WaitForRoom();
  void Lease(std::uint32_t room);
  void Generate(const pb::LeasedGroup& group, std::vector<Report>& reports);
  void Become(const pb::LeasedGroup& group, pb::Outcome outcome, std::vector<Report>& reports) const;
  void Drop(const pb::LeasesCancelled& cancelled);

  Session& session_;
  const std::uint32_t in_flight_;
  Reporter reporter_;
  std::set<std::string> returned_;  // prompts that were handed back once
  std::uint64_t weights_version_ = 0;
  std::uint64_t requests_ = 0;
  bool no_more_ = false;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::map<std::uint64_t, pb::LeasedGroup> held_;  // by lease: kept unfinished
  bool stopping_ = false;
};
