"""`log_maps`: draws and logs the maps of your own training loop, as the callback does in Lightning's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from normgrad_lightning.checks import check_flag, check_whole
from normgrad_lightning.maps import numbered_tags
from normgrad_lightning.page import Page
from normgrad_lightning.views.panels import layer_panels
from normgrad_lightning.views.style import Scale, Statistic, Style
from normgrad_lightning.writers.destinations import Writer, writers_for
from normgrad_lightning.writers.files import FilesWriter


def log_maps(
    logger: Any,
    maps: Mapping[str, Tensor],
    images: Tensor | None,
    step: int,
    *,
    tag: str = "normgrad_order0",
    signed: bool = False,
    mean: Statistic = Style.mean,
    std: Statistic = Style.std,
    colormap: str = Style.colormap,
    opacity: float = Style.opacity,
    scale: Scale = Style.scale,
    tile_size: int = Style.tile_size,
) -> None:
    """Draw the maps of each layer over the images that they belong to, and log the panels.

    Args:
        logger: a logger of Lightning or Fabric, torch's `SummaryWriter`, or the name of a folder for files.
        maps: `(N, *S)` of each layer, in the order of the network: `recorder.maps`.
        images: `(N, C, *S)`, as the network saw them: `recorder.images`, or those of the batch; None: grey.
        step: of the training.
        tag: what they are logged under: `tag/03_layer`.
        signed: whether they are contrast, or other maps whose zero means something.
        mean: see `NormGradCallback`, also for the following.
        std: see there.
        colormap: see there.
        opacity: see there.
        scale: see there.
        tile_size: see there.

    Raises:
        ValueError: a wrong value, or something that is not a logger.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import torch
        >>> from normgrad_lightning import log_maps
        >>> maps = {"early": torch.rand(2, 16, 16), "late": torch.rand(2, 4, 4)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log_maps(folder, maps, torch.rand(2, 3, 16, 16), step=100)
        ...     for file in sorted(Path(folder).rglob("*.jpg")):
        ...         print(file.relative_to(folder).as_posix())
        normgrad_order0/00_early/step_00000100.jpg
        normgrad_order0/01_late/step_00000100.jpg
    """
    check_whole("step", step, 0)
    if not isinstance(tag, str):
        raise ValueError(f"`tag`: expected text, but got {tag!r}.")
    check_flag("signed", signed)
    style = Style(mean=mean, std=std, colormap=colormap, opacity=opacity, scale=scale, tile_size=tile_size)
    writer = _writer(logger)
    if not isinstance(maps, Mapping) or not all(isinstance(m, Tensor) for m in maps.values()):
        raise ValueError(f"`maps`: expected a tensor for each layer's name, but got {type(maps).__name__!r}.")
    if images is not None and not isinstance(images, Tensor):
        raise ValueError(f"`images`: expected a tensor or None, but got {type(images).__name__!r}.")
    on_cpu = {name: m.detach().float().cpu() for name, m in maps.items()}
    if not signed and any(bool((m < 0).any()) for m in on_cpu.values()):
        raise ValueError("`maps`: expected values from 0 up, but some are negative. For contrast, set `signed=True`.")
    count = max(map(len, on_cpu.values()), default=0)
    shown = None if images is None else images[:count].detach().cpu()
    images_of, tags = dict.fromkeys(on_cpu, shown), numbered_tags(tag, on_cpu)
    writer.write(Page(step, list(layer_panels(on_cpu, images_of, tags, style, signed=signed))))


def _writer(logger: Any) -> Writer:
    if isinstance(logger, str | os.PathLike):
        return FilesWriter(logger)
    writers, notes = writers_for([logger], os.curdir)
    if notes or not writers:
        raise ValueError(
            "`logger`: expected a logger of Lightning or Fabric that takes images, a `SummaryWriter` or the name of a "
            f"folder, but got {type(logger).__name__!r}."
        )
    return writers[0]
