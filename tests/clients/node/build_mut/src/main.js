/** A rollout worker in one process: settings from the environment, an exit code that says how it ended. */
import { Exit, ExitCode } from "./faults.js";
import { Session } from "./session.js";
import { END_MS, Worker } from "./worker.js";
function setting(name, otherwise) {
    const value = process.env[name] || otherwise;
    if (value === undefined)
        throw new Exit(ExitCode.Configuration, `${name} is not set`);
    return value;
}
function count(name, otherwise, least) {
    const value = Number(setting(name, String(otherwise)));
    if (Number.isInteger(value) && value >= least)
        return value;
    throw new Exit(ExitCode.Configuration, `${name} must be an integer of at least ${least}, not ${process.env[name]}`);
}
function leave({ code, message }) {
    console.error(message);
    // Whatever is still open, nothing is sent any more.
    process.exit(code);
}
async function main() {
    const session = new Session({
        address: setting("COSMOS_CTRL_ADDRESS"),
        executionId: setting("COSMOS_CTRL_EXECUTION_ID", ""),
        group: setting("COSMOS_CTRL_GROUP", "rollout"),
        replica: count("COSMOS_CTRL_REPLICA", 0, 0),
    });
    const worker = new Worker(session, count("COSMOS_CTRL_IN_FLIGHT", 8, 1));
    process.on("SIGTERM", () => {
        if (worker.isStopping)
            leave(new Exit(ExitCode.Failed, "told to stop twice"));
        worker.stop();
        setTimeout(() => leave(new Exit(ExitCode.Failed, "could not end in time after SIGTERM")), END_MS);
    });
    await worker.run();
}
try {
    await main();
}
catch (error) {
    leave(error instanceof Exit ? error : new Exit(ExitCode.Failed, String(error.stack)));
}
process.exit(ExitCode.Done);
