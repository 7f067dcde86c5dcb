"""The state of the execution, as a thread of the launcher sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc

from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1.controller_service_pb2_grpc import ControllerServiceStub

_CALL_TIMEOUT_S = 5.0


class RunWatch:
    """Follows WatchRun until the controller is gone. The newest state is in `state`; each one is offered to `on_state`."""

    def __init__(self, address: str, on_state: Callable[[pb.RunState], None]) -> None:
        self._channel = grpc.insecure_channel(address)
        self._stub = ControllerServiceStub(self._channel)
        self._on_state = on_state
        self.state: pb.RunState | None = None
        self._thread = threading.Thread(target=self._follow, name="watch-run", daemon=True)
        self._thread.start()

    def workers(self) -> list[pb.Worker]:
        """The worker table; empty when the controller does not answer."""
        try:
            return list(self._stub.ListWorkers(pb.ListWorkersRequest(), timeout=_CALL_TIMEOUT_S).workers)
        except grpc.RpcError:
            return []

    def close(self) -> None:
        """Stop following."""
        self._channel.close()
        self._thread.join(_CALL_TIMEOUT_S)

    def _follow(self) -> None:
        try:
            for response in self._stub.WatchRun(pb.WatchRunRequest()):
                self.state = response.state
                self._on_state(response.state)
        except (grpc.RpcError, ValueError):
            return  # the controller is gone, or the channel was closed: whoever waits for it sees the process
