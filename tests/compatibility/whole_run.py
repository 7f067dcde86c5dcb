"""A client of any version, and a whole run that it plays: two trainer ranks and a rollout worker, every RPC, to the end."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from versions import SERVICE, Version

DEADLINE_S = 20.0


class Client:
    """Calls with one version's messages."""

    def __init__(self, address: str, version: Version, finish: Callable[[Any], Any] = lambda message: message) -> None:
        """`finish` is applied to every request before it goes out."""
        self.channel = grpc.insecure_channel(address)
        self.version, self.finish = version, finish

    def _method(self, rpc: str, kind: str) -> Any:
        answer = self.version.response_type(rpc)
        return getattr(self.channel, kind)(
            f"/{SERVICE}/{rpc}", lambda message: self.finish(message).SerializeToString(), answer.FromString
        )

    def call(self, rpc: str, **fields: Any) -> Any:
        """A unary RPC."""
        return self._method(rpc, "unary_unary")(self.version.request(rpc, **fields), timeout=DEADLINE_S)

    def down(self, rpc: str, **fields: Any) -> list[Any]:
        """A server's stream, whole."""
        return list(self._method(rpc, "unary_stream")(self.version.request(rpc, **fields), timeout=DEADLINE_S))

    def both(self, rpc: str, requests: Iterator[dict[str, Any]]) -> Iterator[Any]:
        """A bidirectional stream."""
        messages = (self.version.request(rpc, **fields) for fields in requests)
        return self._method(rpc, "stream_stream")(messages, timeout=DEADLINE_S)


class Peer:
    """One worker."""

    def __init__(self, client: Client, role: str, rank: int = 0, world_size: int = 1) -> None:
        self.client, self.rank = client, rank
        answer = client.call(
            "RegisterWorker",
            role=f"ROLE_{role}",
            group="policy" if role == "TRAINER" else "pool",
            rank=rank,
            world_size=world_size,
            incarnation=secrets.token_hex(16),
        )
        assert answer.session_id
        assert answer.limits.max_batch_completions
        self.leader = answer.leader
        # Told by the answer, and pinned from now on.
        self.identity = {"execution_id": answer.header.execution_id, "session_id": answer.session_id}
        self.batches = self.requests = 0

    def call(self, rpc: str, **fields: Any) -> Any:
        """A fenced RPC."""
        return self.client.call(rpc, worker=self.identity, **fields)

    def submit(self, **content: Any) -> Any:
        """The next batch, which is acknowledged."""
        self.batches += 1
        batch = {"number": self.batches, **content}
        answer = self.call("SubmitReports", acked_through=self.batches - 1, batch=batch)
        assert answer.ack.applied == self.batches
        return answer

    def lease(self, most: int) -> list[Any]:
        """Groups to generate."""
        self.requests += 1
        return list(self.call("LeasePrompts", number=self.requests, max_groups=most, wait={"seconds": 5}).groups)


def completed(groups: list[Any]) -> dict[str, Any]:
    """Rows that complete them, each completion with a payload that says which it is."""
    return {
        "outcome": "OUTCOME_COMPLETED",
        "groups": [group.group for group in groups],
        "leases": [group.lease for group in groups],
        "masks": [group.masks[0] for group in groups],
        "lowest_versions": [0] * len(groups),
        "highest_versions": [0] * len(groups),
        "rewards": [0.5] * (2 * len(groups)),
        "payload_codec": "bytes",
        "payloads": [f"{group.group}:{index}".encode() for group in groups for index in range(2)],
    }


class WholeRun:
    """Plays `controller_process.SETTINGS` to its end: 8 groups of 2 completions, 2 a step, a checkpoint after each."""

    def __init__(self, client: Client, run: Path) -> None:
        self.client, self.run = client, run
        self.trained: list[str] = []

    def play(self) -> Any:
        """The whole of it; returns the END command."""
        client = self.client
        state = client.call("GetResumeState")
        assert not state.HasField("metadata"), "the run is fresh"
        self.trainers = [Peer(client, "TRAINER", rank, 2) for rank in range(2)]
        assert [trainer.leader for trainer in self.trainers] == [True, False]
        self.rollout = Peer(client, "ROLLOUT")
        agreed = [
            trainer.call("ConfirmResume", fresh={}, artifact_names=[f"policy-{trainer.rank}.pt"]).agreed
            for trainer in self.trainers
        ]
        assert agreed == [False, True]
        number = step = 0
        while True:
            number += 1
            answers = [trainer.call("NextCommand", number=number, wait={"seconds": 0}) for trainer in self.trainers]
            kinds = {answer.WhichOneof("command") for answer in answers}
            if kinds == {None}:  # no work yet
                number -= 1
                step += 1
                self.generate(step)
                continue
            (kind,) = kinds
            if kind == "end":
                break
            {"train": self.train, "save": self.save}[kind](number, [getattr(answer, kind) for answer in answers])
        self.look()
        for peer in (*self.trainers, self.rollout):
            peer.submit(end={"reason": "done"})
        return answers[0].end

    def generate(self, step: int) -> None:
        """Two groups; by turns over the unary RPC and over the stream, and one of them is given back first."""
        rollout = self.rollout
        (first,) = rollout.lease(1)
        back = {"outcome": "OUTCOME_RETURNED", "groups": [first.group], "leases": [first.lease], "masks": first.masks}
        rollout.submit(rollouts=[back], metrics=[{"name": "tokens_per_second", "value": 1.5}])
        groups = rollout.lease(2)
        assert first.group in [group.group for group in groups]
        if step % 2:
            rollout.submit(rollouts=[completed(groups)])
            return
        rollout.batches += 1
        batch = {"number": rollout.batches, "rollouts": [completed(groups)]}
        # The same again is the same batch, and a message without one a heartbeat.
        sent = [{"worker": rollout.identity, "batch": one} for one in (batch, batch, None)]
        answers = list(rollout.client.both("StreamReports", iter(sent)))
        assert [answer.ack.applied for answer in answers] == [rollout.batches] * 3

    def train(self, number: int, commands: list[Any]) -> None:
        """A TRAIN command on every rank."""
        for trainer, command in zip(self.trainers, commands, strict=True):
            parts = self.client.down("FetchPayloads", worker=trainer.identity, command=number)
            groups = [group for part in parts for group in part.groups]
            assert [group.group for group in groups] == list(command.groups)
            for group in groups:
                got = [(one.inline, one.reward) for one in group.completions]
                assert got == [(f"{group.group}:{index}".encode(), 0.5) for index in range(2)]
            report = {"command": number, "completed_training_step": command.step, "optimizer_updates": 1}
            if trainer.leader:
                self.trained += [group.prompt_key for group in groups]
                rows = {"groups": command.groups, "words": command.words, "masks": command.masks}
                report["rows"] = [{"disposition": "DISPOSITION_TRAINED", **rows}]
            trainer.submit(completions=[report])

    def save(self, number: int, commands: list[Any]) -> None:
        """A SAVE command on every rank; the last one commits it."""
        states = []
        for trainer, command in zip(self.trainers, commands, strict=True):
            path = self.run / command.path / f"policy-{trainer.rank}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            content = f"rank {trainer.rank} at step {command.completed_training_steps}".encode()
            path.write_bytes(content)
            receipt = {
                "name": path.name,
                "size_bytes": len(content),
                "digest": f"sha256:{hashlib.sha256(content).hexdigest()}",
                "completed_training_steps": command.completed_training_steps,
                "completed_optimizer_updates": command.completed_optimizer_updates,
                "rank": trainer.rank,
                "execution_number": command.execution_number,
                "execution_id": trainer.identity["execution_id"],
                "checkpoint_id": command.checkpoint_id,
            }
            answer = trainer.call("ReportShards", command=number, receipts={"receipts": [receipt]})
            states.append(answer.state)
        committed = answer.DESCRIPTOR.fields_by_name["state"].enum_type.values_by_name["SAVE_STATE_COMMITTED"].number
        assert states[-1] == committed
        assert answer.manifest_digest.startswith("sha256:")

    def look(self) -> None:
        """What anyone may ask, at the end; and a stop that comes too late to matter."""
        (state,) = self.client.down("WatchRun")
        assert state.state.trained_completions == 16
        listed = self.client.call("ListCheckpoints", page_size=3)
        assert len(listed.checkpoints) == 3
        assert self.client.call("ListCheckpoints", page_token=listed.next_page_token).checkpoints
        assert self.client.call("ExplainResume").candidates[0].checkpoint == listed.checkpoints[0]
        workers = self.client.call("ListWorkers").workers
        assert [worker.group for worker in workers] == ["pool", "policy", "policy"]
        stopped = self.client.call(
            "RequestStop", worker={"execution_id": self.rollout.identity["execution_id"]}, reason="late"
        )
        assert "budget" in stopped.reason
