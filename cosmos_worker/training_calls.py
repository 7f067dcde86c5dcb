"""The calls of a trainer rank, one each, synchronous: what `Trainer` does is what these say.

* A call is sent again until it is answered, under the same number and with the same content.
* Payloads are fetched whole: a stream that breaks off is fetched from its beginning.
"""

from __future__ import annotations

import grpc

from cosmos_ctrl.core.errors import RetryLaterError
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_worker.client import Connection
from cosmos_worker.commands import TrainGroup, TrainWork, groups_of
from cosmos_worker.errors import DeadlineError
from cosmos_worker.faults import fault_of
from cosmos_worker.report_items import EndItem, Item
from cosmos_worker.transport import duration_of


class TrainingCalls:
    """See the module."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def next_command(self, number: int) -> pb.NextCommandResponse:
        """One poll for command `number`; the answer may hold none.

        A controller that says "later" has none either: nobody waits for it longer than for a poll, since other ranks may wait
        in a collective meanwhile.
        """
        connection = self._connection
        connection.check()
        poll_s = connection.config.poll_s
        wait = duration_of(poll_s)
        try:
            return connection.call(
                connection.unary(
                    connection.stub.NextCommand,
                    lambda worker: pb.NextCommandRequest(worker=worker, number=number, wait=wait),
                    wait_s=poll_s,
                    later_total_s=poll_s,
                )
            )
        except DeadlineError as error:
            if isinstance(error.__cause__, RetryLaterError):
                return pb.NextCommandResponse()
            raise

    def fetch_payloads(self, work: TrainWork) -> list[TrainGroup]:
        """This rank's share of a command."""
        return groups_of(self._connection.call(self._fetch(work.number)), work)

    def report_shards(self, content: pb.ReportShardsRequest) -> pb.ReportShardsResponse:
        """What became of a SAVE."""

        def build(worker: pb.WorkerIdentity) -> pb.ReportShardsRequest:
            request = pb.ReportShardsRequest()
            request.CopyFrom(content)
            request.worker.CopyFrom(worker)
            return request

        connection = self._connection
        connection.check()
        # The last rank's answer comes after publication, which syncs to a disk that may be busy.
        return connection.call(connection.unary(connection.stub.ReportShards, build, wait_s=connection.config.report_s))

    def request_stop(self, reason: str, deadline_s: float | None, *, wait: bool) -> None:
        """Ask for the end."""
        connection = self._connection
        connection.check()
        work = self.ask_to_stop(reason, deadline_s)
        if wait:
            connection.call(work)
        else:
            connection.submit(work)

    async def ask_to_stop(self, reason: str, deadline_s: float | None) -> None:
        """The same, on the loop."""
        connection = self._connection
        deadline = None if deadline_s is None else duration_of(deadline_s)
        await connection.unary(
            connection.stub.RequestStop,
            lambda worker: pb.RequestStopRequest(worker=worker, reason=reason, deadline=deadline),
        )

    async def say_end(self, reason: str) -> None:
        """That this rank ends, on the loop; returns when the controller has acknowledged it."""
        reports = self._connection.reports
        place = await reports.append_waiting(EndItem(reason))
        await reports.wait_acknowledged(place, self._connection.config.report_s)

    def say(self, item: Item) -> int:
        """Queue a report, waiting for room; returns its place."""
        connection = self._connection
        return connection.call(connection.reports.append_waiting(item))

    def say_and_wait(self, item: Item) -> None:
        """Queue a report and wait for its acknowledgement.

        Raises:
            DeadlineError: it did not come within ``report_s``.
        """
        self._connection.call(self._say_and_wait(item))

    def leave(self, reason: str) -> None:
        """Say that this rank has ended, and flush."""
        self._connection.detached(self._leave(reason)).result()

    async def _say_and_wait(self, item: Item) -> None:
        reports = self._connection.reports
        place = await reports.append_waiting(item)
        await reports.wait_acknowledged(place, self._connection.config.report_s)

    async def _leave(self, reason: str) -> None:
        connection = self._connection
        try:
            if connection.terminal is None and connection.session:
                await connection.reports.append_waiting(EndItem(reason))
        finally:
            await connection.finish(flush_s=connection.config.close_s)

    async def _fetch(self, number: int) -> list[pb.FetchPayloadsResponse]:
        connection = self._connection
        patience = connection.patience()
        while True:
            session = connection.session
            call = connection.stub.FetchPayloads(
                pb.FetchPayloadsRequest(worker=connection.identity(), command=number),
                timeout=connection.config.report_s,
            )
            received = []
            try:
                async for response in call:
                    connection.check_header(response.header)
                    received.append(response)
            except grpc.RpcError as error:
                await connection.recover(fault_of(error), session, patience)
                continue
            finally:
                call.cancel()
            return received
