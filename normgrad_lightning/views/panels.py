"""Panels: one picture for each layer, with the images side by side with their maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from normgrad_lightning.maps import MapSet
from normgrad_lightning.page import Page, Picture
from normgrad_lightning.views.drawing import Pixels, Sheet, input_tiles, jpeg
from normgrad_lightning.views.style import Style


def panels(map_sets: Sequence[MapSet], style: Style) -> Page:
    """Return a panel for each layer of each set."""
    pictures = [
        picture
        for map_set in map_sets
        for picture in layer_panels(map_set.maps, map_set.images_of, map_set.tags, style, signed=map_set.kind.signed)
    ]
    return Page(map_sets[0].step, pictures)


def layer_panels(
    maps_of: Mapping[str, Tensor],
    images_of: Mapping[str, Tensor | None],
    tags: Mapping[str, str],
    style: Style,
    *,
    signed: bool,
) -> Iterator[Picture]:
    """Yield a panel for each layer: its maps `(N, *S)` over the images that they belong to."""
    sheets: dict[int, Sheet] = {}
    for layer, maps in maps_of.items():
        images = images_of[layer]
        if id(images) not in sheets:
            sheets[id(images)] = Sheet(tiles_of(images, maps_of, style, style.tile_size))
        pixels = sheets[id(images)].panel(maps.numpy(), style, signed=signed)
        yield Picture(tags[layer], jpeg(pixels), *pixels.shape[:2])


def tiles_of(images: Tensor | None, maps: Mapping[str, Tensor], style: Style, tile_size: int) -> Pixels:
    """Return the images as tiles; grey ones if no image that the network was given could be found."""
    if images is None:
        finest = max(maps.values(), key=Tensor.numel)
        return input_tiles(torch.zeros_like(finest).unsqueeze(1).numpy(), tile_size=tile_size)
    return input_tiles(images.float().numpy(), mean=style.mean, std=style.std, tile_size=tile_size)
