package worker;

import com.google.protobuf.ByteString;
import com.google.protobuf.Duration;
import cosmos_ctrl.v1.ControllerServiceOuterClass.LeasePromptsRequest;
import cosmos_ctrl.v1.ControllerServiceOuterClass.LeasePromptsResponse;
import cosmos_ctrl.v1.ControllerServiceOuterClass.LeasedGroup;
import cosmos_ctrl.v1.Reports.Outcome;
import java.util.Collection;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;

/**
 * Leases groups and has each generated. A group holds its place until it is in a batch, so that no more is leased than can be
 * reported.
 */
final class Worker {
    /** How long the controller may wait for work before it answers that there is none. SIGTERM waits for that, too. */
    private static final java.time.Duration LEASE_WAIT = java.time.Duration.ofSeconds(2);

    /** A controller that has nothing, at once, is asked again after this. */
    private static final java.time.Duration EMPTY_PAUSE = java.time.Duration.ofMillis(50);

    private record Held(LeasedGroup group, CompletableFuture<Report> generating) { }

    private final int inFlight;
    private final Reporter reporter = new Reporter(this::drop);
    private final CountDownLatch stopping = new CountDownLatch(1);
    private final Map<Long, Held> held = new HashMap<>(); // by lease
    private final Set<String> seen = new HashSet<>(); // prompts that were returned once
    private int unreported; // groups that are held, or reported and in no batch yet
    private long weights; // newest version

    Worker(int inFlight) {
        this.inFlight = inFlight;
    }

    Reporter reporter() {
        return reporter;
    }

    /** Counted down when no more work is wanted. */
    CountDownLatch stopping() {
        return stopping;
    }

    /** No more work is wanted: what is held is returned. */
    void stop() {
        List<Held> unfinished;
        synchronized (this) {
            stopping.countDown();
            unfinished = List.copyOf(held.values());
            notifyAll();
        }
        unfinished.forEach(one -> one.generating().complete(Report.returned(one.group())));
    }

    /** Works until there is nothing more, or until it is stopped; then nothing is held that is not in a batch. */
    void run(Session session) throws ExitException, InterruptedException {
        boolean more = true;
        for (long number = 1; more; number++) {
            int free = awaitPlaces();
            more = free > 0 && lease(session, number, free);
        }
        synchronized (this) {
            while (unreported > 0) {
                wait();
            }
        }
    }

    /** Places that are free, at least one; none after a stop. */
    private synchronized int awaitPlaces() throws InterruptedException {
        while (unreported == inFlight && stopping.getCount() > 0) {
            wait();
        }
        return stopping.getCount() > 0 ? inFlight - unreported : 0;
    }

    /** Makes one request; whether there may be another one. */
    private boolean lease(Session session, long number, int free) throws ExitException, InterruptedException {
        var request = LeasePromptsRequest.newBuilder()
                .setNumber(number)
                .setMaxGroups(free)
                .setWait(Duration.newBuilder().setSeconds(LEASE_WAIT.toSeconds()));
        long asked = System.nanoTime();
        LeasePromptsResponse response;
        try {
            // The request in flight ends by itself after SIGTERM, so that no group is leased to a process that is gone.
            response = session.call(LEASE_WAIT, LeasePromptsResponse::getHeader, stopping,
                    (stub, worker) -> stub.leasePrompts(request.setWorker(worker).build()));
        } catch (CancellationException stopped) {
            return false;
        }
        // Without weights the version is 0.
        weights = Math.max(weights, response.getWeights().getVersion()); // a real worker loads them before it generates
        response.getGroupsList().forEach(this::start);
        boolean atOnce = System.nanoTime() - asked < EMPTY_PAUSE.toNanos();
        if (response.getGroupsCount() == 0 && !response.getNoMore() && atOnce) {
            Thread.sleep(EMPTY_PAUSE.toMillis());
        }
        return !response.getNoMore();
    }

    private void start(LeasedGroup group) {
        var generating = work(group, weights);
        boolean stopped;
        synchronized (this) {
            held.put(group.getLease(), new Held(group, generating));
            unreported++;
            stopped = stopping.getCount() == 0;
        }
        generating.thenAccept(report -> {
            if (forget(group.getLease())) {
                reporter.report(report).thenRun(this::freePlace);
            }
        });
        if (stopped) {
            generating.complete(Report.returned(group));
        }
    }

    /** Does what the prompt's source says. */
    private CompletableFuture<Report> work(LeasedGroup group, long version) {
        return switch (group.getSource()) {
            case "fail" -> CompletableFuture.completedFuture(
                    Report.givenUp(group, Outcome.OUTCOME_FAILED, "told_to"));
            case "discard" -> CompletableFuture.completedFuture(
                    Report.givenUp(group, Outcome.OUTCOME_DISCARDED, "told_to"));
            case "return" -> seen.add(group.getPromptKey())
                    ? CompletableFuture.completedFuture(Report.returned(group)) : generate(group, version);
            case "hold" -> new CompletableFuture<>();
            default -> generate(group, version);
        };
    }

    /** Stands for the model. */
    private static CompletableFuture<Report> generate(LeasedGroup group, long version) {
        return CompletableFuture.supplyAsync(() -> Report.completed(group, version, index -> {
            var payload = group.getPayload().concat(ByteString.copyFromUtf8("#" + index));
            return new Report.Completion(index, payload, index);
        }));
    }

    /** Lets go of a lease; whether it was held. */
    private synchronized boolean forget(long lease) {
        return held.remove(lease) != null;
    }

    /** Stops generating what the controller does not want any more. */
    private void drop(Collection<Long> leases) {
        for (long lease : leases) {
            Held one;
            synchronized (this) {
                one = held.remove(lease);
            }
            if (one != null) {
                one.generating().cancel(true);
                freePlace();
            }
        }
    }

    private synchronized void freePlace() {
        unreported--;
        notifyAll();
    }
}
