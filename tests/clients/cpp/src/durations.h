#pragma once

#include <google/protobuf/duration.pb.h>

#include <chrono>

// Zero where it is absent.
inline std::chrono::nanoseconds FromProto(const google::protobuf::Duration& duration) {
  return std::chrono::seconds(duration.seconds()) + std::chrono::nanoseconds(duration.nanos());
}

inline google::protobuf::Duration ToProto(std::chrono::nanoseconds duration) {
  google::protobuf::Duration proto;
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(duration);
  proto.set_seconds(seconds.count());
  proto.set_nanos(static_cast<std::int32_t>((duration - seconds).count()));
  return proto;
}
