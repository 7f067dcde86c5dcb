"""``cosmos-worker``: the reference application's processes. Exit code 10: the execution is over for this process, for good."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from cosmos_ctrl.config import ConfigurationError, load_config, problems_of
from cosmos_worker.errors import exit_codes
from cosmos_worker.grpo.config import GrpoSettings

#: The configuration, or an argument, was refused; as with ``cosmos-ctrl``.
_EXIT_CONFIGURATION = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="cosmos-worker",
        description="Workers of the bundled application. Address and execution ID come from COSMOS_CTRL_ADDRESS and "
        "COSMOS_CTRL_EXECUTION_ID, a trainer's rank from torchrun.",
    )
    roles = parser.add_subparsers(dest="role", required=True)
    for role, text in (("trainer", "one trainer rank"), ("rollout", "one rollout worker")):
        command = roles.add_parser(role, help=text)
        command.add_argument("--config", type=Path, help="the run's TOML file; [application] is read")
        if role == "rollout":
            command.add_argument("--in-flight", type=int, default=12, help="groups generated in one batch")
    options = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = load_config(options.config, environment=os.environ)
        settings = GrpoSettings.from_dict(config.application)
    except ValidationError as error:
        refused = ConfigurationError(str(options.config or "configuration"), problems_of(error, section="application"))
        print(f"cosmos-worker: {refused}", file=sys.stderr)
        return _EXIT_CONFIGURATION
    except ConfigurationError as error:
        print(f"cosmos-worker: {error}", file=sys.stderr)
        return _EXIT_CONFIGURATION
    with exit_codes():
        if options.role == "trainer":
            from cosmos_worker.grpo.train import train

            print(train(settings, Path(config.sampling.prompts)))
        else:
            from cosmos_worker.grpo.rollout import roll_out

            asyncio.run(roll_out(settings, in_flight=options.in_flight))
    return 0


def run() -> NoReturn:
    """`main`, as a process that ends with its exit code. Left to the interpreter's own exit, gloo's threads abort it now and then, and the
    code is lost."""
    try:
        code = main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception:
        traceback.print_exc()
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
