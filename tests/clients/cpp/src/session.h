// The place of this process in the run: who it is, over which channel it speaks, and what it does when a call fails.
//
// - The execution ID is pinned by what the process was given, else by its first registration, and never changes.
// - One incarnation for the life of the process; sessions come and go under it.
// - A failed call is sent again as it was, unless the failure is final.
// - Any thread may call; calls that find the session lapsed share one registration.
// - The first final failure is that of every later call, too: nothing is sent any more.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "cosmos_ctrl/v1/controller_service.grpc.pb.h"
#include "faults.h"

namespace pb = cosmos_ctrl::v1;

struct Place {
  std::string address;
  std::string execution_id;  // empty where the launcher gave none
  std::string group;
  std::uint32_t replica;
};

class Session {
 public:
  using Clock = std::chrono::steady_clock;
  template <class Request, class Response>
  using Method = grpc::Status (pb::ControllerService::Stub::*)(grpc::ClientContext*, const Request&, Response*);

  explicit Session(Place place);

  // Opens the first session.
  void Register();

  // Called after every registration with the highest batch number that the controller has applied. Set before the
  // first.
  void OnRegistered(std::function<void(std::uint64_t applied)> callback) { on_registered_ = std::move(callback); }

  pb::Limits limits() const;
  std::chrono::nanoseconds lease_time() const;

  // Sends `request` until it is answered, each time under the session of the moment. `wait` is how long the controller
  // may wait before it answers.
  template <class Request, class Response>
  Response Call(Method<Request, Response> method, Request request, std::chrono::nanoseconds wait = {}) {
    for (int attempt = 0;; ++attempt) {
      *request.mutable_worker() = Identity();
      Response response;
      const auto status = Once(method, request, wait, &response);
      if (status.ok()) {
        Heard(response.header());
        return response;
      }
      Recover(FaultOf(status), request.worker().session_id(), attempt);
    }
  }

 private:
  template <class Request, class Response>
  grpc::Status Once(Method<Request, Response> method, const Request& request, std::chrono::nanoseconds wait,
                    Response* response) {
    CheckOpen();
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::duration_cast<std::chrono::milliseconds>(wait + kCallTime));
    return (stub_.get()->*method)(&context, request, response);
  }

  pb::WorkerIdentity Identity() const;
  void CheckOpen() const;

  // With the mutex held.
  [[noreturn]] void Close(ExitCode code, const std::string& why);

  // An answer came. Throws if another controller sent it.
  void Heard(const pb::ResponseHeader& header);

  // Returns when the call that failed may be sent again, `attempt` counting from 0; throws if never.
  void Recover(const Fault& fault, const std::string& session_id, int attempt);

  // How long an answer may take, beside the time that the controller was asked to wait.
  static constexpr std::chrono::seconds kCallTime{10};

  const Place place_;
  const std::string incarnation_;
  const std::unique_ptr<pb::ControllerService::Stub> stub_;
  std::function<void(std::uint64_t)> on_registered_;
  std::mutex registering_;

  mutable std::mutex mutex_;  // guards what follows
  std::string execution_id_;
  std::string session_id_;
  pb::Limits limits_;
  std::chrono::nanoseconds lease_time_{0};
  std::optional<Clock::time_point> silent_since_;
  std::optional<Exit> closed_;
};
