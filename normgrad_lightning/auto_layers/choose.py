"""What `layers="auto"` takes: the last layer of each resolution, as a person would name it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from torch import nn

from normgrad_lightning.auto_layers.candidates import CandidateLayer
from normgrad_lightning.layers.layouts import UNDISTORTED
from normgrad_lightning.maths.spacing import evenly_spaced

MAX_AUTO_LAYERS = 5
MIN_FAMILY = 4
"""With at least this many equal blocks on one grid, blocks are sampled rather than resolutions."""
NEARLY_ALL = 0.9
_IN_STEMS = 2

_PLAIN_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

Grid = tuple[int, ...]


def choose(
    candidates: Sequence[CandidateLayer], nonzero: Container[str] | None = None, *, in_branches: bool = False
) -> list[str]:
    """Return the last layer of each resolution, at most five; evenly spaced blocks where one resolution has them all.

    Args:
        candidates: what was seen, in the order in which the network runs.
        nonzero: names of the layers whose maps are not zero everywhere; None: unknown.
        in_branches: whether layers of residual branches are as good as those that everything goes through.
    """
    network = _Network([_from_branch(s) for s in candidates] if in_branches else candidates, nonzero)
    if network.isotropic is not None:
        return _of_all_depths(network.blocks_on(network.isotropic))
    ends = network.ends()
    if len(ends) == 1 and len(blocks := network.blocks_on(ends[0].layout.grid)) > 1 and _is_block(ends[0]):
        return _of_all_depths(blocks)
    return list(dict.fromkeys(_representative(end, ends, network.usable) for end in ends))


class _Network:
    """The layers of a network that may be chosen, and what their names and grids say about its stages.

    Args:
        candidates: see `choose`.
        nonzero: see there.
    """

    def __init__(self, candidates: Sequence[CandidateLayer], nonzero: Container[str] | None) -> None:
        self._layers = {s.name: s.layer for s in candidates}
        self._returning = {s.name for s in candidates if s.returns}
        self._grids: dict[str, set[Grid]] = defaultdict(set)
        for s in candidates:
            self._grids[s.name].add(s.layout.grid)
        usable = [s for s in candidates if len(self._grids[s.name]) == 1 and _is_candidate(s)]
        usable = _without_matrices(_without_windows(usable))
        usable = [
            s for s in usable if s.channels > 1
        ] or usable  # one number for each location: a gate, or a prediction
        with_signal = [] if nonzero is None else [s for s in usable if s.name in nonzero]
        self._knows_nonzero = bool(with_signal)
        self.usable = with_signal or usable
        self._weights = _weights(candidates)
        self._candidates = candidates
        self._cuts = {s.layout.grid for s in self.usable if not s.bypass}

    @property
    def isotropic(self) -> Grid | None:
        """The grid that nearly all weights work on, most of them in a family of blocks; None if there is none."""
        if len({s.layout.grid for s in self.usable}) == 1:
            return self.usable[0].layout.grid
        total: dict[Grid, int] = defaultdict(int)
        for _, grid, count in self._weights:
            total[grid] += count
        grid = max(total, key=total.__getitem__, default=())
        family = self._family(grid)
        in_family = sum(p.numel() for s in family for p in s.layer.parameters())
        weights = sum(total.values())
        has_most = total[grid] >= NEARLY_ALL * weights and in_family >= weights / 2
        has_others = any(self._has_blocks(other) for other in self._cuts - {grid})
        return grid if has_most and not has_others and len(family) >= MIN_FAMILY else None

    def blocks_on(self, grid: Grid) -> list[str]:
        """Return the largest family of sibling blocks on a grid; without one, all layers with weights there."""
        family = self._family(grid)
        family = family if len(family) > 1 else self._family(grid, parallel=True)
        if len(family) < 2:
            layers = [s for s in self._on(grid) if s.weighted and not _is_block(s)]
            fewest = min((s.bypass for s in layers), default=0)
            names = list(dict.fromkeys(s.name for s in layers if s.bypass == fewest))
            names = [name for name in names if not any(inner.startswith(f"{name}.") for inner in names)]
            return names if len(names) > 1 or not family else [self._end(grid).name]
        names = [s.name for s in family]
        # With a class token, the head reads that token alone: the patch tokens of the last block get no gradient.
        return names[:-1] if family[-1].layout.prefix and not self._knows_nonzero else names

    def ends(self) -> list[CandidateLayer]:
        """Return the last layer of each resolution, in the order of the network."""
        ends = [self._end(grid) for grid in dict.fromkeys(s.layout.grid for s in self.usable)]
        coarsest = min(ends, key=lambda end: _cells(end.layout.grid), default=None)
        features = [end for end in ends if end is coarsest or not self._predicts(end)]
        ends = features if len(features) > 1 else ends
        strong = self._strong_grids()
        ends = [end for end in ends if end.layout.grid in strong or self._is_stage(end)] or ends
        ends.sort(key=lambda end: (end.layout.grid in strong, -_cells(end.layout.grid)))
        return sorted(ends[-MAX_AUTO_LAYERS:], key=self.usable.index)

    def _on(self, grid: Grid) -> list[CandidateLayer]:
        return [s for s in self.usable if s.layout.grid == grid]

    def _has_blocks(self, grid: Grid) -> bool:
        """Return whether a grid has several blocks that are more than the convolutions with norms of a stem."""
        family = self._family(grid)
        return len(family) > 1 and max(s.weighted for s in family) > _IN_STEMS

    def _family(self, grid: Grid, *, parallel: bool = False) -> list[CandidateLayer]:
        """Return the largest family of blocks of one class on a grid, as the network runs: siblings, or else any.

        Args:
            grid: the grid.
            parallel: whether to take parallel branches as well, which more features go around.
        """
        blocks = [s for s in self._on(grid) if _is_block(s)]
        fewest = min((s.bypass for s in blocks), default=0)
        blocks = [s for s in blocks if parallel or s.bypass == fewest]
        largest = max(_families(blocks, _siblings), key=_family_size, default=[])
        return largest if len(largest) > 1 else max(_families(blocks, _class), key=_family_size, default=[])

    def _end(self, grid: Grid) -> CandidateLayer:
        """Return the last layer of a grid: of the layers alike by each rule in turn, the last one.

        What begins a step to another grid belongs to that step. The fewer features go around a layer, the more of what
        is learned goes through it. What the network predicts is no feature. A block that works on many grids is the
        network rather than a layer of it, and a single layer after a larger block, such as a norm, adds little to it.
        """
        group = self._on(grid)
        group = [s for s in group if not s.is_dead_end] or group
        group = [s for s in group if not self._is_on_the_way(s)] or group
        group = [s for s in group if not self._predicts(s)] or group
        group = [s for s in group if not self._is_in_head(s)] or group
        fewest = min(s.bypass for s in group)
        tapped = _tapped(group, fewest)
        group = [s for s in group if s.bypass == fewest or s in tapped]
        group = [s for s in group if not self._holds_stages(s)] or group
        largest = max((_size(s) for s in group if _is_block(s)), default=-1)
        return [s for s in group if _is_block(s) or _size(s) > largest][-1]

    def _is_stage(self, s: CandidateLayer) -> bool:
        """Return whether a layer that features bypass is not a pooled pyramid, a detour or a step to another grid."""
        return _has_proportions(s) and not self._is_on_the_way(s)

    def _predicts(self, s: CandidateLayer) -> bool:
        """Return whether a layer gives what the network predicts: logits, or an image; not what a block adds up.

        A block predicts if a linear map in it does and nothing goes around that, or if it only adds up several.
        """
        if _feeds_weights(s) or not _is_block(s):
            return not _feeds_weights(s)
        inside = [part for part in self._candidates if part.weighted and part.name.startswith(f"{s.name}.")]
        ends = [part for part in inside if _is_linear_map(part) and not _feeds_weights(part)]
        adds = len(ends) > 1 and not any(_feeds_weights(part) and part.layout.grid == s.layout.grid for part in inside)
        return adds or any(end.bypass == s.bypass for end in ends)

    def _is_in_head(self, s: CandidateLayer) -> bool:
        """Return whether a layer is inside a block that predicts, and that works on this grid only."""
        heads = [end.name for end in self._on(s.layout.grid) if _is_block(end) and self._predicts(end)]
        return any(
            s.name.startswith(f"{head}.")
            and {grid for name, grid, _ in self._weights if name.startswith(f"{head}.")} == {s.layout.grid}
            for head in heads
        )

    def _holds_stages(self, s: CandidateLayer) -> bool:
        return len({grid for name, grid, _ in self._weights if name.startswith(f"{s.name}.")}) > 2

    def _is_on_the_way(self, s: CandidateLayer) -> bool:
        """Return whether a layer is on a detour from another grid (pooled keys), or begins a step to another grid.

        A block that steps works on two grids. A layer that is a block with most of its weights is more than the step.
        """
        for block in self._blocks_around(s):
            inside = [(grid, count) for name, grid, count in self._weights if name.startswith(f"{block}.")]
            before = sum(count for grid, count in inside if grid == s.layout.grid)
            is_small = not _is_block(s) or before < sum(count for _, count in inside) / 2
            steps = {grid for grid, _ in inside} <= {s.layout.grid, *self._grids[block]}
            if block in self._returning or (steps and (is_small or self._is_part_of_decoder_stage(s, block))):
                return True
        return False

    def _is_part_of_decoder_stage(self, s: CandidateLayer, block: str) -> bool:
        """Return whether a layer is in a part of a block that ends on a finer grid, not in its list of blocks."""
        part = s.name.removeprefix(f"{block}.").partition(".")[0]
        return f"{block}.{part}" in self._grids and _cells(s.layout.grid) < min(map(_cells, self._grids[block]))

    def _blocks_around(self, s: CandidateLayer) -> list[str]:
        """Return the blocks that hold a layer, though not all of them, and end on another grid."""
        parts = s.name.split(".")
        around = (".".join(parts[:depth]) for depth in range(1, len(parts)))
        blocks = (name for name in around if type(self._layers.get(name)) not in (*_PLAIN_CONTAINERS, type(None)))
        elsewhere = [name for name in blocks if len(self._grids[name]) == 1 and s.layout.grid not in self._grids[name]]
        return [name for name in elsewhere if not all(other.name.startswith(f"{name}.") for other in self.usable)]

    def _strong_grids(self) -> set[Grid]:
        """Return the grids that features must go through: those of cuts, and the levels of a U-Net.

        A U-Net's skips go around all of its deeper levels. It comes back to each level after a coarser one, but for the
        coarsest, which stands between two visits of the level above. Pooled features are visited the other way around.
        """
        visits = [grid for grid, _ in groupby(s.layout.grid for s in self.usable if s.weighted)]
        levels = {grid for grid in visits if grid not in self._cuts and _comes_back(grid, visits)}
        between = zip(visits, visits[1:], visits[2:], strict=False)
        bottoms = {grid for above, grid, below in between if above == below in levels and _cells(grid) < _cells(above)}
        return self._cuts | levels | (bottoms if len(bottoms) == 1 else set())


def _is_candidate(s: CandidateLayer) -> bool:
    """Return whether a layer gives features of the images, on a grid with several cells."""
    if not _learns(s) or _cells(s.layout.grid) < 2 or not _has_aspect(s):
        return False
    return s.position is None or (s.position.comes_from_images and (s.position.keeps_order or not s.layout.is_guessed))


def _learns(s: CandidateLayer) -> bool:
    """Return whether a layer computes features: it has weights or is an activation, and is not a list of layers."""
    if s.name == "" or type(s.layer) in _PLAIN_CONTAINERS:
        return False
    return s.weighted > 0 or type(s.layer).__module__ == nn.ReLU.__module__


def _has_aspect(s: CandidateLayer) -> bool:
    """Return whether one stride explains each side of the grid to within a cell.

    Convolutions may have another stride for each side; what everything goes through needs no other evidence.
    """
    is_sure = s.position is not None and s.position.is_cut and not s.layout.channels_last
    if s.image_grid is None or len(s.image_grid) != 2 or is_sure:
        return True
    sides = list(zip(s.image_grid, s.layout.grid, strict=True))
    largest = min(pixels / (cells - 1) if cells > 1 else math.inf for pixels, cells in sides)
    return all(pixels / (cells + 1) < largest for pixels, cells in sides)


def _has_proportions(s: CandidateLayer) -> bool:
    """Return whether the sides of the grid have the proportions of the image's."""
    if s.image_grid is None or len(s.image_grid) != 2:
        return True
    rows, columns = (cells / pixels for cells, pixels in zip(s.layout.grid, s.image_grid, strict=True))
    return abs(math.log(rows / columns)) < UNDISTORTED


def _without_windows(candidates: Sequence[CandidateLayer]) -> list[CandidateLayer]:
    """Return the candidates without those whose axes only look like a grid: attention's windows, and what is in them.

    Windows are cut from a grid that was seen before, so they have as many cells. A layer without weights says nothing
    about its axes: some layer with weights must be on the same grid.
    """
    with_weights = {s.layout.grid for s in candidates if s.weighted}
    first: dict[int, Grid] = {}
    for s in candidates:
        if s.layout.grid in with_weights:
            first.setdefault(_cells(s.layout.grid), s.layout.grid)
    return [s for s in candidates if first.get(_cells(s.layout.grid)) == s.layout.grid]


def _without_matrices(candidates: Sequence[CandidateLayer]) -> list[CandidateLayer]:
    """Return the candidates without those whose axes are tokens by tokens, as the matrices of attention are.

    Such an axis is as long as an earlier grid has cells, and features go around the matrix. A decoder may come to such
    a grid, too, but then everything goes through it, or it was there before.
    """
    kept: list[CandidateLayer] = []
    grids: set[Grid] = set()
    tokens: set[int] = set()
    for s in candidates:
        grid = s.layout.grid
        if grid in grids or not s.bypass or not tokens.issuperset(grid):
            kept.append(s)
            grids.add(grid)
            tokens.update((_cells(grid), _cells(grid) + s.layout.prefix))
    return kept


def _weights(candidates: Iterable[CandidateLayer]) -> list[tuple[str, Grid, int]]:
    """Name, grid and number of weights of each layer that has weights of its own and works on several cells."""
    layers = {s.name: s for s in candidates}.values()
    counts = ((s.name, s.layout.grid, sum(p.numel() for p in s.layer.parameters(recurse=False))) for s in layers)
    return [(name, grid, count) for name, grid, count in counts if count and _cells(grid) > 1]


def _representative(end: CandidateLayer, ends: Sequence[CandidateLayer], usable: Sequence[CandidateLayer]) -> str:
    """Return the best name for the tensor at `end`: the outermost block that gives it, else the innermost layer.

    A block that contains another chosen layer is the network rather than a layer of it.
    """
    same = [s for s in usable if s.tensor == end.tensor and s.layout.grid == end.layout.grid]
    names = [s.name for s in same]
    blocks = [s.name for s in same if s.weighted and next(s.layer.children(), None) is not None]
    others = [other.name for other in ends if other is not end]
    narrow = [name for name in blocks if not any(other.startswith(f"{name}.") for other in others)]
    return narrow[-1] if narrow else names[0]


def _of_all_depths(names: Sequence[str]) -> list[str]:
    """Return at most five names, the first and the last among them."""
    return [names[index] for index in evenly_spaced(len(names), MAX_AUTO_LAYERS)]


def _comes_back(grid: Grid, visits: Sequence[Grid]) -> bool:
    """Return whether a grid is visited again after a coarser one."""
    first, last = visits.index(grid), len(visits) - 1 - visits[::-1].index(grid)
    return any(_cells(other) < _cells(grid) for other in visits[first:last])


def _tapped(group: Iterable[CandidateLayer], fewest: int) -> list[CandidateLayer]:
    """Return the blocks of a list whose features a decoder uses, too: what it uses of one goes around the next ones."""
    in_lists = [s for s in group if _is_block(s) and s.name.rpartition(".")[2].isdigit()]
    families = _families(in_lists, _siblings)
    tapped = [one for one in families if one[0].bypass <= fewest + 1 and one[0].bypass < one[-1].bypass]
    return [s for family in tapped for s in family]


def _from_branch(s: CandidateLayer) -> CandidateLayer:
    """Return the candidate as if the block's input did not go around it."""
    return s if s.position is None else replace(s, position=replace(s.position, bypass=max(s.position.bypass - 1, 0)))


def _feeds_weights(s: CandidateLayer) -> bool:
    """Return whether any weights come after a layer; if the graph does not show it, they do."""
    return s.position is None or s.position.feeds_weights


def _is_linear_map(s: CandidateLayer) -> bool:
    """Return whether a layer is a single convolution, linear layer or the like: nothing comes after its sum."""
    return s.weighted == 1 and any(p.dim() > 1 for p in s.layer.parameters(recurse=False))


def _cells(grid: Grid) -> int:
    return math.prod(grid)


def _families(
    blocks: Iterable[CandidateLayer], key: Callable[[CandidateLayer], Hashable]
) -> list[list[CandidateLayer]]:
    """Return the blocks with the same key together, each once, as the network runs."""
    families: dict[Hashable, dict[str, CandidateLayer]] = defaultdict(dict)
    for s in blocks:
        families[key(s)][s.name] = s
    return [list(family.values()) for family in families.values()]


def _class(s: CandidateLayer) -> type:
    return type(s.layer)


def _siblings(s: CandidateLayer) -> tuple[str, type]:
    return s.name.rpartition(".")[0], type(s.layer)


def _family_size(family: Sequence[CandidateLayer]) -> tuple[int, int]:
    """Return how many blocks a family has, then how many weights."""
    return len(family), sum(map(_size, family))


def _size(s: CandidateLayer) -> int:
    return sum(p.numel() for p in s.layer.parameters())


def _is_block(s: CandidateLayer) -> bool:
    return s.weighted > 1
