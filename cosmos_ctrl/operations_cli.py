"""``cosmos-ctrl ls``, ``explain``, ``inspect``, ``verify``, ``gc``, ``import``: what an operator types, and what is printed.

Results go to standard output, as a table or, with ``--json``, as one JSON object with stable keys; progress and warnings to standard
error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from cosmos_ctrl import operations
from cosmos_ctrl.checkpoints.damage import record_damage
from cosmos_ctrl.checkpoints.discovery import OnCorrupt
from cosmos_ctrl.checkpoints.imports import import_checkpoint
from cosmos_ctrl.checkpoints.retention import Decision, RetentionPolicy, perform, plan
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.checkpoints.stores.opening import parse_location
from cosmos_ctrl.checkpoints.survey import survey
from cosmos_ctrl.config import load_config
from cosmos_ctrl.core.errors import CheckpointError
from cosmos_ctrl.exits import ExitCode

_LS = """\
Everything below RUN/checkpoints: the committed checkpoints, newest first (by execution number, then step: what an automatic resume
goes by), then the rest.

  newest      what an automatic resume takes
  kept        committed; WHY says what keeps it
  due         committed; the next gc with these options deletes it
  damaged     committed; not what it was, by names, sizes and records of damage (verify reads the bytes)
  deleting    its deletion has begun; it cannot be resumed from
  unfinished  never committed: a save in progress, or what is left of one
  swept       never committed, and cleared; its name stays taken, so that nobody publishes there late
  foreign     not made by a controller of this run, or unreadable: never touched"""

_EXPLAIN = """\
Every checkpoint and unfinished save of RUN, as an automatic resume (train.resume = true) looks at them now: which is chosen, and why each
other one is not. Exits with 1 when nothing may be chosen, though something is there. Settings of the run are not compared: those a controller
knows (ExplainResume asks it).

  chosen        what is resumed from
  older         committed, and a newer one is chosen
  uncommitted   no manifest: passed over
  damaged       not what was committed, by names, sizes, manifest and records of damage
  deleting      its deletion has begun
  incompatible  of a schema that this version does not know
  unreadable    its storage does not answer: it may be the newest, so nothing else is taken"""

_GC = """\
Deletes what the policy does not keep, and clears the unfinished saves of executions that are over. Safe while a controller runs: the
newest execution counts as live, so its unfinished saves, and what it resumed from, are not touched. Without a policy nothing committed
is deleted. Never deleted: the newest checkpoint, anything foreign. Interrupted or failed deletions are finished by the next gc.

  cosmos-ctrl gc runs/math --keep-last 3 --dry-run     what would go, and why the rest stays
  cosmos-ctrl gc runs/math --keep-last 3 --keep-every 1000"""

_VERIFY = """\
Reads every byte of a checkpoint, or of all committed checkpoints of a run, and compares it with the manifest. Exits with 15 when something
is not what was committed, and names it. With --record a damaged checkpoint is marked in RUN/damaged, and the next start errs or passes
it over, as checkpoints.on_corrupt says; remove the record once the artifact is restored."""


_IMPORT = """\
Reads a checkpoint that cosmos-rl's manifest helper committed (its manifest.json has schema_version 1, metadata, compatibility and
artifacts), copies its files into RUN/checkpoints, verifies every byte of the copies, and commits them there. The original is not changed.
The new checkpoint is of execution 0, so each one that an execution of RUN saves is newer. Its compatibility is the original's: a run whose
settings differ, or are said in other keys, refuses it and names them. It records no topology: the first resume takes checkpoints.reshard = true."""


_RUN = "the run's directory, or its URI in an object store"


def add_commands(commands: Any) -> None:
    """Add the parsers of all these commands."""
    ls = _command(commands, "ls", "the checkpoints of a run, and what becomes of each", _LS, _ls)
    ls.add_argument("run", type=_location, help=_RUN)
    _add_policy(ls)

    explain = _command(commands, "explain", "what an automatic resume takes, and why nothing else", _EXPLAIN, _explain)
    explain.add_argument("run", type=_location, help=_RUN)
    explain.add_argument("--config", type=Path, help="TOML file whose checkpoints.on_corrupt counts")
    explain.add_argument(
        "--on-corrupt", choices=get_args(OnCorrupt), help="what is done about damage at the newest end"
    )

    inspect = _command(commands, "inspect", "one checkpoint: manifest, artifacts, lineage", None, _inspect)
    inspect.add_argument("checkpoint", type=_location, help="the checkpoint's directory or URI")

    verify = _command(commands, "verify", "read every byte of a checkpoint, or of all of a run", _VERIFY, _verify)
    verify.add_argument(
        "path", type=_location, metavar="RUN|CHECKPOINT", help="directory or URI of a run, or of a checkpoint"
    )
    verify.add_argument("--threads", type=int, help="artifacts read at once; three per CPU if not given")
    verify.add_argument("--record", action="store_true", help="mark what is damaged, for the next start")

    gc = _command(commands, "gc", "delete what a policy does not keep, and what dead executions left", _GC, _gc)
    gc.add_argument("run", type=_location, help=_RUN)
    gc.add_argument("--dry-run", action="store_true", help="print the plan and change nothing")
    _add_policy(gc)

    adopt = _command(commands, "import", "take in a checkpoint of cosmos-rl's manifest helper", _IMPORT, _import)
    adopt.add_argument("source", type=Path, help="the directory with its manifest.json")
    adopt.add_argument("run", type=Path, help="the run's directory; made if it is not there")


def _command(
    commands: Any, name: str, summary: str, text: str | None, handler: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=text or summary, formatter_class=raw
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(handler=_told(handler))
    return parser


def _add_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="TOML file whose checkpoints.keep_last and keep_every count")
    parser.add_argument("--keep-last", type=int, metavar="N", help="keep the newest N sound checkpoints; 0: all")
    parser.add_argument("--keep-every", type=int, metavar="K", help="and those whose step is a multiple of K, for ever")


def _told(handler: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """The handler, with what is wrong with a checkpoint or its storage told in a sentence."""

    def handle(options: argparse.Namespace) -> int:
        try:
            return handler(options)
        except (CheckpointError, ModuleNotFoundError) as error:
            print(f"cosmos-ctrl: {error}", file=sys.stderr)
            return ExitCode.ERROR

    return handle


def _location(text: str) -> str:
    """A directory, or the URI of an object store."""
    try:
        parse_location(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _policy(options: argparse.Namespace) -> RetentionPolicy:
    given = {"keep_last": options.keep_last, "keep_every": options.keep_every}
    overrides = {"checkpoints": {name: value for name, value in given.items() if value is not None}}
    return load_config(options.config, environment=os.environ, overrides=overrides).checkpoints.retention()


# -- ls


def _ls(options: argparse.Namespace) -> int:
    listed = operations.list_run(operations.open_run(options.run), _policy(options))
    if options.json:
        print(json.dumps(listed, indent=2))
        return ExitCode.ENDED
    header = ("PATH", "EXECUTION", "STEP", "SIZE", "PARENT", "STATE", "WHY")
    rows = [
        (
            row["path"],
            str(row["execution"] or "-"),
            "-" if row["step"] is None else str(row["step"]),
            readable_size(row["size_bytes"]),
            row["parent"][:8] or "-",
            row["state"],
            row["why"],
        )
        for row in listed["checkpoints"]
    ]
    print_table(header, rows)
    return ExitCode.ENDED


def print_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Columns as wide as they have to be; the last one is not padded."""
    table = [header, *rows]
    widths = [max(len(row[at]) for row in table) for at in range(len(header) - 1)]
    for row in table:
        padded = [text.ljust(width) for text, width in zip(row, widths, strict=False)]
        print("  ".join([*padded, row[-1]]).rstrip())


def readable_size(size: int) -> str:
    """Bytes, for people: 999 B, 1.0 KiB, 3.2 GiB."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{size} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


# -- explain


def _explain(options: argparse.Namespace) -> int:
    store = operations.open_run(options.run)
    overrides = {"checkpoints": {"on_corrupt": options.on_corrupt}} if options.on_corrupt else {}
    policy = load_config(options.config, environment=os.environ, overrides=overrides).checkpoints.on_corrupt
    explained = operations.explain_run(store, policy)
    if options.json:
        print(json.dumps(explained, indent=2))
    else:
        rows = [
            (
                row["path"],
                str(row["execution"] or "-"),
                "-" if row["step"] is None else str(row["step"]),
                row["verdict"],
                row["why"],
            )
            for row in explained["candidates"]
        ]
        print_table(("PATH", "EXECUTION", "STEP", "VERDICT", "WHY"), rows)
        fresh = "a fresh start: nothing was ever committed"
        refused = f"nothing, and ends: {explained['failure']}"
        print(f"\nAn automatic resume takes {refused if explained['failure'] else explained['chosen'] or fresh}")
    return ExitCode.ERROR if explained["failure"] else ExitCode.ENDED


# -- inspect


def _inspect(options: argparse.Namespace) -> int:
    split = operations.split_checkpoint(options.checkpoint)
    if split is None:
        print(f"cosmos-ctrl: {options.checkpoint}: no checkpoint's directory; ls shows those of a run", file=sys.stderr)
        return ExitCode.ERROR
    known = operations.inspect(*split)
    if options.json:
        print(json.dumps(known, indent=2))
        return ExitCode.ENDED
    artifacts, lineage = known.pop("artifacts"), known.pop("lineage")
    state = known.pop("sampler_state")
    known["sampler_state"] = f"{readable_size(state['size_bytes'])} of {state['codec']}"
    known["size_bytes"] = readable_size(known["size_bytes"])
    for key, value in known.items():
        plain = value if isinstance(value, str) else json.dumps(value)
        print(f"{key:28} {plain or '-'}")
    print("\nartifacts")
    rows = [
        (
            f"  {a['name']}",
            readable_size(a["size_bytes"]),
            a["group"] or "-",
            str(a["rank"] if a["rank"] is not None else "-"),
            a["digest"],
        )
        for a in artifacts
    ]
    print_table(("  NAME", "SIZE", "GROUP", "RANK", "DIGEST"), rows)
    print("\nlineage" if lineage else "\nlineage: its execution started fresh")
    for ancestor in lineage:
        where = ancestor["path"] or "not in this run any more"
        at = "" if ancestor["path"] is None else f" (execution {ancestor['execution']}, step {ancestor['step']})"
        print(f"  {ancestor['checkpoint_id'][:8]}  {where}{at}")
    return ExitCode.ENDED


# -- verify


def _verify(options: argparse.Namespace) -> int:
    split = operations.split_checkpoint(options.path)
    if split is None:
        store = operations.open_run(options.path)
        paths = operations.verifiable(store)
    else:
        store, paths = split[0], [split[1]]
    results: list[dict[str, Any]] = []
    found: list[operations.Problem] = []
    for at, path in enumerate(paths, 1):
        progress = _Progress(f"verifying {path} ({at} of {len(paths)})")
        problems = operations.verify(store, path, threads=options.threads, on_bytes=progress)
        found += problems
        for problem in problems if options.record else ():
            if problem.readable:
                what = f"{problem.what} expected {problem.expected}, found {problem.found}, by cosmos-ctrl verify"
                record_damage(store, path, problem.artifact, what)
        results.append({"path": path, "sound": not problems, "problems": [asdict(problem) for problem in problems]})
    if options.json:
        print(json.dumps({"run": store.uri, "checkpoints": results}, indent=2))
    else:
        _print_verified(results)
    if any(problem.readable for problem in found):
        return ExitCode.DAMAGE_FOUND
    return ExitCode.ERROR if found else ExitCode.ENDED


class _Progress:
    """A line at once, then one a second at most."""

    def __init__(self, what: str) -> None:
        self._what, self._said = what, time.monotonic()
        print(what, file=sys.stderr)

    def __call__(self, through: int, whole: int) -> None:
        if time.monotonic() - self._said >= 1.0:
            self._said = time.monotonic()
            print(f"{self._what}: {readable_size(through)} of {readable_size(whole)}", file=sys.stderr)


def _print_verified(results: list[dict[str, Any]]) -> None:
    for result in results:
        print(f"{result['path']}: {'sound' if result['sound'] else 'NOT what was committed'}")
        for problem in result["problems"]:
            print(
                f"  {problem['artifact']}: {problem['what']} expected {problem['expected']}, found {problem['found']}"
            )
    if not results:
        print("no committed checkpoint")


# -- import


def _import(options: argparse.Namespace) -> int:
    store = LocalStore(options.run)
    path, manifest = import_checkpoint(store, options.source)
    if options.json:
        print(json.dumps({"run": store.uri, "path": path, "manifest_digest": manifest.digest()}, indent=2))
    else:
        size = readable_size(manifest.total_bytes)
        print(f"{path}: step {manifest.metadata.completed_training_steps}, {len(manifest.artifacts)} artifacts, {size}")
    return ExitCode.ENDED


# -- gc


def _gc(options: argparse.Namespace) -> int:
    store, policy = operations.open_run(options.run), _policy(options)
    run = survey(store)
    decisions = plan(run, policy)
    deleted: list[Decision] = []
    if options.dry_run:
        outcome = {"dry_run": True, "live_execution": run.live, "plan": [_planned(decision) for decision in decisions]}
        _print_gc(options, outcome, decisions, "would be")
        return ExitCode.ENDED
    done = perform(store, run, decisions, on_deleted=deleted.append)
    outcome = {
        "dry_run": False,
        "live_execution": run.live,
        "retired": list(done.retired),
        "swept": list(done.swept),
        "failures": [asdict(failure) for failure in done.failures],
        "superseded": done.superseded,
    }
    _print_gc(options, outcome, deleted, "is")
    for failure in done.failures:
        print(f"cosmos-ctrl: {failure.path} is not deleted: {failure.why}", file=sys.stderr)
    if done.superseded:
        print("cosmos-ctrl: a newer execution has claimed this run meanwhile: run gc again", file=sys.stderr)
        return ExitCode.SUPERSEDED
    return ExitCode.ERROR if done.failures else ExitCode.ENDED


def _planned(decision: Decision) -> dict[str, str]:
    return {"path": decision.holding.path, "action": decision.action, "why": decision.why}


def _print_gc(options: argparse.Namespace, outcome: dict[str, Any], decisions: Iterable[Decision], verb: str) -> None:
    if options.json:
        print(json.dumps(outcome, indent=2))
        return
    decisions = list(decisions)
    if not decisions:
        print("there is nothing" if options.dry_run else "nothing was to be deleted")
    words = {"retire": f"{verb} deleted", "sweep": f"{verb} swept", "keep": "stays"}
    for decision in decisions:
        print(f"{decision.holding.path}: {words[decision.action]}: {decision.why}")
