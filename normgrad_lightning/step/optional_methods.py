"""Methods that a user's module may have for us: what they return, without a trace of the call in training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normgrad_lightning.isolated.random_state import devices_of, preserved_rng

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule


def call_optional_method(module: LightningModule, method: str, batch: Any) -> Any:
    """Return what the method returns for a batch; None if the module has no such method.

    It builds no graph, and training draws the random numbers that it would have drawn without the call.
    """
    own = getattr(module, method, None)
    if own is None:
        return None
    with torch.no_grad(), preserved_rng(devices_of(module.parameters())):
        return own(batch)
