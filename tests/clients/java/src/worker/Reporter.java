package worker;

import cosmos_ctrl.v1.ControllerServiceOuterClass.Limits;
import cosmos_ctrl.v1.ControllerServiceOuterClass.RegisterWorkerResponse;
import cosmos_ctrl.v1.ControllerServiceOuterClass.StreamReportsRequest;
import cosmos_ctrl.v1.ControllerServiceOuterClass.StreamReportsResponse;
import cosmos_ctrl.v1.Reports.Notice;
import cosmos_ctrl.v1.Reports.ReportAck;
import cosmos_ctrl.v1.Reports.ReportBatch;
import io.grpc.Status;
import io.grpc.stub.StreamObserver;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Collection;
import java.util.Deque;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;

/**
 * Sends reports in numbered batches. A batch once formed never changes; it is sent again, in order, on every new stream until it is
 * acknowledged. Unacknowledged batches are bounded by the controller's limit, and reports that wait by whoever waits for them.
 */
final class Reporter {
    /** What was said is said to the end, also after SIGTERM. */
    private static final CountDownLatch NEVER = new CountDownLatch(1);

    private final Consumer<Collection<Long>> cancelled;
    private final CompletableFuture<Void> ended = new CompletableFuture<>();

    private Limits limits;
    private Duration leaseTime;
    private final Deque<Report> waiting = new ArrayDeque<>(); // in no batch, or not wholly
    private final List<ReportBatch> window = new ArrayList<>(); // not acknowledged
    private int sent; // how many of the window went out on the present stream
    private long numbered;
    private long applied;
    private long notices; // handled
    private String endReason;
    private long endNumber; // batch that carries the end

    /** @param cancelled told of leases that the controller does not want any more */
    Reporter(Consumer<Collection<Long>> cancelled) {
        this.cancelled = cancelled;
    }

    /** Queues; done once all of it is in a batch, or its lease was cancelled. */
    synchronized CompletableFuture<Void> report(Report report) {
        waiting.add(report);
        notifyAll();
        return report.batched;
    }

    /** Says that this worker has ended, after all reports; done once that is acknowledged. */
    synchronized CompletableFuture<Void> finish(String reason) {
        endReason = reason;
        notifyAll();
        return ended;
    }

    /** Takes over what a registration says: what is applied is forgotten, the rest is sent again. */
    synchronized void registered(RegisterWorkerResponse response) throws ExitException {
        limits = response.getLimits();
        leaseTime = Fault.javaDuration(response.getLeaseTime());
        rewind(response.getApplied());
    }

    /** Keeps a stream open; ends only with an exception. */
    void run(Session session) throws ExitException, InterruptedException {
        var patience = new Patience();
        while (true) {
            var stale = session.identity().getSessionId();
            patience.begin();
            var fault = Fault.of(new Stream(session, patience).run());
            if (fault.kind() == Fault.Kind.GAP) {
                rewind(fault.expected() - 1);
                fault = fault.as(Fault.Kind.UNREACHABLE);
            }
            session.recover(patience, fault, stale, NEVER);
        }
    }

    private synchronized void rewind(long applied) throws ExitException {
        if (applied < this.applied) {
            throw ExitException.error(
                    "the controller has forgotten batch %d, which it had acknowledged", applied + 1);
        }
        sent = 0;
        acknowledge(applied);
    }

    /** The next batch to send now, or null. */
    private ReportBatch next() {
        if (sent == window.size()) {
            boolean some = !waiting.isEmpty() || endReason != null && endNumber == 0;
            if (!some || !window.isEmpty() && window.size() >= limits.getMaxUnacknowledgedBatches()) {
                return null;
            }
            window.add(form());
        }
        return window.get(sent++);
    }

    private ReportBatch form() {
        var batch = new BatchBuilder(++numbered, limits);
        while (!waiting.isEmpty() && batch.add(waiting.peek())) {
            waiting.remove().batched.complete(null);
        }
        if (waiting.isEmpty() && endReason != null) {
            batch.end(endReason);
            endNumber = numbered;
        }
        return batch.build();
    }

    private void acknowledge(long applied) throws ExitException {
        if (applied > numbered) {
            throw ExitException.error(
                    "the controller acknowledges batch %d; only %d were sent", applied, numbered);
        }
        while (!window.isEmpty() && window.get(0).getNumber() <= applied) {
            window.remove(0);
            sent = Math.max(0, sent - 1);
        }
        this.applied = Math.max(this.applied, applied);
        if (endNumber != 0 && applied >= endNumber) {
            ended.complete(null);
        }
        notifyAll();
    }

    private void handle(ReportAck ack) throws ExitException {
        for (Notice notice : ack.getNoticesList()) {
            if (notice.getNumber() != notices + 1) {
                continue; // handled before
            }
            notices = notice.getNumber();
            switch (notice.getKindCase()) {
                case CANCELLED -> drop(notice.getCancelled().getLeasesList());
                case REFUSED -> System.err.printf("worker: group %d: a report was refused: %s%n",
                        notice.getRefused().getGroup(), notice.getRefused().getReason());
                default -> { } // payloads that may be freed, and what a newer controller says
            }
        }
        acknowledge(ack.getApplied());
    }

    private void drop(Collection<Long> leases) {
        waiting.removeIf(report -> leases.contains(report.group.getLease()) && report.batched.complete(null));
        cancelled.accept(leases);
    }

    /** One stream. Its state is guarded by the reporter. */
    private final class Stream implements StreamObserver<StreamReportsResponse> {
        private final Session session;
        private final Patience patience;
        private int owed; // answers
        private long answerDue; // nanoseconds; while answers are owed
        private long heartbeatDue = System.nanoTime(); // a new stream speaks at once: the answer says whether the session lives
        private Throwable failure;

        Stream(Session session, Patience patience) {
            this.session = session;
            this.patience = patience;
        }

        /** Sends until the stream ends; returns why. */
        Throwable run() throws InterruptedException {
            synchronized (Reporter.this) {
                sent = 0;
            }
            var requests = session.openReports(this);
            try {
                for (var request = await(); request != null; request = await()) {
                    requests.onNext(request);
                }
            } catch (IllegalStateException ended) {
                // The call is over; onError says why.
            }
            synchronized (Reporter.this) {
                while (failure == null) {
                    Reporter.this.wait();
                }
                requests.onError(Status.CANCELLED.withDescription("done with this stream").asException());
                return failure;
            }
        }

        /** Waits for something to send; null: the stream is over. */
        private StreamReportsRequest await() throws InterruptedException {
            synchronized (Reporter.this) {
                while (failure == null) {
                    long now = System.nanoTime();
                    if (owed > 0 && now - answerDue >= 0) {
                        failure = Status.DEADLINE_EXCEEDED.withDescription("a report was not answered").asException();
                        break;
                    }
                    var batch = next();
                    if (batch != null || now - heartbeatDue >= 0) {
                        return request(batch, now);
                    }
                    long until = owed > 0 && answerDue - heartbeatDue < 0 ? answerDue : heartbeatDue;
                    TimeUnit.NANOSECONDS.timedWait(Reporter.this, until - now);
                }
                return null;
            }
        }

        private StreamReportsRequest request(ReportBatch batch, long now) {
            if (owed++ == 0) {
                answerDue = now + Session.CALL_TIMEOUT.toNanos();
            }
            heartbeatDue = now + leaseTime.toNanos() / 3;
            var request = StreamReportsRequest.newBuilder()
                    .setWorker(session.identity())
                    .setAckedThrough(applied)
                    .setNoticesThrough(notices);
            if (batch != null) {
                request.setBatch(batch);
            }
            return request.build();
        }

        @Override
        public void onNext(StreamReportsResponse response) {
            synchronized (Reporter.this) {
                if (failure != null) {
                    return;
                }
                try {
                    session.check(response.getHeader());
                    patience.answered();
                    owed--;
                    answerDue = System.nanoTime() + Session.CALL_TIMEOUT.toNanos();
                    handle(response.getAck());
                } catch (ExitException exit) {
                    end(exit);
                }
            }
        }

        @Override
        public void onError(Throwable error) {
            end(error);
        }

        @Override
        public void onCompleted() {
            end(Status.UNAVAILABLE.withDescription("the controller closed the report stream").asException());
        }

        private void end(Throwable why) {
            synchronized (Reporter.this) {
                if (failure == null) {
                    failure = why;
                    Reporter.this.notifyAll();
                }
            }
        }
    }
}
