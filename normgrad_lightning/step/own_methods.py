"""Methods that a user's module may have for us, and the masks that one of them returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normgrad_lightning.isolated.random_state import devices_of, preserved_rng

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule

MASKS = "normgrad_masks"


def call_optional_method(module: LightningModule, method: str, batch: Any) -> Any:
    """Return what the method returns for a batch; None if the module has no such method.

    It builds no graph, and training draws the random numbers that it would have drawn without the call.
    """
    own = getattr(module, method, None)
    if own is None:
        return None
    with torch.no_grad(), preserved_rng(devices_of(module.parameters())):
        return own(batch)


def masks_of(module: LightningModule, batch: Any) -> Tensor | None:
    """Return what `normgrad_masks(batch)` of the module returns: `(N, *S)`, 1 where the object is; None without it.

    Raises:
        ValueError: it returns something else.
    """
    masks = call_optional_method(module, MASKS, batch)
    if masks is None or (isinstance(masks, Tensor) and _can_be_masks(masks)):
        return masks
    came = _described(masks) if isinstance(masks, Tensor) else repr(type(masks).__name__)
    raise ValueError(
        f"`{MASKS}`: expected a tensor (N, height, width), 1 where the object is, else 0, or None, but got {came}. "
        "Return a mask for each image of the batch."
    )


def _can_be_masks(masks: Tensor) -> bool:
    is_plain = not masks.is_nested and masks.layout is torch.strided and not masks.is_meta
    return is_plain and masks.dim() >= 2 and masks.numel() > 0 and not masks.is_complex()


def _described(masks: Tensor) -> str:
    if masks.is_nested:
        return "a nested tensor"
    way = "on the device 'meta'" if masks.is_meta else f"{masks.dtype}, {masks.layout}"
    return f"a tensor of shape {tuple(masks.shape)}, {way}"
