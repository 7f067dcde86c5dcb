"""The benchmarks run and print what they promise, on small sizes; their figures are nobody's test."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_ledgers_benchmark_prints_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = load("bench_ledger")
    for name, small in {"ROUNDS": 1, "WINDOW": 64, "CALLS": 20, "LARGE_WINDOW": 1000, "MEASURED_GROUPS": 100}.items():
        assert hasattr(bench, name)
        monkeypatch.setattr(bench, name, small)
    bench.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"completions_per_s", "ratio_to_simple", "issue_us", "snapshot_us", "bytes_per_group"} <= figures.keys()
    for calls in (figures["issue_us"], figures["snapshot_us"]):
        assert calls.keys() == {"10B", "1MB", "100MB", "w10", "w1M"}


def test_both_ledgers_of_the_benchmark_come_to_the_same_boundary() -> None:
    bench = load("bench_ledger")
    back = bench.schedule(3 * bench.WINDOW, 1)
    simple, ours = bench.run_simple(back), bench.run_ledger(back, 1)
    assert simple.remaining == ours.remaining_completions
    assert simple.sampler_state == ours.sampler_state


def test_the_reports_benchmark_prints_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = load("bench_reports")
    for name, small in {
        "ROUNDS": 1,
        "ROWS": 8,
        "BATCHES": 2,
        "STEP_GROUPS": 16,
        "CLIENT_GROUPS": 16,
        "SINGLE_GROUPS": 2,
        "SINGLE_STEP_GROUPS": 4,
        "HTTP_REPORTS": {"post": 16, "keepalive": 32, "batch256": 512},
        "PAYLOADS": {"4 MiB": (4 << 20, 4)},
        "PAYLOAD_ROUNDS": 1,
        "PAYLOAD_STEP": 16 << 20,
        "PAYLOAD_STEPS": 1,
        "PAYLOAD_BUFFER": 16 << 20,
        "CROWD_PROCESSES": 1,
        "CROWD": 4,
        "CROWD_SECONDS": 1,
        "CROWD_GROUP": 1,
        "CROWD_STEP_GROUPS": 20,
    }.items():
        assert hasattr(bench, name)
        monkeypatch.setattr(bench, name, small)
    bench.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures.keys() >= {
        *("batched_completions_per_s", "batched_p99_ms", "server_us_per_completion"),
        *("ratio_http_post", "ratio_http_keepalive", "ratio_http_batch256"),
        *("single_reports_per_s", "single_ratio_http_keepalive", "single_p99_ms"),
        *("payload_ratio_to_bare_stream", "workers_1000_p99_ms", "workers_1000_cpu", "workers_1000_rss_mib"),
    }
    assert all(value > 0 for value in figures.values())


def test_the_checkpoints_benchmark_prints_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = load("bench_checkpoints")
    for name, small in {
        "ROUNDS": 1,
        "SHARD_BYTES": 4 << 20,
        "LARGE_BYTES": 8 << 20,
        "LARGE_ARTIFACTS": 4,
        "PUBLICATIONS": 2,
        "DISCOVERED": 5,
        "DISCOVERED_ARTIFACTS": 3,
    }.items():
        assert hasattr(bench, name)
        monkeypatch.setattr(bench, name, small)
    bench.main([str(tmp_path)])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures.keys() >= {
        *("save_ratio_hash_on_write", "save_ratio_vs_reread", "publish_ms", "publish_ms_100_artifacts"),
        *("verify_ratio_to_limit", "discover_1000_s"),
    }
    assert figures["publish_ms"].keys() == {"1MiB", "4GiB"}
    assert list(tmp_path.iterdir()) == []
