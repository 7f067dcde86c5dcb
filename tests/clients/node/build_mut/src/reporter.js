import { Outcome, ReportBatch, RolloutRows } from "../generated/cosmos_ctrl/v1/reports.js";
import { Exit, ExitCode, faultOf } from "./faults.js";
import { CALL_MS } from "./session.js";
/** Upper bounds of what a message holds beside the payloads, in bytes. */
const MESSAGE_OVERHEAD = 1024;
const REPORT_OVERHEAD = 128;
export class Reporter {
    #session;
    #changed;
    #onCancelled;
    #waiting = [];
    #batches = [];
    /** How many of `#batches` the present stream has been sent. */
    #sent = 0;
    #formed = 0n;
    #applied = 0n;
    #notices = 0n;
    #endReason;
    #endFormed = false;
    #stream;
    /** Messages of the present stream that are not answered. */
    #unanswered = 0;
    #attempt = 0;
    #heartbeat;
    #silence;
    constructor(session, changed, onCancelled) {
        this.#session = session;
        this.#changed = changed;
        this.#onCancelled = onCancelled;
        session.onRegistered = (applied) => this.#forget(applied);
    }
    /** Whether everything that was reported is in a batch: if not, the window is full. */
    get hasRoom() {
        return this.#waiting.length === 0;
    }
    report(reports) {
        this.#waiting.push(...reports);
        this.#pump();
    }
    /** Reports the end of this worker, last of all, and returns once everything is acknowledged. */
    async end(reason) {
        this.#endReason = reason;
        this.#pump();
        ;
    }
    /** Keeps a stream open; throws what is final. */
    async run() {
        for (;;) {
            const sessionId = this.#session.id;
            let fault = await this.#oneStream();
            if (fault.kind === "final" && fault.resendFrom !== undefined && this.#keeps(fault.resendFrom)) {
                // The next stream sends all that is kept, which begins with that batch or before it.
                fault = { kind: "later", delayMs: 0, text: fault.text };
            }
            await this.#session.recover(fault, sessionId, this.#attempt++);
        }
    }
    /** Returns how the stream ended. */
    async #oneStream() {
        const stream = this.#session.client.streamReports();
        this.#stream = stream;
        this.#sent = 0;
        this.#unanswered = 0;
        // What it ends with is met below; an error after that, such as our own cancelling, is nothing to anyone.
        stream.on("error", () => { });
        try {
            // A new stream speaks at once: the answer says whether the session lives.
            if (this.#pump() === 0)
                this.#send();
            for await (const response of stream)
                this.#answered(response);
            return { kind: "unreachable", text: "the controller closed the report stream" };
        }
        catch (error) {
            if (error instanceof Exit)
                throw error;
            return faultOf(error);
        }
        finally {
            clearTimeout(this.#heartbeat);
            clearTimeout(this.#silence);
            this.#stream = undefined;
            stream.cancel();
        }
    }
    #answered({ header, ack }) {
        this.#session.heard(header);
        this.#attempt = 0;
        this.#unanswered--;
        this.#watchSilence();
        if (!ack)
            return;
        this.#forget(ack.applied);
        const news = this.#handle(ack);
        // Confirmed at once: the controller sends further notices only then.
        if (this.#pump() === 0 && news)
            this.#send();
    }
    #handle({ notices }) {
        const fresh = notices.filter(({ number }) => number > this.#notices);
        for (const notice of fresh) {
            this.#notices = notice.number;
            this.#handleOne(notice);
        }
        return fresh.length > 0;
    }
    #handleOne({ kind }) {
        // A refused row is done with, payloads are not kept here, and a kind that is not known is confirmed like the others.
        if (kind?.$case === "cancelled")
            this.#onCancelled(kind.value.leases);
    }
    /** Batches up to `applied` are acknowledged. */
    #forget(applied) {
        if (applied > this.#formed) {
            throw new Exit(ExitCode.Failed, `batch ${applied} is acknowledged, only ${this.#formed} were made`);
        }
        while (this.#batches[0] && this.#batches[0].number <= applied) {
            this.#batches.shift();
            this.#sent = Math.max(0, this.#sent - 1);
        }
        if (applied > this.#applied)
            this.#applied = applied;
        this.#changed.notify();
    }
    #keeps(number) {
        return number > this.#applied && number <= this.#formed;
    }
    /** Forms and sends what may go out now; returns the number of messages. */
    #pump() {
        while (this.#mayForm())
            this.#batches.push(this.#form());
        let sent = 0;
        for (; this.#stream && this.#sent < this.#batches.length; sent++)
            this.#send(this.#batches[this.#sent++]);
        this.#changed.notify();
        return sent;
    }
    #mayForm() {
        const isSomething = this.#waiting.length > 0 || (this.#endReason !== undefined && !this.#endFormed);
        return isSomething && this.#batches.length < this.#session.limits.maxUnacknowledgedBatches;
    }
    #form() {
        const { maxBatchCompletions, maxMessageBytes } = this.#session.limits;
        let count = 0;
        let bytes = MESSAGE_OVERHEAD;
        for (const { payload, reason } of this.#waiting) {
            bytes += payload.length + reason.length + REPORT_OVERHEAD;
            if (count > 0 && (count >= maxBatchCompletions || bytes > maxMessageBytes))
                break;
            count++;
        }
        const batch = ReportBatch.create({ number: ++this.#formed, rollouts: pack(this.#waiting.splice(0, count)) });
        if (this.#endReason !== undefined && this.#waiting.length === 0) {
            batch.end = { reason: this.#endReason };
            this.#endFormed = true;
        }
        return batch;
    }
    #send(batch) {
        this.#stream?.write({
            worker: this.#session.identity(),
            ackedThrough: this.#applied,
            noticesThrough: this.#notices,
            batch,
        });
        clearTimeout(this.#heartbeat);
        this.#heartbeat = setTimeout(() => this.#send(), this.#session.leaseMs / 4);
        if (this.#unanswered++ === 0)
            this.#watchSilence();
    }
    /** A stream that lives long has no deadline of its own: each of its answers has. */
    #watchSilence() {
        clearTimeout(this.#silence);
        if (this.#unanswered > 0)
            this.#silence = setTimeout(() => this.#stream?.cancel(), CALL_MS);
    }
}
/** Packed columns: a block per outcome and reason, a row per group and word. Reports of a row come in order of their index. */
function pack(reports) {
    const blocks = [];
    for (const { group, lease, index, outcome, reason, payload, reward, weightsVersion } of reports) {
        const isCompleted = outcome === Outcome.OUTCOME_COMPLETED;
        let block = blocks.at(-1);
        if (block?.outcome !== outcome || block.reason !== reason) {
            block = RolloutRows.create({ outcome, reason, payloadCodec: isCompleted ? "bytes" : "" });
            blocks.push(block);
        }
        const word = Math.floor(index / 64);
        if (block.leases.at(-1) !== lease || block.words.at(-1) !== word) {
            block.groups.push(group);
            block.leases.push(lease);
            block.words.push(word);
            block.masks.push(0n);
            if (isCompleted) {
                block.lowestVersions.push(weightsVersion);
                block.highestVersions.push(weightsVersion);
            }
        }
        const row = block.masks.length - 1;
        block.masks[row] = (block.masks[row] ?? 0n) | (1n << BigInt(index % 64));
        if (isCompleted) {
            block.rewards.push(reward);
            block.payloads.push(payload);
        }
    }
    return blocks;
}
