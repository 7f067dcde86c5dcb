package worker;

import cosmos_ctrl.v1.ControllerServiceOuterClass.Limits;
import cosmos_ctrl.v1.Reports.EndReport;
import cosmos_ctrl.v1.Reports.Outcome;
import cosmos_ctrl.v1.Reports.ReportBatch;
import cosmos_ctrl.v1.Reports.RolloutRows;
import worker.Report.Completion;

/**
 * Fills one batch up to the controller's limits. A single completion always fits: the controller keeps prompts small enough for
 * that.
 */
final class BatchBuilder {
    /** Bounds of what a message, and a completion with a row and a block of its own, take beside texts and payloads. */
    private static final int MESSAGE_BYTES = 1024;
    private static final int COMPLETION_BYTES = 96;

    private final ReportBatch.Builder batch;
    private long roomCompletions;
    private long roomBytes;

    BatchBuilder(long number, Limits limits) {
        batch = ReportBatch.newBuilder().setNumber(number);
        roomCompletions = limits.getMaxBatchCompletions();
        roomBytes = limits.getMaxMessageBytes() - MESSAGE_BYTES;
    }

    /** Takes as much of the report as there is room for; true: all of it. */
    boolean add(Report report) {
        while (!report.left.isEmpty()) {
            var completion = report.left.peek();
            int size = COMPLETION_BYTES + report.reason.length() + completion.payload().size();
            if (batch.getRolloutsCount() > 0 && (roomCompletions < 1 || roomBytes < size)) {
                return false;
            }
            append(report, report.left.remove());
            roomCompletions--;
            roomBytes -= size;
        }
        return true;
    }

    void end(String reason) {
        batch.setEnd(EndReport.newBuilder().setReason(reason));
    }

    ReportBatch build() {
        return batch.build();
    }

    private void append(Report report, Completion completion) {
        var rows = block(report);
        int word = completion.index() / Long.SIZE;
        int last = rows.getGroupsCount() - 1;
        boolean completed = report.outcome == Outcome.OUTCOME_COMPLETED;
        if (last < 0 || rows.getLeases(last) != report.group.getLease() || rows.getWords(last) != word) {
            rows.addGroups(report.group.getGroup()).addLeases(report.group.getLease()).addWords(word).addMasks(0);
            if (completed) {
                rows.addLowestVersions(report.version).addHighestVersions(report.version);
            }
            last++;
        }
        rows.setMasks(last, rows.getMasks(last) | 1L << (completion.index() % Long.SIZE));
        if (completed) {
            rows.addRewards(completion.reward()).addPayloads(completion.payload());
        }
    }

    /** The last block if it is of the report's kind, else a new one: blocks are applied in order. */
    private RolloutRows.Builder block(Report report) {
        int last = batch.getRolloutsCount() - 1;
        if (last >= 0) {
            var rows = batch.getRolloutsBuilder(last);
            if (rows.getOutcome() == report.outcome && rows.getReason().equals(report.reason)) {
                return rows;
            }
        }
        return batch.addRolloutsBuilder()
                .setOutcome(report.outcome)
                .setReason(report.reason)
                .setPayloadCodec(report.outcome == Outcome.OUTCOME_COMPLETED ? "bytes" : "");
    }
}
