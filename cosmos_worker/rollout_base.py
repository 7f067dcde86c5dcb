"""What both faces of a rollout worker share: everything that neither waits nor blocks.

* Made from the environment, with explicit arguments winning.
* A method here takes completions from the lease book and makes the item to queue; the faces queue it, and wait in their own
  ways when the report window is full.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cosmos_ctrl.core.errors import WindowFullError
from cosmos_ctrl.v1 import reports_pb2
from cosmos_worker import rollout_reports
from cosmos_worker.client import Connection
from cosmos_worker.errors import UsageError
from cosmos_worker.lease_book import LeasedGroup, LeaseStatistics
from cosmos_worker.lease_loop import Announced, FreeCallback, Leasing
from cosmos_worker.report_items import MetricItem, RolloutItem
from cosmos_worker.rollout_reports import Versions
from cosmos_worker.settings import REPLICA, ClientConfig, Endpoint, WorkerPlace, count_from
from cosmos_worker.window import WindowStatistics

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

WeightsCallback = Callable[[int, str], Any]
"""Called with a version and its handle; returns when generation uses it. The asynchronous face also takes a coroutine function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStatistics:
    """A rollout worker at a moment."""

    leases: LeaseStatistics
    reports: WindowStatistics
    weights_version: int | None
    """Loaded; None before the first."""


class RolloutBase:
    """What both faces share: everything that neither waits nor blocks."""

    def __init__(
        self,
        endpoint: Endpoint,
        place: WorkerPlace,
        *,
        on_weights: WeightsCallback | None = None,
        on_free: FreeCallback | None = None,
        config: ClientConfig | None = None,
        **connection: Any,
    ) -> None:
        """See `from_env`, which most programs use."""
        self._leasing = Leasing(on_free)
        self._on_weights = on_weights
        self._loaded: int | None = None
        self._connection = Connection(
            endpoint,
            place,
            config=config,
            on_notice=self._leasing.on_notice,
            on_over=self._leasing.book.cancel_all,
            **connection,
        )
        self._leasing.bind(self._connection)

    @classmethod
    def from_env(
        cls,
        *,
        on_weights: WeightsCallback | None = None,
        on_free: FreeCallback | None = None,
        group: str = "rollout",
        replica: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        address: str | None = None,
        execution_id: str | None = None,
        config: ClientConfig | None = None,
        environ: Mapping[str, str] | None = None,
        **connection: Any,
    ) -> Self:
        """From the environment; an argument wins over its variable.

        Args:
            on_weights: ``(version, handle)``, called when newer weights were announced, before the groups that need them.
            on_free: ``(group, completions)``, called on a thread of its own when payloads kept by handle may be freed.
            group: the rollout pool.
            replica: the replica within it; else COSMOS_CTRL_REPLICA, else 0.
            rank: the reporting rank within the replica; else RANK, else 0.
            world_size: reporting ranks in the replica; else WORLD_SIZE, else 1.
            address: ``host:port`` of the controller; else COSMOS_CTRL_ADDRESS.
            execution_id: the execution this process was launched for; else COSMOS_CTRL_EXECUTION_ID, else the one it is told first.
            config: limits.
            environ: instead of the process's environment.

        Raises:
            ValueError: there is no address, or a value cannot be read.
        """
        environ = os.environ if environ is None else environ
        place = WorkerPlace(
            role="rollout",
            group=group,
            replica=count_from(environ, REPLICA, 0) if replica is None else replica,
            rank=count_from(environ, "RANK", 0) if rank is None else rank,
            world_size=count_from(environ, "WORLD_SIZE", 1) if world_size is None else world_size,
        )
        endpoint = Endpoint.find(address=address, execution_id=execution_id, environ=environ)
        return cls(endpoint, place, on_weights=on_weights, on_free=on_free, config=config, **connection)

    @property
    def weights(self) -> Announced | None:
        """Newest announced weights; None before the first, and where the run announces none."""
        return self._leasing.weights

    @property
    def execution_id(self) -> str:
        """The execution this process belongs to; empty with a legacy controller."""
        return self._connection.execution_id

    def metric(self, name: str, value: float) -> None:
        """Show operators a number with this worker, such as "tokens_per_second". Dropped while the window is full."""
        self._connection.check()
        try:
            self._connection.reports.append(MetricItem(name, float(value)))
        except WindowFullError:
            _log.debug("metric %s dropped: the report window is full", name)

    def statistics(self) -> RolloutStatistics:
        """A snapshot."""
        return RolloutStatistics(
            leases=self._leasing.book.statistics(),
            reports=self._connection.reports.statistics(),
            weights_version=self._loaded,
        )

    # --- for the faces ---

    def _next(self) -> LeasedGroup | Announced | None:
        """Weights to load, else a group, else None: nothing now."""
        self._connection.check()
        weights = self._leasing.weights if self._on_weights is not None else None
        newer = weights is not None and (self._loaded is None or weights.version > self._loaded)
        if newer and self._leasing.book.has_waiting:
            return weights
        return self._leasing.book.pop()

    def _completed(
        self,
        group: LeasedGroup,
        mask: int,
        payloads: Sequence[Any],
        rewards: Sequence[float],
        versions: Versions,
        codec: str | None,
    ) -> RolloutItem | None:
        span = rollout_reports.span_of(versions, announced=self._connection.weights_announced)
        item = rollout_reports.completed(group, mask, payloads, rewards, span, codec)
        return item if self._take(group, mask) else None

    def _given_up(
        self, group: LeasedGroup, index: int | None, outcome: reports_pb2.Outcome.ValueType, reason: str
    ) -> RolloutItem | None:
        rollout_reports.require_reason(outcome, reason)
        mask = self._take(group, None if index is None else 1 << index)
        return rollout_reports.given_up(group, mask, outcome, reason) if mask else None

    def _take(self, group: LeasedGroup, mask: int | None) -> int:
        self._connection.check()
        return self._leasing.book.take(group, mask)

    def _whole(self, group: LeasedGroup, rewards: Sequence[float], payloads: Sequence[Any] | None) -> int:
        count = len(group.pending)
        if len(rewards) != count or (payloads is not None and len(payloads) != count):
            raise UsageError(
                f"group {group.group_id} has {count} pending completions: give so many rewards, and payloads or None"
            )
        return sum(1 << index for index in group.pending)

    def _try(self, group: LeasedGroup, item: RolloutItem) -> bool:
        """Queue without waiting; False: the window is full."""
        try:
            self._connection.reports.append(item)
        except WindowFullError:
            return False
        except Exception:
            self._leasing.book.undo(group, item.mask)
            raise
        return True

    def _leave_reason(self, error: BaseException | None) -> str:
        if error is None:
            return "done" if self._leasing.exhausted else "left"
        return f"{type(error).__name__}: {error}"
