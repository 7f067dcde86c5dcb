package worker;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Status;
import io.grpc.protobuf.StatusProto;
import java.io.IOException;
import java.time.Duration;

/**
 * What a failed call means.
 *
 * @param kind what cures it
 * @param exit how the process ends if nothing does
 * @param delay for {@link Kind#LATER}: the shortest wait
 * @param expected for {@link Kind#GAP}: the next number
 */
record Fault(Kind kind, ExitException exit, Duration delay, long expected) {
    /** Domain of the controller's own ErrorInfo; a status without one is the library's. */
    private static final String DOMAIN = "cosmos_ctrl.v1";

    enum Kind {
        /** Nothing. */
        FINAL,
        /** No answer: the same is sent again. */
        UNREACHABLE,
        /** An answer with RetryInfo: after a wait the same is sent again. */
        LATER,
        /** The session is gone: after a registration the same is sent again. */
        LAPSED,
        /** Batches are missing: they are sent again from the one that is expected. */
        GAP,
    }

    static Fault of(Throwable failure) {
        if (failure instanceof ExitException exit) {
            return new Fault(Kind.FINAL, exit, Duration.ZERO, 0);
        }
        var status = Status.fromThrowable(failure);
        ErrorInfo info = null;
        Duration delay = null;
        for (Any detail : StatusProto.fromThrowable(failure).getDetailsList()) {
            try {
                if (detail.is(RetryInfo.class)) {
                    delay = javaDuration(detail.unpack(RetryInfo.class).getRetryDelay());
                } else if (detail.is(ErrorInfo.class) && detail.unpack(ErrorInfo.class).getDomain().equals(DOMAIN)) {
                    info = detail.unpack(ErrorInfo.class);
                }
            } catch (InvalidProtocolBufferException unreadable) {
                // As if it were not there.
            }
        }
        return info == null ? ofLibrary(status) : ofController(status, info, delay);
    }

    Fault as(Kind other) {
        return new Fault(other, exit, delay, expected);
    }

    static Duration javaDuration(com.google.protobuf.Duration duration) {
        return Duration.ofSeconds(duration.getSeconds(), duration.getNanos());
    }

    private static Fault ofLibrary(Status status) {
        var exit = ExitException.error(
                "%s without the controller's ErrorInfo: %s", status.getCode(), status.getDescription());
        var kind = switch (status.getCode()) {
            case UNAVAILABLE, DEADLINE_EXCEEDED, CANCELLED -> Kind.UNREACHABLE; // CANCELLED: the server is going down
            // What came over the wire has no cause; with one it is the library's name for a write that met a closed connection.
            case UNKNOWN -> status.getCause() instanceof IOException ? Kind.UNREACHABLE : Kind.FINAL;
            // A server that goes down closes its connections with that code; the library's text tells it from a status that was sent.
            case INTERNAL -> String.valueOf(status.getDescription()).contains("HTTP/2 error code:")
                    ? Kind.UNREACHABLE
                    : Kind.FINAL;
            default -> Kind.FINAL;
        };
        return new Fault(kind, exit, Duration.ZERO, 0);
    }

    private static Fault ofController(Status status, ErrorInfo info, Duration delay) {
        int code = switch (info.getReason()) {
            case "STALE_EXECUTION", "SUPERSEDED" -> ExitException.STALE;
            case "EXECUTION_ENDED" -> info.getMetadataOrDefault("end_reason", "").equals("FAILURE")
                    ? ExitException.ERROR : 0;
            default -> ExitException.ERROR;
        };
        long expected = info.getReason().equals("SEQUENCE_GAP") ? number(info.getMetadataOrDefault("expected", "")) : 0;
        var kind = switch (info.getReason()) {
            case "NOT_REGISTERED" -> Kind.LAPSED;
            case "SEQUENCE_GAP" -> expected > 0 ? Kind.GAP : Kind.FINAL;
            default -> delay != null ? Kind.LATER : Kind.FINAL; // also of a reason that this client does not know
        };
        var exit = new ExitException(code, info.getReason() + ": " + status.getDescription());
        return new Fault(kind, exit, delay == null ? Duration.ZERO : delay, expected);
    }

    private static long number(String text) {
        try {
            return Long.parseLong(text);
        } catch (NumberFormatException notOne) {
            return 0;
        }
    }
}
