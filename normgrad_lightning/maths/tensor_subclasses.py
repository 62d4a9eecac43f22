"""Tensor subclasses (MONAI's MetaTensor, torchvision's tv_tensors): as plain tensors, and back to their type.

A subclass may override any function, raise in it, or lose its type or attributes in it. So its values are read with
these overrides off. Subclasses that hold no values themselves (`__torch_dispatch__`, as DTensor) are left alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def no_overrides() -> AbstractContextManager[None]:
    """Switch overrides off inside: functions of tensors are torch's own, and give plain tensors."""
    off: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return off


def overrides_functions(t: Tensor) -> bool:
    """Return whether a tensor is of a subclass that overrides functions, and has its own values."""
    kind = type(t)
    return (
        kind is not Tensor
        and kind.__torch_function__ is not torch._C._disabled_torch_function_impl
        and kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    )


def plain(t: Any) -> Any:
    """Return a tensor of such a subclass as a plain one, in the same graph and memory; anything else unchanged."""
    if not isinstance(t, Tensor) or not overrides_functions(t):
        return t
    with no_overrides():
        return t.as_subclass(Tensor)


def of_type(t: Tensor, like: Tensor, attributes: dict[str, Any] | None = None) -> Tensor:
    """Return `t` as a tensor of the type of `like`, with these attributes (default: the same as those of `like`)."""
    with no_overrides():
        typed: Tensor = plain(t).as_subclass(type(like))
        vars(typed).update(vars(like) if attributes is None else attributes)
    return typed
