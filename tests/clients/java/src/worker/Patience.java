package worker;

import java.time.Duration;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;

/** How long one call, or one stream after the other, is tried: exponential pauses with jitter, and an end. */
final class Patience {
    /** Without any answer for so long, the controller is taken for gone. */
    private static final Duration GIVE_UP_AFTER = Duration.ofSeconds(30);

    private static final long FIRST_MILLIS = 50;
    private static final long MOST_MILLIS = 2000;

    private int attempts;
    private long silentSince; // nanoseconds
    private boolean silent;

    /** An attempt is made: from now on an answer is waited for. */
    synchronized void begin() {
        if (!silent) {
            silent = true;
            silentSince = System.nanoTime();
        }
    }

    /** A call went well. */
    synchronized void answered() {
        attempts = 0;
        silent = false;
    }

    /**
     * Waits until the same may be sent again. A lapsed session and a gap are the caller's to cure.
     *
     * @throws ExitException the fault is final, or there was no answer for too long
     * @throws CancellationException {@code stopping} came first
     */
    void recover(Fault fault, CountDownLatch stopping) throws ExitException, InterruptedException {
        switch (fault.kind()) {
            case UNREACHABLE -> {
                begin();
                requirePatience(fault);
                pause(Duration.ZERO, stopping);
            }
            case LATER -> {
                synchronized (this) {
                    silent = false;
                }
                pause(fault.delay(), stopping);
            }
            default -> throw fault.exit();
        }
    }

    private synchronized void requirePatience(Fault fault) throws ExitException {
        var silence = Duration.ofNanos(System.nanoTime() - silentSince);
        if (silence.compareTo(GIVE_UP_AFTER) >= 0) {
            throw ExitException.error(
                    "no answer from the controller for %d s: %s", silence.toSeconds(), fault.exit().getMessage());
        }
    }

    private void pause(Duration least, CountDownLatch stopping) throws InterruptedException {
        long most;
        synchronized (this) {
            most = Math.min(MOST_MILLIS, FIRST_MILLIS << Math.min(attempts++, 10));
        }
        long millis = Math.max(least.toMillis(), most / 2 + ThreadLocalRandom.current().nextLong(most / 2));
        if (stopping.await(millis, TimeUnit.MILLISECONDS)) {
            throw new CancellationException("told to stop");
        }
    }
}
