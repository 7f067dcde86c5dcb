/**
 * What a failed call means. Every error of the controller carries one google.rpc.ErrorInfo of its own domain; a status without
 * one comes from the gRPC library or from something on the way.
 */
import { status, type ServiceError } from "@grpc/grpc-js";
import { ErrorInfo, RetryInfo } from "../generated/google/rpc/error_details.js";
import { Status } from "../generated/google/rpc/status.js";
import { toMilliseconds } from "./durations.js";

const DOMAIN = "cosmos_ctrl.v1";

export const ExitCode = { Done: 0, Configuration: 2, Stale: 10, Failed: 11 } as const;

/** Ends the process. */
export class Exit extends Error {
  constructor(
    readonly code: number,
    message: string,
  ) {
    super(message);
  }
}

/** A failed call, by what is to be done about it. */
export type Fault = { text: string } & (
  | { kind: "unreachable" } // nobody answered: send the same again
  | { kind: "later"; delayMs: number } // the controller asks for patience: wait, then send the same again
  | { kind: "register" } // the session is unknown or has lapsed: register, then send the same again
  | { kind: "final"; code: number; resendFrom?: bigint } // end the process, unless there are batches from that number on
);

/**
 * Whether nobody answered. CANCELLED is what a server that goes down makes of its calls; of a connection that was closed under
 * a call, and of a stream that was reset, the library makes INTERNAL, which only its text tells from one that was sent.
 */
function isLost({ code, details }: ServiceError): boolean {
  const lost = [status.UNAVAILABLE, status.DEADLINE_EXCEEDED, status.CANCELLED];
  return lost.includes(code) || (code === status.INTERNAL && details.includes("RST_STREAM"));
}

export function faultOf(error: ServiceError): Fault {
  const { info, delayMs } = detailsOf(error);
  const text = `${status[error.code]}${info ? ` (${info.reason})` : ""}: ${error.details}`;
  if (!info) {
    return isLost(error) ? { kind: "unreachable", text } : { kind: "final", code: ExitCode.Failed, text };
  }
  switch (info.reason) {
    case "STALE_EXECUTION":
    case "SUPERSEDED":
      return { kind: "final", code: ExitCode.Stale, text };
    case "EXECUTION_ENDED":
      return { kind: "final", code: info.metadata["end_reason"] === "FAILURE" ? ExitCode.Failed : ExitCode.Done, text };
    case "NOT_REGISTERED":
      return { kind: "register", text };
    case "SEQUENCE_GAP":
      return { kind: "final", code: ExitCode.Failed, resendFrom: BigInt(info.metadata["expected"] ?? 0), text };
  }
  // Not by reason: a newer controller may have reasons that are not known here.
  return delayMs === undefined ? { kind: "final", code: ExitCode.Failed, text } : { kind: "later", delayMs, text };
}

function detailsOf(error: ServiceError): { info: ErrorInfo | undefined; delayMs: number | undefined } {
  let info: ErrorInfo | undefined;
  let delayMs: number | undefined;
  const [packed] = error.metadata.get("grpc-status-details-bin");
  for (const { typeUrl, value } of packed instanceof Buffer ? Status.decode(packed).details : []) {
    if (typeUrl.endsWith("/google.rpc.ErrorInfo")) {
      const found = ErrorInfo.decode(value);
      if (found.domain === DOMAIN) info = found;
    } else if (typeUrl.endsWith("/google.rpc.RetryInfo")) {
      delayMs = toMilliseconds(RetryInfo.decode(value).retryDelay);
    }
  }
  return { info, delayMs };
}
