/**
 * Reports, as numbered batches on one stream.
 *
 * - Batches are numbered from 1 without gaps. One that was formed never changes, and is kept until it is acknowledged.
 * - A new stream sends again all that is not acknowledged; the controller applies a number once.
 * - A message goes out at least every quarter of the session's lease time, with a batch or as a heartbeat.
 * - A notice is handled once, in order, however often it comes.
 */
import type { ClientDuplexStream, ServiceError } from "@grpc/grpc-js";
import type { StreamReportsRequest, StreamReportsResponse } from "../generated/cosmos_ctrl/v1/controller_service.js";
import { type Notice, Outcome, type ReportAck, ReportBatch, RolloutRows } from "../generated/cosmos_ctrl/v1/reports.js";
import type { Condition } from "./condition.js";
import { Exit, ExitCode, type Fault, faultOf } from "./faults.js";
import { CALL_MS, type Session } from "./session.js";

/** What became of one completion. */
export interface Report {
  group: bigint;
  lease: bigint;
  index: number;
  outcome: Outcome;
  /** For DISCARDED and FAILED. */
  reason: string;
  /** For COMPLETED. */
  payload: Buffer;
  reward: number;
  weightsVersion: bigint;
}

/** Upper bounds of what a message holds beside the payloads, in bytes. */
const MESSAGE_OVERHEAD = 1024;
const REPORT_OVERHEAD = 128;

type Stream = ClientDuplexStream<StreamReportsRequest, StreamReportsResponse>;

export class Reporter {
  readonly #session: Session;
  readonly #changed: Condition;
  readonly #onCancelled: (leases: bigint[]) => void;
  #waiting: Report[] = [];
  #batches: ReportBatch[] = [];
  /** How many of `#batches` the present stream has been sent. */
  #sent = 0;
  #formed = 0n;
  #applied = 0n;
  #notices = 0n;
  #endReason: string | undefined;
  #endFormed = false;
  #stream: Stream | undefined;
  /** Messages of the present stream that are not answered. */
  #unanswered = 0;
  #attempt = 0;
  #heartbeat: NodeJS.Timeout | undefined;
  #silence: NodeJS.Timeout | undefined;

  constructor(session: Session, changed: Condition, onCancelled: (leases: bigint[]) => void) {
    this.#session = session;
    this.#changed = changed;
    this.#onCancelled = onCancelled;
    session.onRegistered = (applied) => this.#forget(applied);
  }

  /** Whether everything that was reported is in a batch: if not, the window is full. */
  get hasRoom(): boolean {
    return this.#waiting.length === 0;
  }

  report(reports: Report[]): void {
    this.#waiting.push(...reports);
    this.#pump();
  }

  /** Reports the end of this worker, last of all, and returns once everything is acknowledged. */
  async end(reason: string): Promise<void> {
    this.#endReason = reason;
    this.#pump();
    await this.#changed.until(() => this.#endFormed && this.#batches.length === 0);
  }

  /** Keeps a stream open; throws what is final. */
  async run(): Promise<never> {
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
  async #oneStream(): Promise<Fault> {
    const stream = this.#session.client.streamReports();
    this.#stream = stream;
    this.#sent = 0;
    this.#unanswered = 0;
    // What it ends with is met below; an error after that, such as our own cancelling, is nothing to anyone.
    stream.on("error", () => {});
    try {
      // A new stream speaks at once: the answer says whether the session lives.
      if (this.#pump() === 0) this.#send();
      for await (const response of stream) this.#answered(response as StreamReportsResponse);
      return { kind: "unreachable", text: "the controller closed the report stream" };
    } catch (error) {
      if (error instanceof Exit) throw error;
      return faultOf(error as ServiceError);
    } finally {
      clearTimeout(this.#heartbeat);
      clearTimeout(this.#silence);
      this.#stream = undefined;
      stream.cancel();
    }
  }

  #answered({ header, ack }: StreamReportsResponse): void {
    this.#session.heard(header);
    this.#attempt = 0;
    this.#unanswered--;
    this.#watchSilence();
    if (!ack) return;
    this.#forget(ack.applied);
    const news = this.#handle(ack);
    // Confirmed at once: the controller sends further notices only then.
    if (this.#pump() === 0 && news) this.#send();
  }

  #handle({ notices }: ReportAck): boolean {
    const fresh = notices.filter(({ number }) => number > this.#notices);
    for (const notice of fresh) {
      this.#notices = notice.number;
      this.#handleOne(notice);
    }
    return fresh.length > 0;
  }

  #handleOne({ kind }: Notice): void {
    // A refused row is done with, payloads are not kept here, and a kind that is not known is confirmed like the others.
    if (kind?.$case === "cancelled") this.#onCancelled(kind.value.leases);
  }

  /** Batches up to `applied` are acknowledged. */
  #forget(applied: bigint): void {
    if (applied > this.#formed) {
      throw new Exit(ExitCode.Failed, `batch ${applied} is acknowledged, only ${this.#formed} were made`);
    }
    while (this.#batches[0] && this.#batches[0].number <= applied) {
      this.#batches.shift();
      this.#sent = Math.max(0, this.#sent - 1);
    }
    if (applied > this.#applied) this.#applied = applied;
    this.#changed.notify();
  }

  #keeps(number: bigint): boolean {
    return number > this.#applied && number <= this.#formed;
  }

  /** Forms and sends what may go out now; returns the number of messages. */
  #pump(): number {
    while (this.#mayForm()) this.#batches.push(this.#form());
    let sent = 0;
    for (; this.#stream && this.#sent < this.#batches.length; sent++) this.#send(this.#batches[this.#sent++]);
    this.#changed.notify();
    return sent;
  }

  #mayForm(): boolean {
    const isSomething = this.#waiting.length > 0 || (this.#endReason !== undefined && !this.#endFormed);
    return isSomething && this.#batches.length < this.#session.limits.maxUnacknowledgedBatches;
  }

  #form(): ReportBatch {
    const { maxBatchCompletions, maxMessageBytes } = this.#session.limits;
    let count = 0;
    let bytes = MESSAGE_OVERHEAD;
    for (const { payload, reason } of this.#waiting) {
      bytes += payload.length + reason.length + REPORT_OVERHEAD;
      if (count > 0 && (count >= maxBatchCompletions || bytes > maxMessageBytes)) break;
      count++;
    }
    const batch = ReportBatch.create({ number: ++this.#formed, rollouts: pack(this.#waiting.splice(0, count)) });
    if (this.#endReason !== undefined && this.#waiting.length === 0) {
      batch.end = { reason: this.#endReason };
      this.#endFormed = true;
    }
    return batch;
  }

  #send(batch?: ReportBatch): void {
    this.#stream?.write({
      worker: this.#session.identity(),
      ackedThrough: this.#applied,
      noticesThrough: this.#notices,
      batch,
    });
    clearTimeout(this.#heartbeat);
    this.#heartbeat = setTimeout(() => this.#send(), this.#session.leaseMs / 4);
    if (this.#unanswered++ === 0) this.#watchSilence();
  }

  /** A stream that lives long has no deadline of its own: each of its answers has. */
  #watchSilence(): void {
    clearTimeout(this.#silence);
    if (this.#unanswered > 0) this.#silence = setTimeout(() => this.#stream?.cancel(), CALL_MS);
  }
}

/** Packed columns: a block per outcome and reason, a row per group and word. Reports of a row come in order of their index. */
function pack(reports: Report[]): RolloutRows[] {
  const blocks: RolloutRows[] = [];
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
