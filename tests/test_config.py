"""A wrong configuration is refused before anything starts: with the key, the value and the reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cosmos_ctrl.checkpoints.compatibility import Topology
from cosmos_ctrl.checkpoints.retention import KEEP_ALL
from cosmos_ctrl.config import Config, ConfigurationError, load_config
from cosmos_ctrl.core.policy import RunPolicy


def load(text: str = "", environment: dict[str, str] | None = None, **overrides: dict[str, Any]) -> Config:
    path = Path("config.toml")
    path.write_text(text)
    return load_config(path, environment=environment or {}, overrides=overrides)


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_defaults_stand_without_a_file():
    config = load_config(None, environment={})
    assert config == load("")
    assert config.directory == Path("runs/run")
    assert config.policy().trainer_groups == (("policy", 1),)


def test_every_setting_of_the_core_is_what_the_file_says():
    config = load(
        """
        [train]
        trainers = {policy = 4, critic = 2}
        groups_per_step = 3
        max_steps = 9
        tail = "discard"
        stop_grace_s = 1.5
        gate_timeout_s = 2
        [rollout]
        max_outstanding_groups = 5
        max_buffered_bytes = 6
        min_completions_per_group = 7
        max_staleness = 8
        on_stale = "regenerate"
        poison_limit = 9
        lease_deadline_s = 10.5
        announces_weights = true
        [window]
        max_draws = 11
        max_bytes = 12
        [checkpoints]
        owner = "application"
        every_steps = 13
        save_timeout_s = 14.0
        [workers]
        session_ttl_s = 15.0
        max = 16
        max_unacknowledged_batches = 17
        max_batch_completions = 18
        """
    )
    assert config.policy() == RunPolicy(
        trainer_groups=(("policy", 4), ("critic", 2)),
        groups_per_step=3,
        max_training_steps=9,
        save_every_steps=13,
        tail="discard",
        min_completions_per_group=7,
        max_staleness=8,
        on_stale="regenerate",
        poison_limit=9,
        max_outstanding_groups=5,
        max_buffered_bytes=6,
        max_window_draws=11,
        max_window_bytes=12,
        announces_weights=True,
        application_owns_checkpoints=True,
        lease_deadline_s=10.5,
        session_ttl_s=15.0,
        gate_timeout_s=2.0,
        save_timeout_s=14.0,
        stop_grace_s=1.5,
        max_workers=16,
        max_unacknowledged_batches=17,
        max_batch_completions=18,
    )
    assert config.policy().leader == ("policy", 0)


WRONG = [
    # section, key, TOML value, the value as it is named, a word of the reason
    ("server", "prot", "1", "1", "no such key"),
    ("server", "port", "-1", "-1", "greater than or equal to 0"),
    ("server", "port", "65536", "65536", "less than or equal to 65535"),
    ("server", "port", '"80"', "'80'", "integer"),
    ("server", "port", "80.0", "80.0", "integer"),
    ("server", "port", "true", "True", "integer"),
    ("server", "max_message_bytes", "1", "1", "65536"),
    ("server", "keepalive_s", "0", "0", "greater than 0"),
    ("server", "keepalive_s", "inf", "inf", "less than or equal"),
    ("server", "keepalive_s", "1e7", "10000000.0", "less than or equal"),
    ("server", "linger_s", "-1", "-1", "greater than or equal to 0"),
    ("server", "linger_s", "inf", "inf", "less than or equal"),
    ("server", "host", "5", "5", "string"),
    ("run", "name", '""', "''", "at least 1 character"),
    ("run", "journal", "1", "1", "boolean"),
    ("run", "journal", '"yes"', "'yes'", "boolean"),
    ("train", "groups_per_step", "0", "0", "greater than or equal to 1"),
    ("train", "max_steps", "-1", "-1", "greater than or equal to 0"),
    ("train", "tail", '"drop"', "'drop'", "'train', 'discard' or 'wait'"),
    ("train", "trainers", "{}", "{}", "at least 1 item"),
    ("train", "trainers", "{policy = 0}", "0", "greater than or equal to 1"),
    ("train", "trainers", "{'' = 1}", "''", "at least 1 character"),
    ("train", "trainers", "3", "3", "dictionary"),
    ("train", "mesh", "{policy = {}}", "{}", "at least 1 item"),
    ("train", "mesh", "{policy = {dp = 0}}", "0", "greater than or equal to 1"),
    ("train", "sharding", "{policy = ''}", "''", "at least 1 character"),
    ("train", "resume", "5", "5", "boolean"),
    ("train", "resume", '""', "''", "at least 1 character"),
    ("train", "stop_grace_s", "nan", "nan", "less than or equal"),
    ("rollout", "n_generation", "0", "0", "greater than or equal to 1"),
    ("rollout", "on_stale", '"keep"', "'keep'", "'discard' or 'regenerate'"),
    ("rollout", "poison_limit", "0", "0", "greater than or equal to 1"),
    ("rollout", "lease_deadline_s", "0.0", "0.0", "greater than 0"),
    ("sampling", "seed", "-1", "-1", "greater than or equal to 0"),
    ("sampling", "epochs", "0", "0", "greater than or equal to 1"),
    ("window", "max_draws", "0", "0", "greater than or equal to 1"),
    ("checkpoints", "owner", '"me"', "'me'", "'manifest' or 'application'"),
    ("checkpoints", "on_corrupt", '"ignore"', "'ignore'", "'error' or 'previous'"),
    ("checkpoints", "every_steps", "1.5", "1.5", "integer"),
    ("checkpoints", "compatibility", "{day = 2026-11-29}", "datetime.date(2026, 11, 29)", "date"),
    ("checkpoints", "compatibility", "{rate = nan}", "nan", "finite"),
    ("workers", "session_ttl_s", "inf", "inf", "less than or equal"),
    ("workers", "max", "0", "0", "greater than or equal to 1"),
]


@pytest.mark.parametrize(("section", "key", "value", "named", "reason"), WRONG, ids=lambda value: str(value)[:24])
def test_a_wrong_value_is_refused_with_key_value_and_reason(section, key, value, named, reason):
    with pytest.raises(ConfigurationError) as caught:
        load(f"[{section}]\n{key} = {value}\n")
    text = str(caught.value)
    assert text.startswith("config.toml:\n  ")
    assert f"{section}.{key}" in text
    assert named in text
    assert reason in text
    assert "\n\n" not in text
    assert len(caught.value.problems) <= 2


def test_every_problem_is_named_at_once():
    with pytest.raises(ConfigurationError) as caught:
        load('[server]\nport = "x"\nhots = 1\n[train]\ngroups_per_step = 0\n[extra]\na = 1\n')
    assert len(caught.value.problems) == 4
    for part in (
        "server.port = 'x'",
        "server.hots = 1: no such key",
        "train.groups_per_step = 0",
        "extra = {'a': 1}: no such key",
    ):
        assert part in str(caught.value)


def test_a_value_where_a_section_is_due_is_refused():
    with pytest.raises(ConfigurationError, match=re.escape("server = 5")):
        load("server = 5\n")
    with pytest.raises(ConfigurationError, match="expected a section"):
        load("server = 5\n", {"COSMOS_CTRL__SERVER__PORT": "1"})


@pytest.mark.parametrize("text", ["[server\n", "a = \n", "[a]\n[a]\n", "x = 1\nx = 2\n"])
def test_what_is_no_toml_is_refused(text):
    with pytest.raises(ConfigurationError, match="is not TOML"):
        load(text)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path / "nothing.toml", tmp_path):
        with pytest.raises(ConfigurationError, match="cannot be read") as caught:
            load_config(path, environment={})
        assert str(path) in str(caught.value)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="is not TOML"):
        load_config(path, environment={})


# -- the environment and flags


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("SERVER__PORT", "81", lambda config: config.server.port == 81),
        ("SERVER__HOST", "0.0.0.0", lambda config: config.server.host == "0.0.0.0"),
        ("TRAIN__RESUME", "false", lambda config: config.train.resume is False),
        ("TRAIN__RESUME", "checkpoints/x", lambda config: config.train.resume == "checkpoints/x"),
        ("TRAIN__TRAINERS", "{policy = 2, critic = 1}", lambda c: c.train.trainers == {"policy": 2, "critic": 1}),
        ("RUN__NAME", "'7'", lambda config: config.run.name == "7"),
        ("RUN__NAME", "a b = c", lambda config: config.run.name == "a b = c"),
        ("TRAIN__STOP_GRACE_S", "2.5", lambda config: config.train.stop_grace_s == 2.5),
        ("APPLICATION__RATE", "1e-3", lambda config: config.application == {"rate": 1e-3, "kept": 1}),
    ],
)
def test_the_environment_overrides_the_file(name, value, read):
    text = '[server]\nport = 80\nhost = "::1"\n[train]\nresume = true\n[run]\nname = "file"\n[application]\nkept = 1\n'
    assert read(load(text, {f"COSMOS_CTRL__{name}": value}))


def test_the_trainers_keep_their_order_so_that_the_first_leads():
    config = load("", {"COSMOS_CTRL__TRAIN__TRAINERS": "{zeta = 1, alpha = 1}"})
    assert config.policy().leader == ("zeta", 0)


def test_a_wrong_value_in_the_environment_names_its_key():
    with pytest.raises(ConfigurationError, match=re.escape("server.port (from COSMOS_CTRL__SERVER__PORT) = 'many'")):
        load("", {"COSMOS_CTRL__SERVER__PORT": "many"})
    with pytest.raises(
        ConfigurationError, match=re.escape("server.prot (from COSMOS_CTRL__SERVER__PROT) = 1: no such key")
    ):
        load("", {"COSMOS_CTRL__SERVER__PROT": "1"})


@pytest.mark.parametrize(
    "name", ["COSMOS_CTRL__", "COSMOS_CTRL__SERVER", "COSMOS_CTRL__SERVER__", "COSMOS_CTRL____PORT"]
)
def test_a_variable_that_names_no_key_is_refused(name):
    with pytest.raises(ConfigurationError, match="SECTION__KEY"):
        load("", {name: "1"})


def test_other_variables_are_none_of_ours():
    assert load("", {"COSMOS_CTRL_PORT": "1", "PATH": "x", "cosmos_ctrl__server__port": "1"}) == load("")


def test_flags_override_both():
    config = load("[server]\nport = 1\n", {"COSMOS_CTRL__SERVER__PORT": "2"}, server={"port": 3})
    assert config.server.port == 3
    with pytest.raises(ConfigurationError, match=re.escape("server.port = -3")):
        load("", None, server={"port": -3})


def test_a_configuration_is_frozen():
    config = load("")
    with pytest.raises(ValueError, match="frozen"):
        config.server.port = 5


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("mesh = {policy = {dp = 2}}", "train.mesh of policy is dp 2, and train.trainers gives it 4 ranks"),
        (
            "mesh = {policy = {dp = 4, tp = 2}}",
            "train.mesh of policy is dp 4 × tp 2, and train.trainers gives it 4 ranks",
        ),
        ("mesh = {critic = {dp = 1}}", "train.mesh names critic, and train.trainers has policy"),
        ("sharding = {critic = 'fsdp2'}", "train.sharding names critic, and train.trainers has policy"),
    ],
)
def test_a_mesh_that_is_not_the_trainers_is_refused(line, reason):
    with pytest.raises(ConfigurationError, match=re.escape(reason)):
        load(f"[train]\ntrainers = {{policy = 4}}\n{line}\n")


def test_the_topology_is_what_the_trainers_are_declared_to_be():
    assert load("").topology() == Topology({"policy": {"world_size": 1}})
    config = load(
        """
        [train]
        trainers = {policy = 8, critic = 2}
        mesh = {policy = {pp = 2, dp_shard = 2, tp = 2}}
        sharding = {policy = "fsdp2", critic = "replicated"}
        [checkpoints]
        reshard = true
        """
    )
    policy = {"world_size": 8, "mesh": [["pp", 2], ["dp_shard", 2], ["tp", 2]], "sharding": "fsdp2"}
    assert config.topology() == Topology(
        {"policy": policy, "critic": {"world_size": 2, "sharding": "replicated"}}, reshard=True
    )


def test_compatibility_and_application_are_kept_as_they_are():
    values = {"text": "ä", "list": [1, 2.5, True, {"x": "y"}], "none": {}}
    lines = "\n".join(
        f"{key} = {json.dumps(value, ensure_ascii=False).replace(': ', ' = ')}" for key, value in values.items()
    )
    config = load(f"[application]\n{lines}\n[checkpoints.compatibility]\n{lines}\n")
    assert config.application == config.checkpoints.compatibility == values


def test_the_runs_directory_has_the_runs_name_unless_given():
    assert load('[run]\nname = "x"\n').directory == Path("runs/x")
    assert load('[run]\nname = "x"\ndirectory = "/elsewhere"\n').directory == Path("/elsewhere")


def test_a_variable_reaches_a_key_of_any_depth():
    config = load("", {"COSMOS_CTRL__APPLICATION__MODEL__WIDTH": "32", "COSMOS_CTRL__TRAIN__TRAINERS__POLICY": "2"})
    assert config.application == {"model": {"width": 32}}
    assert config.train.trainers == {"policy": 2}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[train]\ngroups_per_step = 96\n[rollout]\nmax_outstanding_groups = 4", "max_outstanding_groups 4"),
        ("[rollout]\nn_generation = 8\n[workers]\nmax_batch_completions = 4", "max_batch_completions 4"),
        ("[rollout]\nn_generation = 2\nmin_completions_per_group = 3", "min_completions_per_group 3"),
        ("[rollout]\nmax_staleness = 1\nannounces_weights = false", "max_staleness"),
        ('[run]\nname = "../../elsewhere"', "run.name"),
        ("[checkpoints]\nkeep_every = 5", "keep_every is 5 and keep_last 0"),
        ('[checkpoints]\nowner = "application"\nkeep_last = 2', "owner is 'application'"),
        ("[checkpoints]\nkeep_last = -1", "checkpoints.keep_last = -1"),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(text, what):
    with pytest.raises(ConfigurationError, match=what):
        load(text)


@pytest.mark.parametrize(
    ("directory", "location", "here"),
    [
        ("", "runs/x", "runs/x"),
        ("some/where/", "some/where", "some/where"),
        ("file:///some/where", "/some/where", "/some/where"),
        ("s3://bucket/some/where/", "s3://bucket/some/where", "runs/x"),
        ("gs://bucket", "gs://bucket", "runs/x"),
    ],
)
def test_a_run_lies_in_a_directory_or_a_bucket_and_what_is_appended_to_stays_here(
    directory: str, location: str, here: str
) -> None:
    config = load(f'[run]\nname = "x"\ndirectory = "{directory}"\n')
    assert (config.location, config.directory) == (location, Path(here))
    assert config.in_object_store == ("://" in location)


@pytest.mark.parametrize("directory", ["ftp://host/run", "s3://", "s3://bucket/../x"])
def test_a_run_that_can_lie_nowhere_is_refused(directory: str) -> None:
    with pytest.raises(ConfigurationError, match=r"run\.directory = "):
        load(f'[run]\ndirectory = "{directory}"\n')


def test_the_policy_of_retention_is_what_the_file_says():
    assert load().checkpoints.retention() == KEEP_ALL
    read = load("[checkpoints]\nkeep_last = 3\nkeep_every = 100").checkpoints.retention()
    assert (read.keep_last, read.keep_every) == (3, 100)
