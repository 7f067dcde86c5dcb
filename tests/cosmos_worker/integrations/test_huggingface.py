"""Real trainers of Hugging Face and TRL on CPU: killed, damaged, mixed up, and resumed to the bit."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from trainer_process import Trainers, require

from cosmos_ctrl.checkpoints.artifacts import measure_durably
from cosmos_ctrl.checkpoints.discovery import Found, explain, list_checkpoints
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest, publish_from_receipts
from cosmos_ctrl.checkpoints.stores.local import LocalStore

#: Each is the third save, of step 9, or a step after the second.
DEATHS = [
    "transformers:Trainer.training_step",
    "transformers:Trainer._save_optimizer_and_scheduler",
    "cosmos_worker.integrations.huggingface:CheckpointCallback.on_save",
    "cosmos_ctrl.checkpoints.driver:publish_from_receipts",
    "cosmos_ctrl.checkpoints.driver:DriverExecution._retain",
]


def committed(run: Path) -> list[Found]:
    """Newest first."""
    return list(list_checkpoints(LocalStore(run)))


def steps_of(run: Path) -> list[tuple[int, int]]:
    return [found.manifest.order for found in committed(run)]


def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


@pytest.fixture(scope="module")
def finished(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was not interrupted; not to be changed."""
    run = tmp_path_factory.mktemp("finished") / "run"
    assert trainers.run(run)["code"] == 0
    return run


def test_the_callback_changes_nothing_of_what_is_trained(
    trainers: Trainers, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    done = trainers.run(tmp_path / "run")
    assert done["resumed"] is None
    assert done["digest"] == undisturbed["digest"]
    assert steps_of(tmp_path / "run") == [(1, 12), (1, 9), (1, 6), (1, 3)]
    first, *_, last = reversed(committed(tmp_path / "run"))
    assert first.manifest.parent is None
    assert last.manifest.metadata.remaining_completions == 0
    assert (first.manifest.metadata.epoch, first.manifest.metadata.remaining_completions) == (1, 9 * 4)
    assert committed(tmp_path / "run")[0].manifest.parent is not None


@pytest.mark.parametrize("where", DEATHS)
def test_killed_at_any_point_of_a_save_it_goes_on_to_the_bit(
    trainers: Trainers, undisturbed: dict[str, Any], tmp_path: Path, where: str
) -> None:
    run, nth = tmp_path / "run", 15 if where.endswith("training_step") else 3
    assert trainers.run(run, die=[where, nth])["code"] == -signal.SIGKILL
    whole = where == DEATHS[-1]
    assert steps_of(run)[0] == (1, 9 if whole else 6)
    unfinished = [
        one for one in explain(LocalStore(run), compatibility=None, on_corrupt="error").candidates if not one.manifest
    ]
    assert [one.verdict for one in unfinished] == ([] if whole or "training_step" in where else ["uncommitted"])
    done = trainers.run(run)
    newest = next(found for found in committed(run) if found.manifest.execution_number == 1)
    assert done["resumed"] == f"{run}/{newest.path}/checkpoint-{newest.manifest.order[1]}"
    assert done["digest"] == undisturbed["digest"]
    assert done["losses"] == undisturbed["losses"], "a batch was skipped, repeated or trained on other weights"


def test_killed_again_and_again_it_arrives(trainers: Trainers, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    run, deaths = tmp_path / "run", 0
    while (done := trainers.run(run, die=["transformers:Trainer.training_step", 8]))["code"]:
        assert done["code"] == -signal.SIGKILL
        deaths += 1
        assert deaths < 10
    assert deaths == 3
    assert done["digest"] == undisturbed["digest"]
    assert [found.manifest.parent and found.manifest.parent.checkpoint_id for found in committed(run)][:-1] == [
        found.manifest.checkpoint_id for found in committed(run)
    ][1:], "one lineage"


def test_a_run_that_is_over_trains_nothing_and_a_longer_one_goes_on(trainers: Trainers, tmp_path: Path) -> None:
    # Twelve steps end within an epoch of ten, where a Trainer by itself would train one step more.
    run, args = tmp_path / "run", {"gradient_accumulation_steps": 1}
    first, again = trainers.run(run, args=args), trainers.run(run, args=args)
    assert (again["code"], again["steps"], again["digest"]) == (0, 12, first["digest"])
    assert "the run is over: step 12 of 12" in again["log"]
    assert trainers.run(run, args=args | {"save_strategy": "epoch"})["code"] == 0
    assert len(committed(run)) == 4, "what is committed was saved again"
    longer = trainers.run(run, args=args | {"max_steps": 14, "save_steps": 2})
    assert (longer["code"], longer["steps"]) == (0, 14)
    assert steps_of(run)[0] == (4, 14)


def test_damage_is_found_named_recorded_and_passed_over_only_where_chosen(
    trainers: Trainers, undisturbed: dict[str, Any], finished: Path, tmp_path: Path
) -> None:
    run = copied(finished, tmp_path)
    file = run / committed(run)[0].path / "checkpoint-12" / "optimizer.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for _ in range(2):  # found in the bytes, then in the record
        done = trainers.run(run)
        assert done["error"] == "CheckpointDamagedError"
        assert "checkpoint-12/optimizer.pt" in done["message"]
    passed = trainers.run(run, options={"on_corrupt": "previous"})
    assert Path(passed["resumed"]).name == "checkpoint-9"
    assert passed["digest"] == undisturbed["digest"]


def test_damage_that_nobody_knew_of_is_passed_over_in_one_start(
    trainers: Trainers, finished: Path, tmp_path: Path
) -> None:
    run = copied(finished, tmp_path)
    for found in committed(run)[:2]:
        file = run / found.path / f"checkpoint-{found.manifest.order[1]}" / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    passed = trainers.run(run, options={"on_corrupt": "previous"})
    assert Path(passed["resumed"]).name == "checkpoint-6"


def test_a_state_of_another_checkpoint_is_refused_though_its_digest_fits(
    trainers: Trainers, finished: Path, tmp_path: Path
) -> None:
    run = copied(finished, tmp_path)
    newest, before, *_ = committed(run)
    checkpoint = LocalStore(run).within(newest.path)
    state = run / newest.path / "checkpoint-12" / "trainer_state.json"

    def commit_again(changed: dict[str, Any]) -> None:
        state.write_text(json.dumps(changed))
        (run / newest.path / "manifest.json").unlink()
        old = newest.manifest
        measured = measure_durably(checkpoint, old.artifacts, algorithm="sha256", threads=1)
        publish_from_receipts(
            checkpoint,
            CheckpointManifest(
                metadata=old.metadata,
                artifacts=measured,
                compatibility=old.compatibility,
                execution_number=old.execution_number,
                execution_id=old.execution_id,
                parent=old.parent,
            ),
        )

    own = json.loads(state.read_text())
    commit_again(json.loads((run / before.path / "checkpoint-9" / "trainer_state.json").read_text()))
    done = trainers.run(run)
    assert done["error"] == "ArtifactForeignError"
    assert "checkpoint-12/trainer_state.json belongs elsewhere: steps expected 12, found 9" in done["message"]
    shutil.rmtree(run / "damaged")
    commit_again(own | {"global_step": 11})
    done = trainers.run(run)
    assert "global_step expected 12, found 11" in done["message"]


def test_a_named_checkpoint_is_that_one_or_an_error(
    trainers: Trainers, undisturbed: dict[str, Any], finished: Path, tmp_path: Path
) -> None:
    run = copied(finished, tmp_path)
    for missing in ("checkpoints/e0007-s00000003-0a0a0a0a", str(run / "checkpoints/none/checkpoint-3")):
        done = trainers.run(run, resume=missing)
        assert done["error"] == "CheckpointNotFoundError"
    third = committed(run)[2]
    named = f"{run}/{third.path}/checkpoint-6"
    done = trainers.run(run, resume=named)
    assert (done["resumed"], done["digest"]) == (named, undisturbed["digest"])


def test_nothing_there_is_a_fresh_start_that_is_said_and_resume_off_starts_beside_what_is_there(
    trainers: Trainers, undisturbed: dict[str, Any], finished: Path, tmp_path: Path
) -> None:
    run = copied(finished, tmp_path)
    before = {found.path: found.manifest_digest for found in committed(run)}
    done = trainers.run(run, resume=False)
    assert "starts fresh because resume is off; the run holds 4 checkpoints" in done["log"]
    assert (done["resumed"], done["digest"]) == (None, undisturbed["digest"])
    after = {found.path: found.manifest_digest for found in committed(run)}
    assert before.items() < after.items()
    # Of the two lineages one is newer; the other's checkpoint of the same step is not what was chosen.
    newest = committed(run)[0]
    assert newest.manifest.order == (2, 12)
    other = next(found for found in committed(run) if found.manifest.order == (1, 12))
    done = trainers.run(run, give=f"{run}/{other.path}/checkpoint-12")
    assert done["error"] == "ResumeMetadataMismatch"
    assert "checkpoint_id" in done["message"]
    assert "global_step" not in done["message"]


def test_what_resume_chose_has_to_be_given_to_train(trainers: Trainers, finished: Path, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    done = trainers.run(run, forget=True)
    assert done["error"] == "ResumeMetadataMismatch"
    for wrong in ("unasked", "twice"):
        done = trainers.run(run, **{wrong: True})
        assert done["error"] == "UsageError"
        assert "call resume() of the CheckpointCallback before each train()" in done["message"]
    stray = tmp_path / "stray"
    done = trainers.run(stray, give=f"{run}/{committed(run)[0].path}/checkpoint-12")
    assert done["error"] == "ResumeMetadataMismatch"
    assert not committed(stray)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"args": {"per_device_train_batch_size": 4}}, "train_batch_size"),
        ({"args": {"accelerator_config": {"even_batches": False}}}, "even_batches"),
        ({"args": {"seed": 12}}, "seed"),
        ({"sequences": 19}, "train_dataset_length"),
        ({"options": {"compatibility": {"dataset": "sha256:aa"}}}, "dataset"),
    ],
)
def test_another_place_in_the_data_is_refused_by_name(
    trainers: Trainers, finished: Path, tmp_path: Path, change: dict[str, Any], key: str
) -> None:
    done = trainers.run(copied(finished, tmp_path), **change)
    assert done["error"] == "CheckpointIncompatibleError"
    assert re.search(rf"not compatible with this run\W.*\b{key}\b", done["message"]), done["message"]


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"args": {"save_total_limit": 2}}, "save_total_limit=2: it deletes by name and time"),
        ({"args": {"save_only_model": True}}, "save_only_model=True"),
        ({"args": {"ignore_data_skip": True, "auto_find_batch_size": True}}, "auto_find_batch_size=True"),
        ({"args": {"save_on_each_node": True, "enable_jit_checkpoint": True}}, "enable_jit_checkpoint=True"),
        ({"options": {"compatibility": {"seed": 1}}}, "compatibility has the key 'seed'"),
        ({"options": {"keep_every": 2}}, "keep_every is 2 and keep_last 0"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused_before_anything_is_claimed(
    trainers: Trainers, tmp_path: Path, task: dict[str, Any], said: str
) -> None:
    done = trainers.run(tmp_path / "run", **task)
    assert done["error"] == "ValueError"
    assert said in done["message"]
    assert not (tmp_path / "run" / "executions").exists()


def test_an_order_that_cannot_be_restored_is_refused_before_the_first_step(trainers: Trainers, tmp_path: Path) -> None:
    for args in (
        {"train_sampling_strategy": "group_by_length"},
        {"accelerator_config": {"use_seedable_sampler": False}},
    ):
        done = trainers.run(tmp_path / "run", args=args)
        assert done["error"] == "UsageError"
        assert "depends on more than seed and epoch" in done["message"]


def test_another_order_of_the_same_data_is_refused(trainers: Trainers, finished: Path, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    for change, key in (({"reseed": 5}, "seed"), ({"streaming": True}, "train_dataset_length")):
        done = trainers.run(run, args={"max_steps": 15}, **change)
        assert done["error"] in ("ResumeMetadataMismatch", "CheckpointIncompatibleError")
        assert re.search(rf"\b{key}\b", done["message"]), done["message"]
    assert steps_of(run)[0] == (1, 12)


def test_a_stream_is_killed_and_goes_on_to_the_bit(trainers: Trainers, tmp_path: Path) -> None:
    task = {"streaming": True, "sequences": 50}
    expected = trainers.run(tmp_path / "expected", callback=False, **task)
    died = trainers.run(tmp_path / "run", die=["transformers:Trainer.training_step", 17], **task)
    assert died["code"] == -signal.SIGKILL
    done = trainers.run(tmp_path / "run", **task)
    assert Path(done["resumed"]).name == "checkpoint-6"
    assert done["digest"] == expected["digest"]
    # Twenty sequences are five steps: the Trainer would take step 6 for one of the first pass, and find nothing there.
    short = trainers.run(tmp_path / "short", streaming=True)
    assert short["error"] == "UsageError"
    assert "the stream ended before max_steps" in short["message"]
    assert steps_of(tmp_path / "short") == [(1, 3)]


def test_checkpoints_that_were_saved_without_the_callback_are_not_passed_over_in_silence(
    trainers: Trainers, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert trainers.run(run, callback=False)["code"] == 0
    done = trainers.run(run)
    assert done["error"] == "UsageError"
    assert "holds checkpoint-12, checkpoint-3" in done["message"]
    assert not (run / "executions").exists()
    assert trainers.run(run, resume=False)["code"] == 0
    assert Path(trainers.run(run)["resumed"]).name == "checkpoint-12"


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "cosmos_worker.integrations.huggingface", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"cosmos-ctrl\[huggingface\]"):
        importlib.import_module("cosmos_worker.integrations.huggingface")


def test_retention_keeps_the_newest_and_what_the_run_resumed_from(trainers: Trainers, tmp_path: Path) -> None:
    run = tmp_path / "run"
    killed = trainers.run(run, options={"keep_last": 1}, die=["transformers:Trainer.training_step", 15])
    assert killed["code"] == -signal.SIGKILL
    assert steps_of(run) == [(1, 6)]
    trainers.run(run, options={"keep_last": 1})
    assert steps_of(run) == [(2, 12), (1, 6)]


def test_the_best_model_is_found_again_after_a_kill(trainers: Trainers, tmp_path: Path) -> None:
    args = {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "learning_rate": 3.0,
        "lr_scheduler_type": "constant",
    }
    expected = trainers.run(tmp_path / "expected", args=args)
    assert Path(expected["best"]).name != "checkpoint-12", "the last is not the best, or this shows nothing"
    run = tmp_path / "run"
    assert trainers.run(run, args=args, die=["transformers:Trainer.training_step", 21])["code"] == -signal.SIGKILL
    done = trainers.run(run, args=args)
    assert Path(done["best"]).name == Path(expected["best"]).name
    assert done["digest"] == expected["digest"]
    refused = trainers.run(run, args=args, options={"keep_last": 1})
    assert "the best checkpoint might be deleted" in refused["message"]


def test_a_superseded_execution_commits_nothing_more(trainers: Trainers, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = trainers.run(run, supersede=8)
    assert done["error"] == "SupersededError"
    assert "execution 1 of" in done["message"]
    assert steps_of(run) == [(1, 6), (1, 3)]


def test_two_ranks_are_killed_in_a_save_and_go_on_to_the_bit(trainers: Trainers, tmp_path: Path) -> None:
    expected = trainers.ranks(tmp_path / "expected", 2, callback=False)
    assert expected[0]["digest"] == expected[1]["digest"]
    run = tmp_path / "run"
    # Rank 1 dies before its random state is saved: rank 0 has its files, and must not commit them.
    died = trainers.ranks(run, 2, die=["transformers:Trainer._save_rng_state", 3], die_on=1)
    assert died[1]["code"] == -signal.SIGKILL
    assert died[0]["code"] == 1
    assert steps_of(run) == [(1, 6), (1, 3)]
    refused = trainers.run(run)
    assert re.search(r"not compatible with this run\W.*\bworld_size\b", refused["message"]), refused["message"]
    done = trainers.ranks(run, 2)
    assert [one["digest"] for one in done] == [one["digest"] for one in expected]
    assert [one["resumed"] for one in done] == [f"{run}/{committed(run)[2].path}/checkpoint-6"] * 2
    newest = committed(run)[0].manifest
    assert {"checkpoint-12/rng_state_0.pth", "checkpoint-12/rng_state_1.pth"} <= newest.artifacts.keys()
    assert newest.order == (3, 12)


def test_each_machine_makes_durable_what_its_ranks_wrote_before_anything_is_published(
    trainers: Trainers, tmp_path: Path
) -> None:
    run, machines = tmp_path / "run", {"places": [[0, 1], [0, 2], [1, 2]], "slow_on": 2, "args": {"max_steps": 3}}
    # The first rank of the second machine dies in it.
    died = trainers.ranks(run, 3, die=["cosmos_ctrl.checkpoints.durable:fsync_file", 1], die_on=1, **machines)
    assert died[1]["code"] == -signal.SIGKILL
    assert not committed(run)
    first, second, third = trainers.ranks(run, 3, **machines)
    assert {"rng_state_1.pth", "rng_state_2.pth"} <= set(second["synced"]), "not all of its ranks had written"
    assert "rng_state_2.pth" not in third["synced"]
    assert first["code"] == second["code"] == third["code"] == 0
    assert steps_of(run) == [(2, 3)]


def test_machines_that_do_not_share_the_directory_commit_nothing(trainers: Trainers, tmp_path: Path) -> None:
    run, machines = tmp_path / "run", {"places": [[0, 1], [0, 1]], "args": {"max_steps": 3}}
    first, second = trainers.ranks(run, 2, directories={"1": str(tmp_path / "elsewhere")}, **machines)
    assert (first["error"], second["error"]) == ("RankFailedError", "UsageError")
    assert "one directory that all machines share" in second["message"]
    assert not committed(run)


def test_what_fails_on_one_rank_fails_on_all(trainers: Trainers, tmp_path: Path) -> None:
    first, second = trainers.ranks(tmp_path / "run", 2, supersede=5)
    assert first["error"] == "SupersededError"
    assert second["error"] == "RankFailedError"
    assert "rank 0: SupersededError: execution 1 of" in second["message"]
    first, second = trainers.ranks(tmp_path / "run", 2, resume="checkpoints/none")
    assert (first["error"], second["error"]) == ("CheckpointNotFoundError", "RankFailedError")


def test_trl_fine_tuning_is_killed_and_goes_on_to_the_bit(trainers: Trainers, tmp_path: Path) -> None:
    require("trl")
    expected = trainers.run(tmp_path / "expected", trainer="sft", callback=False)
    died = trainers.run(tmp_path / "run", trainer="sft", die=["transformers:Trainer.training_step", 5])
    assert died["code"] == -signal.SIGKILL
    done = trainers.run(tmp_path / "run", trainer="sft")
    assert Path(done["resumed"]).name == "checkpoint-3"
    assert done["digest"] == expected["digest"]


def test_trl_grpo_is_killed_in_its_second_epoch_and_no_prompt_is_skipped(trainers: Trainers, tmp_path: Path) -> None:
    require("trl")
    # A generation serves two steps, an epoch has four; saves are asked for after every step.
    args = {
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 1,
        "save_steps": 1,
        "num_train_epochs": 2,
        "max_steps": -1,
    }
    expected = trainers.run(tmp_path / "expected", trainer="grpo", args=args, callback=False)
    prompts = [prompt for batch in expected["told"] for prompt in batch]
    assert sorted(prompts[:16]) == sorted(prompts[16:])
    assert prompts[:16] != prompts[16:], "the epochs have one order, or this shows nothing"
    run = tmp_path / "run"
    died = trainers.run(run, trainer="grpo", args=args, die=["transformers:Trainer.training_step", 8])
    assert died["code"] == -signal.SIGKILL
    assert steps_of(run) == [(1, 6), (1, 4), (1, 2)], "saved in the midst of a generation"
    done = trainers.run(run, trainer="grpo", args=args)
    assert done["told"] == expected["told"][3:]
    assert done["digest"] == expected["digest"]
    cut = trainers.run(tmp_path / "cut", trainer="grpo", args=args | {"max_steps": 3})
    assert cut["steps"] == 3
    assert steps_of(tmp_path / "cut") == [(1, 3), (1, 2)]
    longer = trainers.run(tmp_path / "cut", trainer="grpo", args=args)
    assert longer["error"] == "UsageError"
    assert "in the midst of a generation" in longer["message"]


def test_the_script_of_the_docs_is_killed_and_ends_as_the_one_before(trainers: Trainers, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "integrate.md").read_text()
    found = re.search(r"^```diff finetune.py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    said = []
    for side in "-+":
        script = tmp_path / f"finetune{side}.py"
        script.write_text("".join(line[1:] for line in found[1].splitlines(keepends=True) if line[0] in (" ", side)))
        if side == "+":
            died = trainers.run(tmp_path / side, script=str(script), die=["transformers:Trainer.training_step", 7])
            assert died["code"] == -signal.SIGKILL
        done = trainers.run(tmp_path / side, script=str(script))
        assert done["code"] == 0, done["log"]
        said.append(done["log"].splitlines()[-1])
    assert said[0].startswith("steps 12 weight ")
    assert said[0] == said[1]
    assert steps_of(tmp_path / "+" / "runs" / "finetune") == [(2, 12), (2, 8), (1, 4)]
