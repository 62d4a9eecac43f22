"""Settings of torch, for the whole process, that a pass of our own needs to be different for as long as it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils import checkpoint


class _Setting(NamedTuple):
    """How to read a setting and how to set it, and the value that a pass needs."""

    get: Callable[[], Any]
    set: Callable[[Any], object]
    value: Any


@contextmanager
def settings_for_passes(*, exact: bool) -> Iterator[None]:
    """Set what passes need, and put it back afterwards.

    Args:
        exact: whether float32 is computed with all of its bits, where training may have only those of TensorFloat32
            or bfloat16.
    """
    settings = [*_for_hooks(), *_for_convolutions(), *(_for_float32() if exact else ())]
    before: list[tuple[_Setting, Any]] = []
    try:
        for setting in settings:
            with suppress(RuntimeError):  # torch has two ways to set the precision, and refuses one after the other
                value = setting.get()
                if value != setting.value:
                    before.append((setting, value))
                    setting.set(setting.value)
        yield
    finally:
        for setting, value in before:
            setting.set(value)


def _for_hooks() -> Iterator[_Setting]:
    # Without gradients, torch's transformer layers would not call their submodules, nor hooks on these.
    yield _Setting(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False)
    # Autocast's half-precision copies would outlive the stand-in weights they were made of.
    yield _Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False)
    # Reentrant checkpoints refuse `autograd.grad`.
    yield _attribute(checkpoint, "CheckpointFunction", _NotReentrant)


def _for_convolutions() -> Iterator[_Setting]:
    """Let cuDNN tune nothing for batches of other sizes, and nothing that training would find in its place."""
    cudnn = torch.backends.cudnn
    if cudnn.benchmark:
        yield _attribute(cudnn, "benchmark", False)
        yield _attribute(cudnn, "deterministic", True)


def _for_float32() -> Iterator[_Setting]:
    """Compute with all bits: differences of order 1 drown in the rounding of TensorFloat32 and bfloat16."""
    yield _Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest")
    yield _attribute(torch.backends.cudnn, "allow_tf32", False)


def _attribute(owner: Any, name: str, value: Any) -> _Setting:
    return _Setting(partial(getattr, owner, name), partial(setattr, owner, name), value)


class _NotReentrant:
    """Stands in for torch's function of reentrant checkpoints."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Run a checkpoint that is not reentrant."""
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
