/**
 * The place of this process in the run: who it is, over which channel it speaks, and what it does when a call fails.
 *
 * - The execution ID is pinned by what the process was given, else by its first registration, and never changes.
 * - One incarnation for the life of the process; sessions come and go under it.
 * - A failed call is sent again as it was, unless the failure is final.
 */
import { randomBytes } from "node:crypto";
import { hostname } from "node:os";
import { setTimeout as sleep } from "node:timers/promises";
import { credentials, Metadata } from "@grpc/grpc-js";
import { ControllerServiceClient, Limits, RegisterWorkerRequest, Role, } from "../generated/cosmos_ctrl/v1/controller_service.js";
import { toMilliseconds } from "./durations.js";
import { Exit, ExitCode, faultOf } from "./faults.js";
/** How long an answer may take, beside the time that the controller was asked to wait. */
export const CALL_MS = 10_000;
const FIRST_PAUSE_MS = 50;
const LONGEST_PAUSE_MS = 2_000;
/** Nobody answered for so long: the controller is gone. */
const SILENCE_MS = 30_000;
export class Session {
    client;
    limits = Limits.create();
    leaseMs = 0;
    /** Called with the highest batch number that the controller has applied, after every registration. */
    onRegistered = () => { };
    #place;
    #incarnation = randomBytes(16).toString("hex");
    #executionId;
    #sessionId = "";
    #registering;
    #silentSince;
    constructor(place) {
        this.#place = place;
        this.#executionId = place.executionId;
        this.client = new ControllerServiceClient(place.address, credentials.createInsecure(), {
            // What the controller sends is within its own limits, which may be above the library's default.
            "grpc.max_receive_message_length": -1,
            // The library's own pause between connections grows to two minutes, in which every call fails at once.
            "grpc.initial_reconnect_backoff_ms": FIRST_PAUSE_MS,
            "grpc.max_reconnect_backoff_ms": LONGEST_PAUSE_MS,
        });
    }
    get id() {
        return this.#sessionId;
    }
    identity() {
        return { executionId: this.#executionId, sessionId: this.#sessionId };
    }
    /** Opens a session; calls that come together share one registration. */
    async register() {
        this.#registering ??= this.#register().finally(() => (this.#registering = undefined));
        await this.#registering;
    }
    /** Sends until it is answered, each time under the session of the moment; `waitMs` is what the controller may wait. */
    async call(waitMs, send) {
        for (let attempt = 0;; attempt++) {
            const worker = this.identity();
            try {
                const response = await once(waitMs + CALL_MS, (...rest) => send(worker, ...rest));
                this.heard(response.header);
                return response;
            }
            catch (error) {
                if (error instanceof Exit)
                    throw error;
                await this.recover(faultOf(error), worker.sessionId, attempt);
            }
        }
    }
    /** An answer came. Throws if another controller sent it. */
    heard(header) {
        this.#silentSince = undefined;
        const found = header?.executionId ?? "";
        if (found !== this.#executionId) {
            throw new Exit(ExitCode.Stale, `execution ${found} answers; this process belongs to execution ${this.#executionId}`);
        }
    }
    /** Returns when the call that failed may be sent again, `attempt` counting from 0 since the last answer; throws if never. */
    async recover(fault, sessionId, attempt) {
        if (fault.kind === "final")
            throw new Exit(fault.code, fault.text);
        let pauseMs = Math.min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS * 2 ** attempt) * (0.5 + Math.random() / 2);
        if (fault.kind === "unreachable") {
            this.#silentSince ??= Date.now();
            if (Date.now() - this.#silentSince >= SILENCE_MS) {
                throw new Exit(ExitCode.Failed, `no answer from ${this.#place.address} for ${SILENCE_MS / 1000} s: ${fault.text}`);
            }
        }
        else {
            this.#silentSince = undefined;
        }
        if (fault.kind === "later")
            pauseMs = Math.max(pauseMs, fault.delayMs);
        if (fault.kind !== "register") {
            await sleep(pauseMs);
        }
        else if (sessionId === this.#sessionId) {
            // Another call may have registered meanwhile: then there is a new session already.
            if (attempt > 0)
                await sleep(pauseMs);
            await this.register();
        }
    }
    async #register() {
        const response = await this.#registration();
        // A controller without an execution takes any ID, and answers with none.
        const found = response.header?.executionId ?? "";
        if (this.#sessionId === "" && (this.#executionId === "" || found === ""))
            this.#executionId = found;
        this.heard(response.header);
        this.#sessionId = response.sessionId;
        this.limits = response.limits ?? this.limits;
        this.leaseMs = toMilliseconds(response.leaseTime);
        this.onRegistered(response.applied);
    }
    async #registration() {
        const { group, replica } = this.#place;
        const request = RegisterWorkerRequest.create({
            executionId: this.#executionId,
            role: Role.ROLE_ROLLOUT,
            group,
            replica,
            worldSize: 1,
            incarnation: this.#incarnation,
            host: hostname(),
            pid: process.pid,
        });
        for (let attempt = 0;; attempt++) {
            try {
                return await once(CALL_MS, (...rest) => this.client.registerWorker(request, ...rest));
            }
            catch (error) {
                const fault = faultOf(error);
                // A session is what is being asked for: one that lapsed on the way is a reason to ask again.
                await this.recover(fault.kind === "register" ? { ...fault, kind: "later", delayMs: 0 } : fault, "", attempt);
            }
        }
    }
}
/** One attempt of a unary call. */
function once(timeoutMs, send) {
    return new Promise((resolve, reject) => {
        send(new Metadata(), { deadline: Date.now() + timeoutMs }, (error, response) => {
            if (error)
                reject(error);
            else
                resolve(response);
        });
    });
}
