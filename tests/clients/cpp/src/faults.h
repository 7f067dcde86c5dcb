// What a failed call means. Every error of the controller carries one google.rpc.ErrorInfo of its own domain; a status
// without one comes from the gRPC library or from something on the way.
#pragma once

#include <grpcpp/support/status.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

enum ExitCode { kDone = 0, kConfiguration = 2, kStale = 10, kFailed = 11 };

// Ends the process.
class Exit : public std::runtime_error {
 public:
  Exit(ExitCode code, const std::string& why) : std::runtime_error(why), code(code) {}
  const ExitCode code;
};

// A failed call, by what is to be done about it.
struct Fault {
  enum class Kind {
    kUnreachable,  // nobody answered: send the same again
    kLater,        // the controller asks for patience: wait, then send the same again
    kRegister,     // the session is unknown or has lapsed: register, then send the same again
    kFinal,        // end the process, unless there are batches from `resend_from` on
  };
  Kind kind;
  std::string text;
  std::chrono::nanoseconds delay{0};          // kLater
  ExitCode code = kFailed;                    // kFinal
  std::optional<std::uint64_t> resend_from{};  // kFinal
};

Fault FaultOf(const grpc::Status& status);
