"""The package's names, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import cosmos_ctrl.samplers


def test_every_name_is_there() -> None:
    for name in cosmos_ctrl.samplers.__all__:
        assert getattr(cosmos_ctrl.samplers, name).__name__ == name
        assert name in dir(cosmos_ctrl.samplers)
    with pytest.raises(AttributeError, match=r"no attribute 'Sampler'; it has ReplayedIterable"):
        _ = cosmos_ctrl.samplers.Sampler  # type: ignore[attr-defined]


def test_torch_is_imported_only_for_what_needs_it() -> None:
    code = """
import sys
from cosmos_ctrl.samplers import ReplayedIterable, SeekableSampler, StatefulSampler, dataset_fingerprint
dataset_fingerprint(["a", 1, {"b": 2.0}])
owner = StatefulSampler(SeekableSampler(3))
for item in owner:
    owner.state_dict()
for item in ReplayedIterable([1]):
    pass
print(sorted({"torch", "torchdata", "datasets", "numpy"} & set(sys.modules)))
import cosmos_ctrl.samplers
cosmos_ctrl.samplers.RestorableLoader
print("torch" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert out.stdout.split("\n")[:2] == ["[]", "True"]
