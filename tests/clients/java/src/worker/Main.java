package worker;

import cosmos_ctrl.v1.ControllerServiceOuterClass.RegisterWorkerRequest;
import cosmos_ctrl.v1.ControllerServiceOuterClass.Role;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import java.security.SecureRandom;
import java.util.HexFormat;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.atomic.AtomicInteger;
import sun.misc.Signal;

/** A complete rollout worker, built from the generated stubs and Java's gRPC library only. */
final class Main {
    /** How long the last acknowledgement may take. */
    private static final long END_TIMEOUT_SECONDS = 10;

    private interface Task {
        void run() throws ExitException, InterruptedException;
    }

    private Main() { }

    public static void main(String[] arguments) {
        int code = 0;
        try {
            run();
        } catch (ExitException exit) {
            System.err.println("worker: " + exit.getMessage());
            code = exit.code;
        } catch (Exception failure) {
            failure.printStackTrace();
            code = ExitException.ERROR;
        }
        // Not System.exit: an answer that comes now would be waited for, and nothing is said any more.
        Runtime.getRuntime().halt(code);
    }

    /** Works until there is no more, or SIGTERM; then says that it ends, and waits until that is acknowledged. */
    private static void run() throws ExitException, InterruptedException {
        var address = setting("COSMOS_CTRL_ADDRESS", "");
        if (address.isEmpty()) {
            throw new ExitException(
                    ExitException.CONFIGURATION, "COSMOS_CTRL_ADDRESS is not set: the controller's host:port");
        }
        var request = registration();
        var worker = new Worker(number("COSMOS_CTRL_IN_FLIGHT", "8", 1));
        stopOnSignal(worker);
        var channel = Grpc.newChannelBuilder(address, InsecureChannelCredentials.create())
                // The controller's limit is told at registration and kept by it; the library's own is 4 MiB.
                .maxInboundMessageSize(Integer.MAX_VALUE)
                .build();
        var reporter = worker.reporter();
        var session = new Session(channel, request, reporter::registered);
        try {
            session.register("", worker.stopping());
        } catch (CancellationException stopped) {
            return; // before it held anything
        }
        var reporting = start("reports", () -> reporter.run(session));
        await(CompletableFuture.anyOf(reporting, start("leases", () -> worker.run(session))), Long.MAX_VALUE);
        var reason = worker.stopping().getCount() > 0 ? "nothing more to do" : "terminated";
        await(CompletableFuture.anyOf(reporting, reporter.finish(reason)), END_TIMEOUT_SECONDS);
    }

    private static RegisterWorkerRequest registration() throws ExitException {
        var incarnation = new byte[16];
        new SecureRandom().nextBytes(incarnation);
        return RegisterWorkerRequest.newBuilder()
                .setExecutionId(setting("COSMOS_CTRL_EXECUTION_ID", ""))
                .setRole(Role.ROLE_ROLLOUT)
                .setGroup(setting("COSMOS_CTRL_GROUP", "rollout"))
                .setReplica(number("COSMOS_CTRL_REPLICA", "0", 0))
                .setWorldSize(1)
                .setIncarnation(HexFormat.of().formatHex(incarnation))
                .setHost(setting("HOSTNAME", "")) // for people only
                .setPid((int) ProcessHandle.current().pid())
                .build();
    }

    private static String setting(String name, String otherwise) {
        var value = System.getenv(name);
        return value == null || value.isEmpty() ? otherwise : value;
    }

    private static int number(String name, String otherwise, int least) throws ExitException {
        var text = setting(name, otherwise);
        try {
            int number = Integer.parseInt(text);
            if (number >= least) {
                return number;
            }
        } catch (NumberFormatException notOne) {
            // Said below.
        }
        throw new ExitException(
                ExitException.CONFIGURATION, "%s is '%s': a number, at least %d".formatted(name, text, least));
    }

    /** SIGTERM stops the worker, the second one ends the process. A shutdown hook hears of one only, and sets no exit code. */
    private static void stopOnSignal(Worker worker) {
        var signals = new AtomicInteger();
        Signal.handle(new Signal("TERM"), signal -> {
            if (signals.incrementAndGet() > 1) {
                System.err.println("worker: terminated twice");
                Runtime.getRuntime().halt(ExitException.ERROR);
            }
            worker.stop();
        });
    }

    private static CompletableFuture<Void> start(String name, Task task) {
        var done = new CompletableFuture<Void>();
        var thread = new Thread(() -> {
            try {
                task.run();
                done.complete(null);
            } catch (Throwable failure) {
                done.completeExceptionally(failure);
            }
        }, name);
        thread.setDaemon(true);
        thread.start();
        return done;
    }

    private static void await(CompletableFuture<?> done, long seconds) throws ExitException, InterruptedException {
        try {
            done.get(seconds, TimeUnit.SECONDS);
        } catch (ExecutionException failed) {
            if (failed.getCause() instanceof ExitException exit) {
                throw exit;
            }
            throw new IllegalStateException(failed.getCause());
        } catch (TimeoutException late) {
            throw ExitException.error("the end was not acknowledged within %d s", seconds);
        }
    }
}
