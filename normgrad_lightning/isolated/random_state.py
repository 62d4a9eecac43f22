"""The random state of a process: python's, numpy's, and torch's on the CPU and on any other device."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

_WITHOUT_NUMBER = ("mps",)
"""Types of which a machine has only one device: not every version of torch lets their functions take it."""


def devices_of(tensors: Iterable[Tensor]) -> list[torch.device]:
    """Return the devices beside the CPU that hold these tensors."""
    devices = {t.device for t in tensors}
    return sorted((d for d in devices if d.type not in ("cpu", "meta")), key=str)


@contextmanager
def preserved_rng(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the random state of python, numpy, and torch on the CPU and on these devices afterwards."""
    restores: list[Callable[[], object]] = [
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
        partial(torch.set_rng_state, torch.get_rng_state()),
    ]
    for device in devices:
        module = _module_of(device, "get_rng_state")
        where = () if device.type in _WITHOUT_NUMBER else (device,)
        if module is not None:
            restores.append(partial(module.set_rng_state, module.get_rng_state(*where), *where))
    try:
        yield
    finally:
        for restore in restores:
            restore()


def seed(number: int, devices: Iterable[torch.device]) -> None:
    """Seed python, numpy, and torch on the CPU and on these devices."""
    random.seed(number)
    np.random.seed(number)
    torch.default_generator.manual_seed(number)
    for device in devices:
        module = _module_of(device, "manual_seed")
        if module is not None:
            with module.device(device) if hasattr(module, "device") else nullcontext():
                module.manual_seed(number)


def _module_of(device: torch.device, function: str) -> Any:
    """Return the part of torch for this type of device; None if it has no such function for random numbers."""
    module = getattr(torch, device.type, None)
    return module if hasattr(module, function) else None
