package worker;

import cosmos_ctrl.v1.ControllerServiceGrpc;
import cosmos_ctrl.v1.ControllerServiceGrpc.ControllerServiceBlockingStub;
import cosmos_ctrl.v1.ControllerServiceOuterClass.RegisterWorkerRequest;
import cosmos_ctrl.v1.ControllerServiceOuterClass.RegisterWorkerResponse;
import cosmos_ctrl.v1.ControllerServiceOuterClass.ResponseHeader;
import cosmos_ctrl.v1.ControllerServiceOuterClass.StreamReportsRequest;
import cosmos_ctrl.v1.ControllerServiceOuterClass.StreamReportsResponse;
import cosmos_ctrl.v1.ControllerServiceOuterClass.WorkerIdentity;
import io.grpc.ManagedChannel;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.StreamObserver;
import java.time.Duration;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.ReentrantLock;
import java.util.function.BiFunction;
import java.util.function.Function;

/**
 * This process before its controller. The execution ID is pinned for the process's life: as it was launched, else as the first
 * registration tells. Registering again opens another session of the same incarnation.
 */
final class Session {
    /** An answer takes at most so long, beyond what the call itself asks the controller to wait. */
    static final Duration CALL_TIMEOUT = Duration.ofSeconds(5);

    /** A stream is opened anew after so long, so that it has a deadline like every other call. */
    private static final Duration STREAM_LIFETIME = Duration.ofMinutes(10);

    interface Registered {
        /** A session was opened; called before anything is sent in it. */
        void on(RegisterWorkerResponse response) throws ExitException;
    }

    private final ManagedChannel channel;
    private final RegisterWorkerRequest request;
    private final Registered registered;
    private final ReentrantLock registering = new ReentrantLock();
    private ExitException refused; // guarded by registering: nobody asks again
    private boolean pinned;
    private WorkerIdentity identity;

    Session(ManagedChannel channel, RegisterWorkerRequest request, Registered registered) {
        this.channel = channel;
        this.request = request;
        this.registered = registered;
        pinned = !request.getExecutionId().isEmpty();
        identity = WorkerIdentity.newBuilder().setExecutionId(request.getExecutionId()).build();
    }

    synchronized WorkerIdentity identity() {
        return identity;
    }

    /** Compares an answer's execution with the pinned one: another one is another controller, to which nothing is said. */
    synchronized void check(ResponseHeader header) throws ExitException {
        if (!pinned) {
            pinned = true;
            identity = identity.toBuilder().setExecutionId(header.getExecutionId()).build();
        }
        if (!header.getExecutionId().equals(identity.getExecutionId())) {
            throw new ExitException(ExitException.STALE, "execution '%s' answered; this process belongs to '%s'"
                    .formatted(header.getExecutionId(), identity.getExecutionId()));
        }
    }

    /** Opens a session, unless there is another one than {@code stale} already. */
    void register(String stale, CountDownLatch stopping) throws ExitException, InterruptedException {
        registering.lock();
        try {
            if (refused != null) {
                throw refused;
            }
            if (!identity().getSessionId().equals(stale)) {
                return;
            }
            var pinnedRequest = request.toBuilder().setExecutionId(identity().getExecutionId()).build();
            var patience = new Patience();
            RegisterWorkerResponse response = null;
            while (response == null) {
                try {
                    response = attempt(patience, Duration.ZERO, RegisterWorkerResponse::getHeader,
                            stub -> stub.registerWorker(pinnedRequest));
                } catch (StatusRuntimeException failure) {
                    recover(patience, Fault.of(failure), stopping);
                }
            }
            synchronized (this) {
                identity = identity.toBuilder().setSessionId(response.getSessionId()).build();
            }
            registered.on(response);
        } catch (ExitException exit) {
            refused = exit;
            throw exit;
        } finally {
            registering.unlock();
        }
    }

    /**
     * Makes a fenced call until it is answered, with the present session and a deadline each time. After {@code stopping} an
     * attempt that fails is the last.
     */
    <R> R call(
            Duration wait, Function<R, ResponseHeader> header, CountDownLatch stopping,
            BiFunction<ControllerServiceBlockingStub, WorkerIdentity, R> send)
            throws ExitException, InterruptedException {
        var patience = new Patience();
        while (true) {
            var worker = identity();
            try {
                return attempt(patience, wait, header, stub -> send.apply(stub, worker));
            } catch (StatusRuntimeException failure) {
                recover(patience, Fault.of(failure), worker.getSessionId(), stopping);
            }
        }
    }

    StreamObserver<StreamReportsRequest> openReports(StreamObserver<StreamReportsResponse> answers) {
        return ControllerServiceGrpc.newStub(channel)
                .withDeadlineAfter(STREAM_LIFETIME.toMillis(), TimeUnit.MILLISECONDS)
                .streamReports(answers);
    }

    /** Waits until the same may be sent again, in a new session if the stated one has lapsed. */
    void recover(Patience patience, Fault fault, String session, CountDownLatch stopping)
            throws ExitException, InterruptedException {
        if (fault.kind() == Fault.Kind.LAPSED) {
            // A controller that forgets every session at once is not asked without pause.
            recover(patience, fault.as(Fault.Kind.LATER), stopping);
            register(session, stopping);
        } else {
            recover(patience, fault, stopping);
        }
    }

    private void recover(Patience patience, Fault fault, CountDownLatch stopping)
            throws ExitException, InterruptedException {
        patience.recover(fault, stopping);
        // The library's own pause between connections grows to two minutes.
        channel.resetConnectBackoff();
    }

    private <R> R attempt(
            Patience patience, Duration wait, Function<R, ResponseHeader> header,
            Function<ControllerServiceBlockingStub, R> send)
            throws ExitException {
        patience.begin();
        var stub = ControllerServiceGrpc.newBlockingStub(channel)
                .withDeadlineAfter(CALL_TIMEOUT.plus(wait).toMillis(), TimeUnit.MILLISECONDS);
        R response = send.apply(stub);
        check(header.apply(response));
        return response;
    }
}
