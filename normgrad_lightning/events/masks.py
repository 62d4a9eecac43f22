"""Where the object is in each image of a batch, if the module says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule

METHOD = "normgrad_masks"


def masks_of(module: LightningModule, batch: Any) -> Tensor | None:
    """What the module's `normgrad_masks(batch)` returns: `(N, *S)`, 1 where the object is; None without that method.

    Raises:
        ValueError: it returns something else.
    """
    own = getattr(module, METHOD, None)
    masks = None if own is None else own(batch)
    if masks is None or (isinstance(masks, Tensor) and masks.dim() >= 2 and not masks.is_complex()):
        return masks
    came = f"a tensor of shape {tuple(masks.shape)}" if isinstance(masks, Tensor) else repr(type(masks).__name__)
    raise ValueError(
        f"`{METHOD}`: expected a tensor (N, height, width), 1 where the object is, else 0, or None, but got {came}. "
        "Return a mask for each image of the batch."
    )
