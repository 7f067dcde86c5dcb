/** Zero where it is absent. */
export function toMilliseconds(duration) {
    return duration ? Number(duration.seconds) * 1000 + duration.nanos / 1e6 : 0;
}
export function fromMilliseconds(milliseconds) {
    return { seconds: BigInt(Math.floor(milliseconds / 1000)), nanos: (milliseconds % 1000) * 1e6 };
}
