"""The command `layers`: the layers of a model that can be named."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normgrad_lightning.cli.checkpoint import load_trained
from normgrad_lightning.cli.model_by_name import find, made_by
from normgrad_lightning.cli.terminal import printable, say
from normgrad_lightning.hooks.observer import Observer
from normgrad_lightning.isolated.choose_layers import select_layers, total, trained_layers
from normgrad_lightning.isolated.sandbox import Sandbox
from normgrad_lightning.layers.names import named_layers
from normgrad_lightning.layers.nested import first_tensor
from normgrad_lightning.layers.options import ReadOptions
from normgrad_lightning.layers.own_passes import own_pass


def run(options: argparse.Namespace) -> None:
    """Print the table of layers."""
    if options.module is None:
        module = made_by(options.model, find(options.model), dict(options.arg)).float().eval()
    else:
        module = load_trained(Path(options.model), options.module, dict(options.arg), trusted=options.unsafe)
    try:
        rows, auto = layer_rows(module, torch.rand(2, *options.input))
    except Exception as error:
        raise ValueError(f"`--input`: the model cannot be called with {_sizes(options.input)}: {error}") from error
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        *left, last = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        say("  ".join([*left, last.strip().rjust(widths[-1])]), sys.stdout)
    say("", sys.stdout)
    say(f"{len(rows) - 1} layers; auto takes {', '.join(auto) or 'none of them: name those to be read'}", sys.stdout)


def layer_rows(model: nn.Module, images: Tensor) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the cells of the table, its heading first and uncalled layers last; and the layers that auto takes."""
    shapes: dict[nn.Module, str] = {}
    layers = named_layers(model)

    def note(layer: nn.Module, args: Any, output: Any) -> None:
        given = first_tensor(output)
        shapes[layer] = "-" if given is None else _sizes(given.shape[1:])

    with torch.no_grad(), own_pass(), Observer(model) as observer:
        handles = [layer.register_forward_hook(note) for layer in layers.values()]
        try:
            Sandbox(model).run(lambda stand_in: stand_in(images))
        finally:
            for handle in handles:
                handle.remove()
    grids = {candidate.name: _sizes(candidate.layout.grid) for candidate in observer.candidates}
    try:  # as in training, where weights may be frozen
        auto = trained_layers(model, lambda stand_in, batch: total(stand_in(batch)), images, ReadOptions())
    except ValueError:
        auto = select_layers(model, "auto", images)
    rows: list[tuple[str, ...]] = [("", "layer", "type", "output", "grid", "parameters")]
    for name, layer in sorted(layers.items(), key=lambda item: item[1] not in shapes):
        weights = f"{sum(p.numel() for p in layer.parameters()):,}"
        star, kind, output = "*" if name in auto else "", type(layer).__name__, shapes.get(layer, "uncalled")
        rows.append((star, printable(name), kind, output, grids.get(name, "-"), weights))
    return rows, auto


def _sizes(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "1"
