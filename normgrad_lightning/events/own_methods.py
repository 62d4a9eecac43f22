"""Methods that a user's module may have for us: what they return, without a trace of the call in training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normgrad_lightning.passes.sandbox import preserved_rng

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule


def asked(module: LightningModule, method: str, batch: Any) -> Any:
    """What the method returns for a batch; None if the module has no such method.

    It builds no graph, and training draws the random numbers that it would have drawn without the call.
    """
    own = getattr(module, method, None)
    if own is None:
        return None
    gpus = [module.device.index or 0] if module.device.type == "cuda" else []
    with torch.no_grad(), preserved_rng(gpus):
        return own(batch)
