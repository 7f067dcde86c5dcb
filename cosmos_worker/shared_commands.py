"""One fetch of commands for all ranks that must see the same: rank 0 of a process group asks and tells the others.

* What is told is bytes: a command, "none yet" (at least every poll, so that a collective never waits long), or an error,
  which every rank raises.
* Torch is imported here and nowhere else on the way to a command.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_worker.errors import WorkerError

Ask = Callable[[], pb.NextCommandResponse]


class SiblingError(WorkerError, RuntimeError):
    """The rank that asks for commands failed with an error that could not be passed on as it is."""


def shared(ask: Ask, process_group: Any) -> Ask:
    """`ask`, done by rank 0 of `process_group` for all of them.

    Args:
        ask: one poll at the controller.
        process_group: of torch.distributed; None: every rank asks for itself.
    """
    if process_group is None:
        return ask
    from torch import distributed

    if distributed.get_world_size(process_group) == 1:
        return ask
    source = distributed.get_global_rank(process_group, 0)
    asks = distributed.get_rank(process_group) == 0

    def ask_once() -> pb.NextCommandResponse:
        told: list[Any] = [_asked(ask) if asks else None]
        distributed.broadcast_object_list(told, src=source, group=process_group)
        response, failure = told[0]
        if failure is not None:
            raise pickle.loads(failure)
        message = pb.NextCommandResponse()
        message.ParseFromString(response)
        return message

    return ask_once


def _asked(ask: Ask) -> tuple[bytes, bytes | None]:
    try:
        return ask().SerializeToString(), None
    except Exception as error:
        try:
            told = pickle.dumps(error)
            pickle.loads(told)
        except Exception:
            told = pickle.dumps(SiblingError(f"{type(error).__name__}: {error}"))
        return b"", told
