"""The connection cut at every message of an exchange, in both directions: each report is applied once, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

from fault_model import state_of
from fault_proxy import Cut, Direction, Proxy
from fault_scene import Reporter, Scene, scene

from cosmos_worker.rollout import SyncRollout
from cosmos_worker.settings import ClientConfig

#: A worker that loses no time: only what it says is of interest here.
CONFIG = ClientConfig(lease_wait_s=0.05, backoff_first_s=0.01, backoff_max_s=0.05, silence_s=5.0, close_s=20.0)

#: Bytes between the cuts that are made beside those at the frames.
STRIDE = 36


def payload_of(replica: int) -> bytes:
    return f"the payload of replica {replica}".encode() * 8


def exchange(house: Scene, replica: int, *cuts: Cut) -> Proxy:
    """Register, lease, report, hear the ack, end, over connections that are cut; the model knows what has to come of it."""
    with Proxy(house.controller.address) as proxy:
        proxy.plan(*cuts)
        with SyncRollout.from_env(environ=house.environ(proxy.address), replica=replica, config=CONFIG) as rollout:
            group = next(rollout.groups(in_flight=1))
            count = len(group.pending)
            house.model.leased([group.group_id])
            rollout.report_group(group, rewards=[1.0] * count, payloads=[payload_of(replica)] * count)
            rollout.flush()
            house.model.reported([group.group_id])
        house.expected[group.group_id] = [payload_of(replica)] * count
    return proxy


def places_of(proxy: Proxy) -> list[Cut]:
    """Where to cut: at the end of every frame of a call, a byte before and after it, and at every stride in between."""
    (recorders,) = proxy.recorders
    found: list[Cut] = []
    for direction in ("up", "down"):
        recorder = recorders[direction]
        places = {end + around for end in recorder.ends for around in (-1, 0, 1)}
        places.update(range(1, recorder.seen, STRIDE))
        found += [Cut(direction, place) for place in sorted(places)]
    return found


def next_prefetch(house: Scene) -> None:
    """A worker may have leased one group more, and has given it back: the only thing that depends on its speed."""
    issued = (house.model.budget - state_of(house.controller).remaining_completions) // house.model.size
    if issued == len(house.model.issued) + 1:
        following = max(house.model.issued) + 1
        house.model.leased([following])
        house.model.given_back([following])


def test_g6_a_connection_cut_anywhere_in_an_exchange_applies_every_report_once(tmp_path: Path) -> None:
    with scene(tmp_path, 480, train={"groups_per_step": 64}) as house:
        quiet = exchange(house, 0)
        next_prefetch(house)
        house.model.check(house.controller)
        cuts = places_of(quiet)
        made: dict[Direction, int] = {"up": 0, "down": 0}
        for replica, cut in enumerate(cuts, start=1):
            # Every third exchange is cut again, somewhere in what follows.
            again = [Cut(cut.direction, 1 + replica * 37 % 900)] if replica % 3 == 0 else []
            proxy = exchange(house, replica, cut, *again)
            next_prefetch(house)
            house.model.check(house.controller)
            if cut in proxy.made:
                made[cut.direction] += 1
        # An exchange varies by a few bytes, so a cut behind its last message may find nothing to cut.
        assert made["up"] + made["down"] > 0.9 * len(cuts)
        assert len(cuts) > 100
        finish(house)


def finish(house: Scene) -> None:
    """Everything that was reported trains, with the very payloads, and the journal has each once."""
    rest = Reporter(house)
    while groups := rest.lease(64):
        payload = payload_of(-1)
        for group in groups:
            house.expected[group.group] = [payload] * house.model.size
        rest.report(groups, payloads=[payload] * len(groups) * house.model.size)
    house.train_to_the_end()
    rest.end()
    assert house.controller.exit_code() == 0, house.controller.log
    assert house.payloads == house.expected
    house.check_audit()
