"""Which layers of a model can be named, what they give, and which ones `"auto"` would take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normgrad_lightning.passes.choose_layers import total, trained_layers
from normgrad_lightning.passes.sandbox import Sandbox
from normgrad_lightning.recording.layer_names import named_layers
from normgrad_lightning.recording.nested import first_tensor
from normgrad_lightning.recording.observer import Observer
from normgrad_lightning.recording.options import ReadOptions
from normgrad_lightning.recording.own_passes import own_pass


class Row(NamedTuple):
    """A layer.

    Attributes:
        name: as flags take it.
        kind: its class.
        shape: of its output for one image; None if it was not called, or gives no tensor.
        grid: where on the image its features are; None if they are on none, and there can be no map.
        parameters: how many weights it holds.
        auto: whether `"auto"` would take it.
    """

    name: str
    kind: str
    shape: tuple[int, ...] | None
    grid: tuple[int, ...] | None
    parameters: int
    auto: bool


def layer_rows(model: nn.Module, images: Tensor) -> list[Row]:
    """All layers of the model as they are built; those that give no tensor, or are not called, at the end."""
    shapes = dict[str, tuple[int, ...] | None]()

    def note(name: str) -> Any:
        def see(_: nn.Module, args: Any, output: Any) -> None:
            given = first_tensor(output)
            shapes[name] = None if given is None else tuple(given.shape[1:])

        return see

    with torch.no_grad(), own_pass(), Observer(model) as observer:
        layers = named_layers(model)
        handles = [layer.register_forward_hook(note(name)) for name, layer in layers.items()]
        try:
            Sandbox(model).run(lambda stand_in: stand_in(images))
        finally:
            for handle in handles:
                handle.remove()
        grids = {sighting.name: sighting.layout.grid for sighting in observer.sightings}
    auto = _auto(model, images) or observer.choose()
    rows = {
        name: Row(name, type(layer).__name__, shapes.get(name), grids.get(name), _weights(layer), name in auto)
        for name, layer in layers.items()
    }
    return sorted(rows.values(), key=lambda row: row.shape is None)


def _auto(model: nn.Module, images: Tensor) -> list[str]:
    """What it takes in training, for a loss that depends on all that the model gives; nothing, if it learns nothing."""
    try:
        return trained_layers(model, lambda stand_in, batch: total(stand_in(batch)), images, ReadOptions())
    except ValueError:
        return []


def _weights(layer: nn.Module) -> int:
    return sum(p.numel() for p in layer.parameters())


def as_text(rows: Sequence[Row]) -> str:
    """The table, for a terminal: a star for what auto takes, `-` for what gives no features on a grid."""
    cells = [("", "layer", "type", "output", "grid", "parameters")]
    for row in rows:
        shape = "uncalled" if row.shape is None else _sizes(row.shape)
        grid = "-" if row.grid is None else _sizes(row.grid)
        cells.append(("*" if row.auto else "", row.name, row.kind, shape, grid, f"{row.parameters:,}"))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        *left, last = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        lines.append("  ".join([*left, last.strip().rjust(widths[-1])]).rstrip())
    return "\n".join(lines)


def _sizes(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "1"
