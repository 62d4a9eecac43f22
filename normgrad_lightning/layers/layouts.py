"""From a layer's tensor to channels on a grid: feature maps, channels-last features and a transformer's tokens.

Networks pass features on in several layouts, and a tensor does not say which one it has. What the layer, the shape and
the image show safely is inferred here. Everything else is refused, and the message names the flag to set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from normgrad_lightning.layers.options import ReadOptions

MAX_PREFIX_TOKENS = 9
"""With more tokens than this before the patches (class and register tokens), the grid is a wrong guess."""

UNDISTORTED, _DISTORTED = 0.2, 0.7  # see `_distortion`

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Layout:
    """How to read a tensor as channels on a grid.

    Attributes:
        grid: the size of each spatial axis.
        channels_last: whether channels are the last axis rather than the second.
        prefix: how many tokens stand before those of the grid (class and register tokens).
        is_guessed: whether the tensor has one axis for the whole grid, and nobody has said how its tokens stand there.
    """

    grid: tuple[int, ...]
    channels_last: bool = False
    prefix: int = 0
    is_guessed: bool = field(default=False, compare=False)

    def view(self, t: Tensor) -> Tensor:
        """Return `t` as `(N, C, *grid)`, without a copy."""
        if not self.channels_last:
            return t
        if t.dim() == 3:
            t = t.narrow(1, self.prefix, math.prod(self.grid))
        t = t.movedim(-1, 1)
        return t if t.dim() == len(self.grid) + 2 else t.unflatten(2, self.grid)  # type: ignore[no-untyped-call]


class Layouts:
    """The layouts of a model's tensors; what was inferred once is not inferred again.

    Args:
        model: the model.
        options: how its layers are read.
    """

    def __init__(self, model: nn.Module, options: ReadOptions) -> None:
        self._options = options
        self._mixes_batch_and_tokens = any(vars(m).get("batch_first", True) is False for m in model.modules())
        self._known: dict[nn.Module, tuple[Any, Layout]] = {}

    def of(
        self, layer: nn.Module, t: Tensor, image_shape: Sequence[int] | None, patch_grid: Sequence[int] | None
    ) -> Layout:
        """Return how to read `t`, a tensor of this layer, as features on a grid; see `infer_layout`."""
        if self._mixes_batch_and_tokens and t.dim() == 3 and t.shape[0] == t.shape[1]:
            raise ValueError(
                f"its shape {tuple(t.shape)} does not tell tokens from images, as the model has parts with "
                "`batch_first=False`. Use another batch size"
            )
        case = t.shape, image_shape, patch_grid
        known_case, layout = self._known.get(layer, (None, None))
        if layout is None or known_case != case:
            layout = infer_layout(
                t.shape,
                image_shape,
                layer,
                patch_grid=patch_grid,
                token_grid=self._options.token_grid,
                channels_last=self._options.channels_last,
                of_input=self._options.target == "input",
            )
            self._known[layer] = case, layout
        return layout


def infer_layout(
    shape: Sequence[int],
    image_shape: Sequence[int] | None,
    layer: nn.Module,
    *,
    patch_grid: Sequence[int] | None = None,
    token_grid: Sequence[int] | None = None,
    channels_last: bool | None = None,
    of_input: bool = False,
) -> Layout:
    """Return the layout of a tensor of this shape that `layer` gives for an image.

    Args:
        shape: the tensor's shape, with the batch first.
        image_shape: the shape `(N, C, *S)` of the images; None if unknown.
        layer: the module whose output (or input) it is: its weights show which axis holds channels.
        patch_grid: the grid of a transformer's patch embedding, where it is known.
        token_grid: the grid of tokens, and perhaps how many stand before it, if the user has set it: nothing is
            inferred then.
        channels_last: whether channels come last if the user has set it: nothing is inferred then.
        of_input: whether the tensor is the layer's input rather than its output.

    Raises:
        ValueError: the layout cannot be inferred, or is not a grid; with the reason.
    """
    shape = tuple(shape)
    if len(shape) < 3:
        raise ValueError(f"its shape {shape} has no spatial axis. Choose a layer before the pooling or flattening")
    if image_shape is not None and shape[0] != image_shape[0]:
        raise ValueError(
            f"its shape {shape} does not begin with the batch size {image_shape[0]}, so its values do not belong to "
            "single images. Choose another layer"
        )
    image_grid = None if image_shape is None else tuple(image_shape[2:])
    axes = max(len(shape) - 2, 2) if image_grid is None else len(image_grid)
    if len(shape) == axes + 2:
        return _dense_layout(shape, image_grid, layer, channels_last, of_input)
    if len(shape) == 3:
        if channels_last is False:
            raise ValueError(
                f"its shape {shape} cannot have `channels_last=False` for images with {axes} axes. "
                "Leave it at None, or choose other layers"
            )
        if token_grid is not None and len(token_grid) not in (axes, axes + 1):
            raise ValueError(
                f"`token_grid={tuple(token_grid)}` does not fit images with {axes} axes. Give one number for each "
                "axis; if tokens stand before and after the patches, also how many stand before"
            )
        if token_grid is not None:
            grid, prefix = _given_grid(shape[1], tuple(token_grid[:axes]), *token_grid[axes:])
        else:
            grid, prefix = _grid_of_tokens(shape[1], image_grid, patch_grid)
        return Layout(grid, channels_last=True, prefix=prefix, is_guessed=token_grid is None)
    raise ValueError(f"its shape {shape} is neither features on {axes} spatial axes nor tokens. Choose another layer")


def grid_of_tokens(tokens: int, image_grid: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return the patch grid, and the number of tokens before it, that explain `tokens` for an image of this size.

    Patches are assumed to be square (or cubic) and to cover the image exactly, so the grid has the image's proportions.
    Of the grids that fit, the one with the fewest extra tokens is taken, which must be far fewer than the patches.
    Returns an empty grid if none fits.
    """
    best: tuple[tuple[int, ...], int] = ((), MAX_PREFIX_TOKENS + 1)
    for patch in range(1, min(image_grid) + 1):
        grid = tuple(size // patch for size in image_grid)
        patches = math.prod(grid)
        extra = tokens - patches
        covers = not any(size % patch for size in image_grid)
        if covers and patches > 1 and 0 <= extra < best[1] and extra <= patches // 2:
            best = (grid, extra)
    return best


def patch_grid(layer: nn.Module, image_shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return the grid of patches that `layer` cuts the image into, if it is a patch embedding (kernel = stride).

    Of videos, patches may overlap: their length in frames cannot be guessed from the number of tokens.
    """
    if not isinstance(layer, CONVOLUTIONS) or isinstance(layer.padding, str):
        return None
    is_exact = tuple(layer.kernel_size) == tuple(layer.stride) and not any(layer.padding)
    if not is_exact and not isinstance(layer, nn.Conv3d):
        return None
    reach = [step * (size - 1) for step, size in zip(layer.dilation, layer.kernel_size, strict=True)]
    sides = zip(image_shape[2:], layer.padding, reach, layer.stride, strict=True)
    return tuple((size + 2 * pad - far - 1) // stride + 1 for size, pad, far, stride in sides)


def _given_grid(tokens: int, grid: tuple[int, ...], before: int | None = None) -> tuple[tuple[int, ...], int]:
    """Return the grid that the user has set, and how many tokens stand before it."""
    extra = tokens - math.prod(grid)
    whole = (*grid,) if before is None else (*grid, before)
    if extra < (before or 0):
        raise ValueError(f"it has {tokens} tokens, fewer than `token_grid={whole}` needs")
    if before is None and extra > MAX_PREFIX_TOKENS:
        raise ValueError(
            f"it has {extra} tokens more than `token_grid={whole}` needs. "
            "Say how many of them stand before the patches: `token_grid=(rows, columns, tokens before)`"
        )
    return grid, extra if before is None else before


def _grid_of_tokens(
    tokens: int, image_grid: Sequence[int] | None, patches: Sequence[int] | None
) -> tuple[tuple[int, ...], int]:
    known = [] if patches is None else _merged(patches)
    for grid in known:
        if 0 <= tokens - math.prod(grid) <= min(MAX_PREFIX_TOKENS, math.prod(grid) // 2):
            return grid, tokens - math.prod(grid)
    grid, extra = grid_of_tokens(tokens, image_grid) if image_grid is not None else ((), 0)
    if patches is not None and (extra > 1 or math.prod(grid) > math.prod(patches)):
        grid = ()  # neither the known patches nor a coarser grid: text, or queries
    if not grid:
        seen = "no image was seen" if image_grid is None else f"it has {' × '.join(map(str, image_grid))} pixels"
        raise ValueError(
            f"its {tokens} tokens fit no grid of square patches that cover the image ({seen}). "
            "Set `token_grid=(rows, columns)`; if tokens stand after the patches, too, "
            "`token_grid=(rows, columns, tokens before)`"
        )
    return grid, extra


def _merged(patches: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the grid of patches; of videos, also those after steps that merge rows and columns and keep the frames."""
    if len(patches) < 3:
        return [tuple(patches)]
    frames, *sides = patches
    return [(frames, *(-(-side // 2**step) for side in sides)) for step in range(6)]


def _dense_layout(
    shape: tuple[int, ...],
    image_grid: tuple[int, ...] | None,
    layer: nn.Module,
    channels_last: bool | None,
    of_input: bool,
) -> Layout:
    first, last = Layout(shape[2:]), Layout(shape[1:-1], channels_last=True)
    if channels_last is not None:
        return last if channels_last else first
    says_first, says_last = _width_evidence(layer, shape, of_input)
    if image_grid is None or (says_first and not says_last):
        return last if says_last and not says_first else first
    if says_last and not says_first:
        if _distortion(last.grid[-2:], image_grid[-2:]) > _DISTORTED:  # networks for video may keep all frames
            raise ValueError(
                f"its shape {shape} has channels last, but the proportions of {last.grid} are not those of the image "
                f"{image_grid}: these may be windows. If they are a grid, set `channels_last=True`"
            )
        return last
    # The weights show nothing, or contradict each other: take the grid with the image's proportions, if just one has.
    fits_last = _distortion(last.grid, image_grid) < UNDISTORTED
    return last if fits_last and _distortion(first.grid, image_grid) > UNDISTORTED else first


def _width_evidence(layer: nn.Module, shape: tuple[int, ...], of_input: bool) -> tuple[bool, bool]:
    """Return whether weights of `layer` fit channels at the second axis, and at the last one.

    A linear layer inside may work on channels on any axis (squeeze and excitation pools first), so it only counts if
    there is no other evidence.
    """
    says_first = says_last = may_be_first = may_be_last = False
    for module in layer.modules():
        if isinstance(module, CONVOLUTIONS + TRANSPOSED_CONVOLUTIONS):
            says_first |= shape[1] == (module.in_channels if of_input else module.out_channels)
        elif isinstance(module, nn.modules.batchnorm._NormBase):
            says_first |= shape[1] == module.num_features
        elif isinstance(module, nn.GroupNorm):
            says_first |= shape[1] == module.num_channels
        elif isinstance(module, nn.LayerNorm):
            says_last |= shape[-1:] == tuple(module.normalized_shape)
        elif isinstance(module, nn.Linear):
            width = module.in_features if of_input else module.out_features
            says_last |= module is layer and shape[-1] == width
            may_be_first |= len(shape) > 3 and shape[1] == width
            may_be_last |= shape[-1] == width
    return (says_first, says_last) if says_first or says_last else (may_be_first, may_be_last)


def _distortion(grid: Sequence[int], image_grid: Sequence[int]) -> float:
    """Return how far a grid's proportions are from the image's: 0 for the same, log 2 for one axis twice as long."""
    ratios = [math.log(max(size, 1) / max(pixels, 1)) for size, pixels in zip(grid, image_grid, strict=True)]
    return max(ratios) - min(ratios)
