/**
 * Leases groups and works on them: the part that a real worker replaces by its engine.
 *
 * What is done with a group is decided by its `source`, so that a test can ask for every outcome; the answer to a prompt is
 * the prompt itself and the number of the completion.
 */
import { setTimeout as sleep } from "node:timers/promises";
import { LeasePromptsRequest, } from "../generated/cosmos_ctrl/v1/controller_service.js";
import { Outcome } from "../generated/cosmos_ctrl/v1/reports.js";
import { Condition } from "./condition.js";
import { fromMilliseconds } from "./durations.js";
import { Exit, ExitCode } from "./faults.js";
import { Reporter } from "./reporter.js";
/** How long the controller may wait for work before it answers that there is none. Leaving waits for that answer. */
const LEASE_WAIT_MS = 2_000;
/** A controller that has none and does not wait is asked again after this. */
const EMPTY_PAUSE_MS = 50;
/** How long the acknowledgement of the end may take. */
export const END_MS = 10_000;
export class Worker {
    #session;
    #changed;
    #inFlight;
    #reporter;
    /** By lease: groups that are kept unfinished. */
    #held = new Map();
    /** Prompts that were handed back once. */
    #returned = new Set();
    #weightsVersion = 0n;
    #noMore = false;
    #stopping = false;
    #requests = 0n;
    constructor(session, inFlight) {
        this.#session = session;
        this.#changed = new Condition();
        this.#inFlight = inFlight;
        this.#reporter = new Reporter(session, this.#changed, (leases) => this.#drop(leases));
    }
    get isStopping() {
        return this.#stopping;
    }
    /** Works until there is nothing more to do; throws if that cannot be. */
    async run() {
        await this.#session.register();
        await Promise.race([this.#work(), this.#reporter.run()]);
    }
    /** Hands back what is unfinished and ends. */
    stop() {
        this.#stopping = true;
        this.#changed.notify();
    }
    async #work() {
        while (await this.#mayLease())
            await this.#lease();
        await this.#changed.until(() => this.#stopping || this.#held.size === 0);
        this.#reporter.report([...this.#held.values()].flatMap((group) => this.#became(group, Outcome.OUTCOME_RETURNED)));
        const ended = this.#reporter.end(this.#stopping ? "told to stop" : "no more work").then(() => true);
        if (!(await Promise.race([ended, sleep(END_MS, false)]))) {
            throw new Exit(ExitCode.Failed, `the end was not acknowledged within ${END_MS / 1000} s`);
        }
    }
    /** Waits for room; false where nothing more is to be leased. Nothing is, while what was done cannot be reported. */
    async #mayLease() {
        const isOver = () => this.#stopping || this.#noMore;
        await this.#changed.until(() => isOver() || (this.#held.size < this.#inFlight && this.#reporter.hasRoom));
        return !isOver();
    }
    async #lease() {
        const request = LeasePromptsRequest.create({
            number: ++this.#requests,
            maxGroups: this.#inFlight - this.#held.size,
            wait: fromMilliseconds(LEASE_WAIT_MS),
        });
        const asked = Date.now();
        const { groups, weights, noMore } = await this.#session.call(LEASE_WAIT_MS, (worker, ...rest) => this.#session.client.leasePrompts({ ...request, worker }, ...rest));
        if (weights && weights.version > this.#weightsVersion)
            this.#weightsVersion = weights.version;
        this.#noMore = noMore;
        this.#reporter.report(groups.flatMap((group) => this.#generate(group)));
        // A controller that does not wait is not asked in a circle.
        if (groups.length === 0 && !noMore && Date.now() - asked < EMPTY_PAUSE_MS)
            await sleep(EMPTY_PAUSE_MS);
    }
    #generate(group) {
        switch (group.source) {
            case "fail":
                return this.#became(group, Outcome.OUTCOME_FAILED, "told_to");
            case "discard":
                return this.#became(group, Outcome.OUTCOME_DISCARDED, "told_to");
            case "hold":
                this.#held.set(group.lease, group);
                return [];
            case "return":
                if (!this.#returned.has(group.promptKey)) {
                    this.#returned.add(group.promptKey);
                    return this.#became(group, Outcome.OUTCOME_RETURNED);
                }
        }
        return this.#became(group, Outcome.OUTCOME_COMPLETED);
    }
    #became(group, outcome, reason = "") {
        const prompt = group.payload ?? Buffer.alloc(0);
        return completionsOf(group.masks).map((index) => ({
            group: group.group,
            lease: group.lease,
            index,
            outcome,
            reason,
            payload: Buffer.concat([prompt, Buffer.from(`#${index}`)]),
            reward: index,
            weightsVersion: this.#weightsVersion,
        }));
    }
    /** The controller does not want these any more: nothing is reported for them. */
    #drop(leases) {
        for (const lease of leases)
            this.#held.delete(lease);
        this.#changed.notify();
    }
}
/** Bit b of word w is completion 64 × w + b. */
function completionsOf(masks) {
    return masks.flatMap((mask, word) => Array.from({ length: 64 }, (_, bit) => bit)
        .filter((bit) => (mask >> BigInt(bit)) & 1n)
        .map((bit) => 64 * word + bit));
}
