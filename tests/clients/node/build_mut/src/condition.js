/** A condition variable for one thread: whoever waits looks again after every change. */
export class Condition {
    #waiting = [];
    notify() {
        const waiting = this.#waiting;
        this.#waiting = [];
        for (const wake of waiting)
            wake();
    }
    async until(holds) {
        while (!holds())
            await new Promise((wake) => this.#waiting.push(wake));
    }
}
