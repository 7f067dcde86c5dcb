"""A copy of a training state in memory, for a save that is written while training goes on.

* It shares nothing with what it was copied from: a step that is taken afterwards never reaches it.
* Tensors are detached and in CPU memory, of the same strides; those that share a storage share one in the copy too.
* Everything else is copied deeply. Its tensors, where an object of the application's holds any, stay on their device.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from cosmos_worker.errors import UsageError

T = TypeVar("T")


def snapshot(state: T) -> T:
    """A copy of `state`. Takes the memory of its storages, whole: a view costs what it is a view of.

    Raises:
        UsageError: it holds a DTensor, which one rank's file cannot.
    """
    copied: T = _Copying().copy(state)
    return copied


class _Copying:
    def __init__(self) -> None:
        self._memo: dict[int, Any] = {}
        """By identity; shared with `copy.deepcopy`."""
        self._storages: dict[tuple[torch.device, int, int], torch.UntypedStorage] = {}

    def copy(self, value: Any) -> Any:
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, torch.Tensor):
            copied: Any = self._tensor(value)
        elif type(value) in (dict, OrderedDict):
            # Known before it is filled: a structure may hold itself.
            copied = self._memo[id(value)] = type(value)()
            for key, item in value.items():
                copied[self.copy(key)] = self.copy(item)
            # A module's state keeps the versions of its parts in an attribute.
            for name, item in getattr(value, "__dict__", {}).items():
                setattr(copied, name, self.copy(item))
        elif type(value) is list:
            copied = self._memo[id(value)] = []
            copied.extend(map(self.copy, value))
        elif type(value) is tuple:
            copied = tuple(map(self.copy, value))
        else:
            copied = copy.deepcopy(value, self._memo)
        self._memo[id(value)] = copied
        return copied

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            raise UsageError(
                "a DTensor is sharded over ranks and is not copied into one rank's file: save it with "
                "torch.distributed.checkpoint (cosmos_worker.dcp.SaveWriter)"
            )
        plain = tensor.detach()
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not _is_its_storage(plain):
            return plain.to("cpu", copy=True)
        storage = plain.untyped_storage()
        place = (plain.device, storage.data_ptr(), storage.nbytes())
        if place not in self._storages:
            self._storages[place] = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
            self._storages[place].copy_(storage, False)
        return torch.empty(0, dtype=plain.dtype).set_(
            self._storages[place], plain.storage_offset(), plain.size(), plain.stride()
        )


def _is_its_storage(tensor: torch.Tensor) -> bool:
    """Whether its values are the storage's, by offset and strides alone."""
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
