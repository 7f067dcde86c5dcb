// What a failed call means. Every error of the controller carries one google.rpc.ErrorInfo of its own domain; a status
// without one comes from the gRPC library or from something on the way.
#pragma once

#include <grpcpp/support/status.h>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>

enum ExitCode { kDone = 0, kConfiguration = 2, kStale = 10, kFailed = 11 };

// Ends the process.
class Exit : public std::runtime_error {
 public:
  Exit(ExitCode code, const std::string& why) : std::runtime_error(why), code(code) {}
  const ExitCode code;
};

// The number of a message is not the one that was due. Final, unless batches are kept from `expected` on.
class SequenceGap : public Exit {
 public:
  SequenceGap(std::uint64_t expected, const std::string& why) : Exit(kFailed, why), expected(expected) {}
  const std::uint64_t expected;
};

// A failed call, by what is to be done about it.
struct Fault {
  enum class Kind {
    kUnreachable,  // nobody answered: send the same again
    kLater,        // the controller asks for patience: wait, then send the same again
    kRegister,     // the session is unknown or has lapsed: register, then send the same again
    kGap,          // a number was left out: SequenceGap
    kFinal,        // end the process
  };
  Kind kind;
  std::string text;
  std::chrono::nanoseconds delay{0};  // kLater
  std::uint64_t expected = 0;         // kGap
  ExitCode code = kFailed;            // kFinal
};

Fault FaultOf(const grpc::Status& status);
