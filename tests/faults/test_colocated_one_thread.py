"""Colocated generation on one thread: it generates what there is, trains, and again, to the end of the run."""

from __future__ import annotations

from pathlib import Path

from controller_process import serving, write_config
from fault_model import settled_by_journal

from cosmos_worker.rollout import SyncRollout
from cosmos_worker.settings import ClientConfig
from cosmos_worker.trainer import Trainer


def test_g9_one_thread_in_both_roles_runs_to_its_end(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        train={"trainers": {"policy": 1}, "groups_per_step": 4},
        rollout={"max_staleness": 0, "announces_weights": True, "max_outstanding_groups": 4},
        # The last step has fewer groups than the thread waits for.
        sampling={"completions": 2 * 22},
    )
    limits = ClientConfig(poll_s=0.05, lease_wait_s=0.05, idle_total_s=20.0)
    with serving(config) as controller:
        environ = {"COSMOS_CTRL_ADDRESS": controller.address, "COSMOS_CTRL_EXECUTION_ID": controller.execution_id}
        with (
            Trainer.from_env(environ=environ, config=limits) as trainer,
            SyncRollout.from_env(environ=environ, config=limits) as rollout,
        ):
            trainer.resume()
            trainer.confirm(steps=0, updates=0)
            trainer.announce_weights(0, "w0")
            steps = 0
            commands = trainer.commands()

            def generate() -> None:
                for group in rollout.groups(in_flight=2, wait_s=0.2):
                    rollout.report_group(group, rewards=[1.0] * len(group.pending), versions=steps)

            generate()
            for command in commands:
                if command.is_save:
                    with trainer.save(command) as save:
                        save.open("state.pt").write(b"%d" % steps)
                    continue
                trainer.complete(command, updates=1)
                steps = command.step
                trainer.announce_weights(steps, f"w{steps}")
                generate()
            assert trainer.end_reason is not None
            assert trainer.end_reason.name == "BUDGET_EXHAUSTED"
        assert controller.exit_code() == 0, controller.log
    assert steps == 6
    assert len([1 for _, _, outcome in settled_by_journal(tmp_path / "run") if outcome == "trained"]) == 22
