"""Every sampler that a user brings, as an owner of the sampling position that can be restored.

Importing this package needs neither torch nor datasets; a name that needs them imports them when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cosmos_ctrl.core.samplers import SeekableSampler
    from cosmos_ctrl.samplers.fingerprints import dataset_fingerprint
    from cosmos_ctrl.samplers.loaders import RestorableLoader
    from cosmos_ctrl.samplers.replays import ReplayedIterable
    from cosmos_ctrl.samplers.stateful import StatefulSampler
    from cosmos_ctrl.samplers.torch_samplers import RestorableSampler

__all__ = [
    "ReplayedIterable",
    "RestorableLoader",
    "RestorableSampler",
    "SeekableSampler",
    "StatefulSampler",
    "dataset_fingerprint",
]

_MODULES = {
    "ReplayedIterable": "cosmos_ctrl.samplers.replays",
    "RestorableLoader": "cosmos_ctrl.samplers.loaders",
    "RestorableSampler": "cosmos_ctrl.samplers.torch_samplers",
    "SeekableSampler": "cosmos_ctrl.core.samplers",
    "StatefulSampler": "cosmos_ctrl.samplers.stateful",
    "dataset_fingerprint": "cosmos_ctrl.samplers.fingerprints",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
