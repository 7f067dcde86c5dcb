import type { Duration } from "../generated/google/protobuf/duration.js";

/** Zero where it is absent. */
export function toMilliseconds(duration: Duration | undefined): number {
  return duration ? Number(duration.seconds) * 1000 + duration.nanos / 1e6 : 0;
}

export function fromMilliseconds(milliseconds: number): Duration {
  return { seconds: BigInt(Math.floor(milliseconds / 1000)), nanos: (milliseconds % 1000) * 1e6 };
}
