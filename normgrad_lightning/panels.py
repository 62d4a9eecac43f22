"""From the maps of an event to its panels: one picture for each layer, in the look that the flags ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from normgrad_lightning.checks import check_choice, check_normalisation, check_opacity, check_whole
from normgrad_lightning.render import SCALES, SIGNED_COLORMAP, Panel, Sheet, check_colormap, input_tiles, jpeg

Numbers: TypeAlias = float | Sequence[float] | None


class Look:
    """How panels look; see the flags of `NormGradCallback`."""

    def __init__(
        self, *, mean: Numbers, std: Numbers, colormap: str, opacity: float, scale: str, tile_size: int
    ) -> None:
        check_normalisation(mean, std)
        check_colormap(colormap)
        check_opacity(opacity)
        check_choice("scale", scale, SCALES)
        check_whole("tile_size", tile_size, 16)
        self._mean, self._std, self._tile_size = mean, std, tile_size
        self._colormap, self._opacity, self._scale = colormap, opacity, scale

    def panels(
        self, maps_of: Mapping[str, Tensor], inputs_of: Mapping[str, Tensor | None], *, signed: bool = False
    ) -> Iterator[Panel]:
        """Draw the maps `(N, *S)` of each layer beside the images that they belong to.

        Signed maps, whose zero means something, have a diverging colour map of their own.
        """
        colormap = SIGNED_COLORMAP if signed else self._colormap
        sheets: dict[int, Sheet] = {}
        for layer, maps in maps_of.items():
            inputs = inputs_of[layer]
            if id(inputs) not in sheets:
                sheets[id(inputs)] = Sheet(self._tiles(inputs, maps_of))
            picture = sheets[id(inputs)].panel(
                maps.numpy(), colormap=colormap, opacity=self._opacity, scale=self._scale, signed=signed
            )
            yield Panel(layer, jpeg(picture), *picture.shape[:2])

    def _tiles(self, inputs: Tensor | None, maps: Mapping[str, Tensor]) -> Any:
        """The inputs as tiles; grey ones where the network was given no image that could be found."""
        if inputs is None:
            finest = max(maps.values(), key=Tensor.numel)
            return input_tiles(torch.zeros_like(finest).unsqueeze(1).numpy(), tile_size=self._tile_size)
        return input_tiles(inputs.float().numpy(), mean=self._mean, std=self._std, tile_size=self._tile_size)


def numbered(group: str, panels: Iterable[Panel], layers: Iterable[str]) -> Iterator[Panel]:
    """Panels under the tags that they are logged with: their layer's name, and its number, which keeps the order."""
    numbers = {layer: number for number, layer in enumerate(layers)}
    for panel in panels:
        yield panel._replace(tag=f"{group}/{numbers[panel.tag]:02d}_{panel.tag}")
