"""The zoo's table: what `layers="auto"` takes of each model, one line for each.

PYTHONPATH=tests python -m zoo.table [--only TEXT] [--family timm] [--write] [--quick]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import torch
from zoo.look import Layer, Sighting, look
from zoo.member import Member
from zoo.models import LIBRARIES, members
from zoo.notes import NOTES

TABLE = Path(__file__).with_name("table.md")
DISTRIBUTIONS = {"smp": "segmentation-models-pytorch"}
HEADER = """\
<!-- Written by `PYTHONPATH=tests python -m zoo.table --write`, checked by `pytest -m extras tests/zoo`. -->

# What `layers="auto"` takes, model by model

One training step on two images, with random weights. After each layer: its grid, then how many times larger its
features' change is in the corner of the picture that was changed than in any other (the smallest over all corners).
Below 1.25 it is marked: "unclear" (all cells mix, or cells are too few), "elsewhere" below 0.8; tokens that are a cell
or more away from their place are "shifted". "Map" is the same ratio for the first layer's map. "Same bits": gradients,
buffers and random numbers are those of a step without the recorder.

"""
COLUMNS = (
    "| model | image | layers: grid, location | zero maps | map | same bits | note |\n|---|--:|---|---|--:|---|---|\n"
)


def line(one: Sighting) -> str:
    """A model's line of the table."""
    size = "×".join(map(str, one.size))
    zero = ", ".join(f"`{layer.name}`" for layer in one.layers if layer.is_zero)
    shown = ", ".join(map(_layer, one.layers)) or " ".join(one.problems) or one.error or "nothing"
    if one.error and one.layers:
        shown += f"; {one.error}"
    bits = {None: "", True: "yes", False: "**no**"}[one.same_bits]
    place = "" if one.map_location is None else _number(one.map_location)
    cells = (one.name, size, shown.replace("|", "/"), zero, place, bits, NOTES.get(one.name, ""))
    return f"| {' | '.join(cells)} |"


def _layer(layer: Layer) -> str:
    text = f"`{layer.name}` {'×'.join(map(str, layer.grid))}"
    if layer.location is not None:
        text += f" ({_number(layer.location)})"
        if layer.verdict != "here":
            text += f" {layer.verdict}"
    return text


def _number(value: float) -> str:
    return "∞" if value == float("inf") else f"{value:.1f}" if value < 100 else ">100"


def versions() -> str:
    """The libraries' versions, for the table's head: layers' names depend on them."""
    names = ["torch", *(DISTRIBUTIONS.get(library, library) for library in LIBRARIES)]
    return "Versions: " + ", ".join(f"{name} {metadata.version(name).partition('+')[0]}" for name in names) + ".\n\n"


def rows(text: str) -> dict[str, str]:
    """The lines of a table by model."""
    lines = (one for one in text.splitlines() if one.startswith("| ") and "/" in one.split(" ")[1])
    return {one.split(" ")[1]: one for one in lines}


def write(lines: Iterable[str], *, everything: bool) -> None:
    """Write the table; where only some models were looked at, keep the other lines."""
    new = rows("\n".join(lines))
    kept = {} if everything or not TABLE.exists() else rows(TABLE.read_text())
    order = {one.name: place for place, one in enumerate(members())}
    merged = sorted(({**kept, **new}).items(), key=lambda item: order.get(item[0], len(order)))
    TABLE.write_text(HEADER + versions() + COLUMNS + "".join(f"{text}\n" for _, text in merged))


def main() -> None:
    """Look at the models that are asked for, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose names contain this")
    parser.add_argument("--family", choices=sorted(LIBRARIES), help="models of this library")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    parser.add_argument("--quick", action="store_true", help="neither bits nor location")
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen: list[Member] = [
        one for one in members([args.family] if args.family else LIBRARIES) if args.only.lower() in one.name.lower()
    ]
    lines = []
    for one in chosen:
        seen = look(one, bits=not args.quick, location=not args.quick)
        lines.append(line(seen))
        print(lines[-1], f"{seen.seconds:.1f} s", flush=True)
    if args.write:
        write(lines, everything=not args.only and not args.family)


if __name__ == "__main__":
    main()
