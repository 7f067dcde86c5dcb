"""The controller as a process: claims, discovers, opens its port, restores, serves, ends.

* Order: the port is bound, the execution number claimed, the checkpoint discovered and pinned, the port served (everything answers
  RESTORING), the sampler restored. Health says SERVING from then on.
* The first SIGTERM, SIGINT or SIGUSR1 finishes issued updates, saves at the real step and ends; a second one ends at once
  and publishes nothing.
* Two controllers on one port are an error, not a surprise.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cosmos_ctrl.checkpoints.adapter import ManifestAdapter
from cosmos_ctrl.checkpoints.claims import claim_execution, pin_resume
from cosmos_ctrl.checkpoints.compatibility import TOPOLOGY, Topology
from cosmos_ctrl.checkpoints.digests import parse_digest
from cosmos_ctrl.checkpoints.discovery import list_checkpoints, path_in_run
from cosmos_ctrl.checkpoints.names import check_artifact_names
from cosmos_ctrl.checkpoints.stores import Store
from cosmos_ctrl.checkpoints.stores.opening import open_store, probe_conditional_puts
from cosmos_ctrl.checkpoints.window import RECORD_NAME, read_record
from cosmos_ctrl.config import Config
from cosmos_ctrl.core.agreement import Resumed
from cosmos_ctrl.core.controller import Controller
from cosmos_ctrl.core.errors import ResumeMetadataMismatch, UnsafeNameError
from cosmos_ctrl.core.execution import ExecutionIdentity
from cosmos_ctrl.core.ledger import SamplingBoundary
from cosmos_ctrl.core.replay import Doubt, Replay, ReplayRecord, restore
from cosmos_ctrl.core.resume import ControllerResumeAdapter, ControllerResumeMetadata, require_count
from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.core.sampling import Prompt, ResumeRequest, Sampling, TrainRequest, load_resume_metadata
from cosmos_ctrl.exits import ExitCode
from cosmos_ctrl.journal import Journal, journal_path
from cosmos_ctrl.prompts import read_prompts
from cosmos_ctrl.service.guard import Guard
from cosmos_ctrl.service.runtime import RunInfo, Runtime
from cosmos_ctrl.service.servicer import ControllerServicer
from cosmos_ctrl.v1 import controller_service_pb2
from cosmos_ctrl.v1.controller_service_pb2_grpc import add_ControllerServiceServicer_to_server

_log = logging.getLogger(__name__)

_SERVICE = controller_service_pb2.DESCRIPTOR.services_by_name["ControllerService"].full_name
_HEALTH_NAMES = ("", _SERVICE)
_TICK_S = 0.25
_STORAGE_S = 30.0
"""How long a publication may outlast its execution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """What the application brings: its sampler, its prompts, and how they are restored."""

    sampler: Any
    """Yields an index per draw; has ``state_dict`` unless a batch sampler owns the position."""
    batch_sampler: Any = None
    """Yields a list of indices per draw, and owns the position if given."""
    prompt_of: Callable[[Any], Prompt]
    """The prompt of an index."""
    prompt_by_key: Callable[[str], Prompt] | None = None
    """The prompt of a key, KeyError for one that is unknown; due with ``replay.reissue_recorded``."""
    budget_completions: int
    """Completions that a fresh run issues in all."""
    adapter: ControllerResumeAdapter | None
    """How it resumes; `ManifestAdapter` for checkpoints that are committed by a manifest. None: a legacy controller, which
    has no execution ID and no fence, claims nothing and publishes nothing."""
    compatibility: Mapping[str, Any] = field(default_factory=dict)
    """What a resumed run must share with the one that saved: plain JSON values. The topology of the trainers is the configuration's, and is
    recorded and compared beside it."""

    def __post_init__(self) -> None:
        """Raises ValueError when `compatibility` has the controller's own key."""
        if TOPOLOGY in self.compatibility:
            raise ValueError(f"compatibility has the key {TOPOLOGY!r}, which the controller writes; choose another one")


@dataclass(frozen=True, slots=True)
class Ready:
    """What is known once the port is open."""

    address: str
    execution_number: int
    execution_id: str
    pid: int
    phase: str
    end: str
    """Why it is over already, if it is: there was nothing to do."""
    resumed_from: str
    """Path of the checkpoint; empty for a fresh run."""


def prompts_application(config: Config) -> Application:
    """The application that needs no code: a prompts file and a seekable sampler.

    Raises:
        OSError, ValueError: the prompts file cannot be used, or no budget is configured.
    """
    section = config.sampling
    if not section.prompts:
        raise ValueError("sampling.prompts = '': name a prompts file, JSON Lines")
    if (section.epochs is None) == (section.completions is None):
        given = f"sampling.epochs = {section.epochs}, sampling.completions = {section.completions}"
        raise ValueError(f"{given}: the budget needs exactly one of them")
    if config.checkpoints.owner == "application":
        raise ValueError(
            "checkpoints.owner = 'application': only the application finds its own checkpoints again, so it starts the controller "
            "with cosmos_ctrl.server.serve and an adapter of its own"
        )
    dataset = read_prompts(Path(section.prompts))
    prompts, n_generation = dataset.prompts, config.rollout.n_generation
    compatibility = {
        "dataset": dataset.fingerprint,
        "sampler": {"kind": "seekable", "shuffle": section.shuffle, "seed": section.seed},
        "n_generation": n_generation,
        "application": config.checkpoints.compatibility,
    }
    return Application(
        sampler=SeekableSampler(len(prompts), shuffle=section.shuffle, seed=section.seed),
        prompt_of=prompts.__getitem__,
        prompt_by_key={prompt.key: prompt for prompt in prompts}.__getitem__,
        budget_completions=section.completions or (section.epochs or 0) * len(prompts) * n_generation,
        compatibility=compatibility,
        adapter=ManifestAdapter(
            open_store(config.location),
            compatibility=compatibility,
            on_corrupt=config.checkpoints.on_corrupt,
        ),
    )


async def serve(config: Config, application: Application, *, on_ready: Callable[[Ready], None]) -> ExitCode:
    """Run one execution to its end.

    Args:
        config: validated.
        application: the sampler and how it is restored.
        on_ready: called once the port is open and the sampler restored.

    Raises:
        CheckpointError: there is a checkpoint to resume from, and it cannot be used.
        OSError: the port is taken, or the run's directory cannot be used.
    """
    servicer, health_servicer = ControllerServicer(), health.aio.HealthServicer()
    await _say_health(health_servicer, health_pb2.HealthCheckResponse.NOT_SERVING)
    server = _server(config, servicer, health_servicer)
    # Bound before the claim: a start that cannot have its port must not supersede who has it.
    port = _listen(server, config)
    with ExitStack() as closing:
        try:
            opened = _open_run(config, application)
            journal = None
            if config.run.journal:
                journal = Journal(journal_path(config.directory, opened.identity.number))
                closing.callback(journal.close)
            await server.start()
            runtime = await _restore_run(config, application, opened, journal)
            closing.enter_context(_rare_collections())
            # In place before anyone is told whom to signal, and until the very end.
            signals = _Signals(runtime)
            closing.callback(signals.restore)
            servicer.attach(runtime)
            await _say_health(health_servicer, health_pb2.HealthCheckResponse.SERVING)
            lifecycle = runtime.controller.lifecycle
            on_ready(
                Ready(
                    address=f"{config.server.host}:{port}",
                    execution_number=opened.identity.number,
                    execution_id=opened.identity.id,
                    pid=os.getpid(),
                    phase=lifecycle.phase,
                    end=lifecycle.end[1] if lifecycle.end else "",
                    resumed_from=opened.metadata.checkpoint_path if opened.metadata else "",
                )
            )
            await _run_to_end(runtime, config.server.linger_s, signals)
            await _say_health(health_servicer, health_pb2.HealthCheckResponse.NOT_SERVING)
            return _exit_code(runtime)
        finally:
            await server.stop(grace=1.0)


def write_ready_file(path: Path, ready: Ready) -> None:
    """Tell who started this process where it listens: one JSON object, whole or absent."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    values = {name: getattr(ready, name) for name in Ready.__slots__}
    temporary.write_text(json.dumps(values), encoding="utf-8")
    temporary.replace(path)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A run that is claimed, and what was discovered in it."""

    store: Store | None
    """None for legacy."""
    identity: ExecutionIdentity
    sampling: Sampling
    metadata: ControllerResumeMetadata | None


def _open_run(config: Config, application: Application) -> _Opened:
    """Claim the next execution number, then discover what to resume from, then pin it: from then on nobody deletes it.

    Raises:
        ValueError: the configuration asks for what the application does not have.
    """
    if config.replay.reissue_recorded and application.prompt_by_key is None:
        raise ValueError(
            "replay.reissue_recorded = true: the application has no prompt_by_key to find the prompts with"
        )
    sampling = Sampling(
        application.sampler,
        application.batch_sampler,
        prompt_of=application.prompt_of,
        completions_per_prompt=config.rollout.n_generation,
    )
    if application.adapter is None:
        _log.info("a legacy controller: no execution ID, no fence, nothing is published")
        return _Opened(None, ExecutionIdentity(0, ""), sampling, None)
    store, execution_id = open_store(config.location), secrets.token_hex(16)
    probe_conditional_puts(store)
    note = {"host": socket.gethostname(), "pid": os.getpid(), "started_at": round(time.time(), 3)}
    number = claim_execution(store, execution_id=execution_id, note=note)
    if isinstance(application.adapter, ManifestAdapter):
        application.adapter.topology = config.topology()
    request = ResumeRequest(TrainRequest(config.train.resume, config.location))
    metadata = load_resume_metadata(application.adapter, request, owner=sampling.owner_name)
    resumed_from = _path_to_pin(store, metadata.checkpoint_path) if metadata else None
    pin_resume(store, number, execution_id=execution_id, checkpoint=resumed_from)
    _say_what_is_resumed(config, store, number, metadata)
    return _Opened(store, ExecutionIdentity(number, execution_id), sampling, metadata)


def _path_to_pin(store: Store, path: str) -> str:
    try:
        return path_in_run(store, path)
    except UnsafeNameError:
        return path  # an application's own, somewhere else


async def _restore_run(config: Config, application: Application, opened: _Opened, journal: Journal | None) -> Runtime:
    """Restore the sampler, in a thread since that may take long, and put the core over it."""
    start, replay = await asyncio.to_thread(_restore, config, application, opened)
    controller = Controller(
        config.policy(deterministic=opened.sampling.deterministic),
        opened.identity,
        opened.sampling,
        start,
        _resumed(application.adapter, opened.metadata, config.topology()),
        replay=replay,
        clock=time.monotonic,
        new_id=lambda: secrets.token_hex(16),
        record=journal.record if journal else _keep_no_journal,
        check_artifact_names=_check_declared_names,
        check_digest=parse_digest,
    )
    info = RunInfo(
        name=config.run.name,
        uri=_uri_of(config),
        sampling_owner=opened.sampling.owner_name,
        compatibility=application.compatibility,
        topology=config.topology(),
        on_corrupt=config.checkpoints.on_corrupt,
        max_record_bytes=config.replay.max_record_bytes,
        retention=config.checkpoints.retention(),
    )
    resumed, planned = controller.resumed, controller.planned_training_steps(application.budget_completions)
    if resumed is not None and resumed.horizon_training_steps not in (None, planned):
        _log.warning(
            "the run was planned for %d training steps when it began, where the configuration gives %d: its budget and its horizon stay "
            "as they were; with train.resume = false a lineage with the new ones begins",
            resumed.horizon_training_steps,
            planned,
        )
    if spared := controller.statistics().spared_completions:
        _log.info("%d completions beyond the boundary are settled already and not generated again", spared)
    return Runtime(controller, info, opened.store)


def _uri_of(config: Config) -> str:
    return config.location if config.in_object_store else str(config.directory.resolve())


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Prompts live as long as the run, and groups and reports through many requests: a collector that walks them over and over takes a
    seventh of the time, and stops everything for up to a tenth of a second."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _restore(config: Config, application: Application, opened: _Opened) -> tuple[SamplingBoundary, Replay | None]:
    sampling, adapter, metadata = opened.sampling, application.adapter, opened.metadata
    if metadata is None or adapter is None:
        return sampling.start(application.budget_completions), None
    record: ReplayRecord | Doubt | None = None
    # Switched off on purpose, a record is no news.
    wanted = config.replay.reissue_recorded or config.replay.skip_settled is not False
    if wanted and isinstance(adapter, ManifestAdapter) and adapter.found is not None:
        record = read_record(adapter.store, adapter.found, most_bytes=config.replay.max_record_bytes)
        if record is not None and config.policy(deterministic=sampling.deterministic).records_window == "nothing":
            record = Doubt(f"the {sampling.owner_name} does not declare itself deterministic")
    prompt_by_key = application.prompt_by_key if config.replay.reissue_recorded else None
    start, replay = restore(sampling, adapter, metadata, record, prompt_by_key=prompt_by_key)
    if replay.doubt:
        _log.warning("more of the window is repeated than would have to be: %s", replay.doubt)
    return start, replay


def _check_declared_names(names: tuple[str, ...]) -> None:
    check_artifact_names((*names, RECORD_NAME), path="")


async def _say_health(servicer: Any, status: Any) -> None:
    for name in _HEALTH_NAMES:  # for "" it says SERVING by itself
        await servicer.set(name, status)


def _resumed(
    adapter: ControllerResumeAdapter | None, metadata: ControllerResumeMetadata | None, topology: Topology
) -> Resumed | None:
    if metadata is None:
        return None
    found = adapter.found if isinstance(adapter, ManifestAdapter) else None
    if found is None:
        return _resumed_from_own_format(adapter, metadata)
    for key, what in topology.changes(found.manifest.compatibility).items():
        _log.info("resharding %s: %s", key, what)
    return Resumed(
        metadata=metadata,
        manifest_digest=found.manifest_digest,
        repeat_bound_completions=found.manifest.repeat_bound_completions,
        horizon_training_steps=found.manifest.horizon_training_steps,
        application_note=found.manifest.application_note,
        resharded_groups=topology.other_groups(found.manifest.compatibility),
    )


def _resumed_from_own_format(adapter: ControllerResumeAdapter | None, metadata: ControllerResumeMetadata) -> Resumed:
    """An application that owns its checkpoints keeps W and the horizon with them, and its adapter says what it kept.

    Raises:
        TypeError, ValueError: what it says is no count.
    """
    repeats = getattr(adapter, "repeat_bound_completions", None)
    if repeats is None:
        # Nobody knows what was issued beyond the boundary; more than what remains it cannot be.
        repeats = metadata.remaining_completions
        _log.warning(
            "%s does not say what may repeat (repeat_bound_completions): taken as all that remains, %d completions",
            type(adapter).__name__,
            repeats,
        )
    horizon = getattr(adapter, "horizon_training_steps", None)
    return Resumed(
        metadata=metadata,
        repeat_bound_completions=require_count("the adapter's repeat_bound_completions", repeats),
        horizon_training_steps=None
        if horizon is None
        else require_count("the adapter's horizon_training_steps", horizon),
    )


def _say_what_is_resumed(config: Config, store: Store, number: int, metadata: ControllerResumeMetadata | None) -> None:
    if metadata is not None:
        steps = metadata.completed_training_steps
        _log.info("execution %d resumes from %s at step %d", number, metadata.checkpoint_path, steps)
    elif config.train.resume is False and (held := list_checkpoints(store)):
        _log.warning(
            "execution %d starts FRESH although the run holds %d checkpoints, the newest %s: train.resume is false. "
            "It starts a lineage of its own; nothing is overwritten.",
            number,
            len(held),
            held[0].path,
        )
    else:
        _log.info("execution %d starts fresh", number)


def _server(config: Config, servicer: ControllerServicer, health_servicer: Any) -> grpc.aio.Server:
    section = config.server
    server = grpc.aio.server(
        interceptors=[Guard(_SERVICE)],
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", section.max_message_bytes),
            ("grpc.max_send_message_length", section.max_message_bytes),
            ("grpc.keepalive_time_ms", int(section.keepalive_s * 1000)),
            ("grpc.keepalive_timeout_ms", 10_000),
            # Without it a dead peer was found after a minute, whatever the keepalive timeout says.
            ("grpc.http2.ping_timeout_ms", 10_000),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            # Probing for bandwidth costs pings that small messages pay for.
            ("grpc.http2.bdp_probe", 0),
        ],
    )
    add_ControllerServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server


def _listen(server: grpc.aio.Server, config: Config) -> int:
    address = f"{config.server.host}:{config.server.port}"
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}. Is another controller there?") from error
    return port


def _keep_no_journal(_event: str, **_values: Any) -> None:
    """The run wants none."""


async def _run_to_end(runtime: Runtime, linger_s: float, signals: _Signals) -> None:
    ticking = asyncio.create_task(runtime.tick_forever(_TICK_S))
    over = asyncio.create_task(runtime.over.wait())
    try:
        controller = runtime.controller
        runtime.settle()  # it may be over before anyone came
        await asyncio.wait({ticking, over}, return_when=asyncio.FIRST_COMPLETED)
        if ticking.done():
            ticking.result()
        if controller.lifecycle.end is not None:
            _log.info("the execution is over: %s: %s", *controller.lifecycle.end)
        await _linger(runtime, linger_s, signals)
        try:
            await asyncio.wait_for(runtime.finish_effects(), _STORAGE_S)
        except asyncio.TimeoutError:
            # A thread hangs in the storage, and Python would wait for it for ever.
            _log.error("the storage did not answer for %.0f s; leaving without it", _STORAGE_S)
            logging.shutdown()
            os._exit(_exit_code(runtime))
    finally:
        ticking.cancel()
        over.cancel()


async def _linger(runtime: Runtime, linger_s: float, signals: _Signals) -> None:
    """Wait until every worker has heard of the end. One that is over from the start, or before its ranks agreed because of what one of them
    restored, waits for its trainer ranks to come and ask, however early others come; a signal ends that. One that failed otherwise does not
    wait for ranks that never came."""
    loop = asyncio.get_running_loop()
    controller, deadline = runtime.controller, loop.time() + linger_s
    nobody_asks = controller.lifecycle.end is not None and controller.lifecycle.end[0] == "STOP_REQUESTED"
    expected = controller.commands.ranks if controller.tells_latecomers else ()
    while (left := deadline - loop.time()) > 0:
        came = list(controller.workers) and all(
            controller.workers.at(rank) or rank in controller.turned_away for rank in expected
        )
        if controller.everyone_knows and (nobody_asks or signals.after_the_end or came):
            return
        await runtime.revisions.beyond(runtime.revisions.current, left)


class _Signals:
    """The first signal stops the run well, the second at once."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._loop = asyncio.get_running_loop()
        self._numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        self._seen = 0
        self.after_the_end = False
        for number in self._numbers:
            self._loop.add_signal_handler(number, self._handle, number)

    def _handle(self, number: signal.Signals) -> None:
        self._seen += 1
        if self._runtime.controller.lifecycle.over:
            self.after_the_end = True
            self._runtime.controller.lifecycle.touch()
        elif self._seen == 1:
            _log.info("%s: finishing issued updates, saving, ending", number.name)
            self._runtime.controller.stop(f"{number.name} to the controller")
        else:
            _log.warning("%s again: ending at once, nothing more is published", number.name)
            self._runtime.controller.fail(f"a second signal, {number.name}, ended the execution at once")
        self._runtime.settle()

    def restore(self) -> None:
        """Hand the signals back."""
        for number in self._numbers:
            self._loop.remove_signal_handler(number)


def _exit_code(runtime: Runtime) -> ExitCode:
    failure, deserters = runtime.controller.lifecycle.failure, runtime.controller.deserters
    if failure is None and deserters:
        names = ", ".join(map(str, deserters))
        _log.error("a rank asked for the stop, and %s did not hear of the end: it may have died before", names)
        return ExitCode.FAILED
    if failure is None:
        return ExitCode.ENDED
    if runtime.superseded:
        return ExitCode.SUPERSEDED
    if runtime.damage_recorded:
        return ExitCode.DAMAGE_FOUND
    return ExitCode.RESUME_MISMATCH if isinstance(failure, ResumeMetadataMismatch) else ExitCode.FAILED
