"""How layers are read: options that recorders, passes and the callback share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from normgrad_lightning.checks import check_choice, check_flag, check_grid

Target = Literal["output", "input", "weight"]
"""Which tensors of a layer are read; see `NormGrad`."""


@dataclass(frozen=True)
class ReadOptions:
    """How layers are read. The fields are keywords of `NormGrad`: `NormGrad(model, **vars(options))`.

    Attributes:
        target: which tensors of a layer are read.
        token_grid: rows and columns of a transformer's patches, and how many tokens stand before them if others stand
            after them; None: inferred.
        channels_last: whether features are `(N, *S, C)`; None: inferred.

    Raises:
        ValueError: a wrong value.
    """

    target: Target = "output"
    token_grid: Sequence[int] | None = None
    channels_last: bool | None = None

    def __post_init__(self) -> None:
        check_choice("target", self.target, get_args(Target))
        check_grid(self.token_grid)
        check_flag("channels_last", self.channels_last, or_none=True)
