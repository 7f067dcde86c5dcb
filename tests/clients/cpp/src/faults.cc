#include "faults.h"

#include <charconv>
#include <optional>

#include "durations.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace {

constexpr char kDomain[] = "cosmos_ctrl.v1";

struct Details {
  std::optional<google::rpc::ErrorInfo> info;
  std::optional<std::chrono::nanoseconds> delay;
};

Details DetailsOf(const grpc::Status& status) {
  Details details;
  google::rpc::Status rich;
  if (!rich.ParseFromString(status.error_details())) return details;
  for (const auto& packed : rich.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::RetryInfo retry;
    if (packed.UnpackTo(&info)) {
      if (info.domain() == kDomain) details.info = info;
    } else if (packed.UnpackTo(&retry)) {
      details.delay = FromProto(retry.retry_delay());
    }
  }
  return details;
}

std::string Metadata(const google::rpc::ErrorInfo& info, const std::string& key) {
  const auto found = info.metadata().find(key);
  return found == info.metadata().end() ? "" : found->second;
}

std::uint64_t Number(const std::string& text) {
  std::uint64_t number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

}  // namespace

Fault FaultOf(const grpc::Status& status) {
  using Kind = Fault::Kind;
  const auto [info, delay] = DetailsOf(status);
  const auto code = status.error_code();
  const std::string reason = info ? info->reason() : "";
  const std::string text =
      "status " + std::to_string(code) + (info ? " (" + reason + ")" : "") + ": " + status.error_message();
  if (!info) {
    // CANCELLED is what a server that goes down makes of its calls; of a stream that was reset the library makes
    // INTERNAL, which only its text tells from one that was sent.
    const bool is_reset = code == grpc::INTERNAL && status.error_message().find("RST_STREAM") != std::string::npos;
    const bool is_lost =
        code == grpc::UNAVAILABLE || code == grpc::DEADLINE_EXCEEDED || code == grpc::CANCELLED || is_reset;
    return {.kind = is_lost ? Kind::kUnreachable : Kind::kFinal, .text = text};
  }
  if (reason == "STALE_EXECUTION" || reason == "SUPERSEDED")
    return {.kind = Kind::kFinal, .text = text, .code = kStale};
  if (reason == "EXECUTION_ENDED") {
    const bool failed = Metadata(*info, "end_reason") == "FAILURE";
    return {.kind = Kind::kFinal, .text = text, .code = failed ? kFailed : kDone};
  }
  if (reason == "NOT_REGISTERED") return {.kind = Kind::kRegister, .text = text};
  if (reason == "SEQUENCE_GAP") {
    return {.kind = Kind::kGap, .text = text, .expected = Number(Metadata(*info, "expected"))};
  }
  // Not by reason: a newer controller may have reasons that are not known here.
  if (delay) return {.kind = Kind::kLater, .text = text, .delay = *delay};
  return {.kind = Kind::kFinal, .text = text};
}
