package worker;

import com.google.protobuf.ByteString;
import cosmos_ctrl.v1.ControllerServiceOuterClass.LeasedGroup;
import cosmos_ctrl.v1.Reports.Outcome;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.concurrent.CompletableFuture;
import java.util.function.IntFunction;

/** What became of the completions of one lease. More than fits into one batch goes on in the next. */
final class Report {
    /** One completion; payload and reward count only where it is completed. */
    record Completion(int index, ByteString payload, double reward) {
        static Completion unfinished(int index) {
            return new Completion(index, ByteString.EMPTY, 0);
        }
    }

    final LeasedGroup group;
    final Outcome outcome;
    final String reason;
    final long version;

    /** Not in a batch yet. */
    final Deque<Completion> left = new ArrayDeque<>();

    /** Done once nothing is left, or nobody wants it any more. */
    final CompletableFuture<Void> batched = new CompletableFuture<>();

    private Report(
            LeasedGroup group, Outcome outcome, String reason, long version, IntFunction<Completion> completion) {
        this.group = group;
        this.outcome = outcome;
        this.reason = reason;
        this.version = version;
        for (int word = 0; word < group.getMasksCount(); word++) {
            for (long mask = group.getMasks(word); mask != 0; mask &= mask - 1) {
                left.add(completion.apply(Long.SIZE * word + Long.numberOfTrailingZeros(mask)));
            }
        }
    }

    /** Generated, every completion that the lease asks for, with weights of this version. */
    static Report completed(LeasedGroup group, long version, IntFunction<Completion> generate) {
        return new Report(group, Outcome.OUTCOME_COMPLETED, "", version, generate);
    }

    /** Given up: discarded or failed, with a reason. */
    static Report givenUp(LeasedGroup group, Outcome outcome, String reason) {
        return new Report(group, outcome, reason, 0, Completion::unfinished);
    }

    /** Handed back unfinished. */
    static Report returned(LeasedGroup group) {
        return new Report(group, Outcome.OUTCOME_RETURNED, "", 0, Completion::unfinished);
    }
}
