"""``cosmos-ctrl``: serve a run, run everything locally, ask a controller, read a run's journals, tend its checkpoints."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from google.protobuf import json_format

from cosmos_ctrl import operations_cli
from cosmos_ctrl.config import ConfigurationError, load_config
from cosmos_ctrl.core.errors import CheckpointError
from cosmos_ctrl.exits import ExitCode
from cosmos_ctrl.v1 import controller_service_pb2
from cosmos_ctrl.v1.controller_service_pb2_grpc import ControllerServiceStub

_CALL_TIMEOUT_S = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="cosmos-ctrl", description="Consistent restarts for asynchronous RL training."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    serve = commands.add_parser("serve", help="run the controller of one execution")
    _add_config(serve)
    serve.add_argument("--ready-file", type=Path, help="write address and execution ID there, as JSON, once serving")
    serve.set_defaults(handler=_serve)

    run = commands.add_parser(
        "run", help="run the bundled application locally: controller, trainers and rollout workers"
    )
    _add_config(run)
    run.add_argument("--prompts", type=Path, help="JSON Lines with prompt and answer, instead of the bundled tasks")
    run.add_argument("--no-crash", action="store_true", help="do not kill the first execution in the middle")
    run.add_argument("--fresh", action="store_true", help="remove the run's directory first")
    run.set_defaults(handler=_run)

    state = commands.add_parser("resume-state", help="what a running controller resumed from, as JSON")
    state.add_argument("address", help="host:port")
    state.set_defaults(handler=_resume_state)

    report = commands.add_parser("report", help="count what the executions of a run skipped, repeated and redid")
    report.add_argument("directory", type=Path, help="the run's directory, with journals")
    report.set_defaults(handler=_report)

    operations_cli.add_commands(commands)

    demo = commands.add_parser("demo", help="a crash and a resume through the core alone, without torch, in seconds")
    demo.set_defaults(handler=_demo)

    options = parser.parse_args(arguments)
    handler = options.handler
    try:
        return int(handler(options))
    except ConfigurationError as error:
        print(f"cosmos-ctrl: {error}", file=sys.stderr)
        return ExitCode.CONFIGURATION
    except KeyboardInterrupt:
        print("cosmos-ctrl: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="TOML file; the environment overrides it")


def _serve(options: argparse.Namespace) -> int:
    from cosmos_ctrl import server

    config = load_config(options.config, environment=os.environ)
    _log_to_stderr()
    try:
        application = server.prompts_application(config)
    except (ImportError, OSError, ValueError) as error:
        raise ConfigurationError(str(options.config or "configuration"), [str(error)]) from error

    def ready(ready: server.Ready) -> None:
        print(
            f"cosmos-ctrl: run {config.run.name}, execution {ready.execution_number} ({ready.execution_id}), "
            f"serving on {ready.address}, {ready.phase}",
            file=sys.stderr,
        )
        if options.ready_file is not None:
            server.write_ready_file(options.ready_file, ready)

    try:
        return asyncio.run(server.serve(config, application, on_ready=ready))
    except CheckpointError as error:
        print(f"cosmos-ctrl: cannot resume: {error}", file=sys.stderr)
        return ExitCode.CANNOT_RESUME
    except OSError as error:
        print(f"cosmos-ctrl: {error}", file=sys.stderr)
        return ExitCode.ERROR


def _run(options: argparse.Namespace) -> int:
    from cosmos_worker.local import launcher

    return launcher.main(options)


def _resume_state(options: argparse.Namespace) -> int:
    with grpc.insecure_channel(options.address) as channel:
        try:
            response = ControllerServiceStub(channel).GetResumeState(
                controller_service_pb2.GetResumeStateRequest(), timeout=_CALL_TIMEOUT_S, wait_for_ready=False
            )
        except grpc.RpcError as error:
            print(f"cosmos-ctrl: {options.address}: {error.code().name}: {error.details()}", file=sys.stderr)
            return ExitCode.ERROR
    print(json_format.MessageToJson(response, preserving_proto_field_name=True))
    return ExitCode.ENDED


def _report(options: argparse.Namespace) -> int:
    from cosmos_ctrl.audit import audit

    try:
        report = audit(options.directory)
    except (OSError, ValueError) as error:
        print(f"cosmos-ctrl: {error}", file=sys.stderr)
        return ExitCode.ERROR
    print(json.dumps(report.to_json(), indent=2))
    return ExitCode.ENDED


def _demo(_options: argparse.Namespace) -> int:
    from cosmos_ctrl.demo import main as demo

    return demo()


def _log_to_stderr() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


if __name__ == "__main__":
    sys.exit(main())
