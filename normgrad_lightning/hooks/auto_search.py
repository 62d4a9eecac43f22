"""The search for the layers that `"auto"` takes: what layers give shows only once images have gone through."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from normgrad_lightning.auto_layers.candidates import CandidateLayer, CandidateLayers, has_weights
from normgrad_lightning.auto_layers.choose import choose
from normgrad_lightning.auto_layers.graph import Graph, value_of
from normgrad_lightning.hooks.image_inputs import ImageInputs
from normgrad_lightning.hooks.problems import OUT_OF_ORDER
from normgrad_lightning.layers.layouts import Layouts
from normgrad_lightning.layers.names import why_no_weight
from normgrad_lightning.layers.nested import first_tensor, floating_tensors

_OF_CLIPS = "its tokens are those of several images at once, as of the frames of a clip, and belong to no single one"


class AutoSearch:
    """Notes the layers that give features on a grid, and chooses among them.

    Args:
        target: what is read of a layer; see `NormGrad`.
        layouts: how tensors are read as features on a grid.
        images: finds the images of each step.

    Attributes:
        candidates: the layers seen to give features on a grid, in the order of their calls.
        has_seen_grid: whether a layer with weights, or after one, gave such features.
        has_seen_complex: whether a layer gave complex numbers.
    """

    def __init__(self, target: str, layouts: Layouts, images: ImageInputs) -> None:
        self.candidates = CandidateLayers()
        self.has_seen_grid = self.has_seen_complex = False
        self._target = target
        self._layouts = layouts
        self._images = images
        self._off_grid: dict[str, dict[str, None]] = {}

    def choose(self, among: Container[str] | None = None, nonzero: Container[str] | None = None) -> list[str]:
        """Return the layers to take; for weights, of those that have one.

        Args:
            among: names of layers to choose from; None: all.
            nonzero: names of the layers whose maps are not zero everywhere; None: unknown.
        """
        of_weights = self._target == "weight"
        candidates = [
            candidate
            for candidate in self.candidates
            if (not of_weights or why_no_weight(candidate.layer) is None)
            and (among is None or candidate.name in among)
            and not self._mixes_frames(candidate)
        ]
        return choose(candidates, nonzero, in_branches=of_weights)

    def left_out(self, reached: Container[str]) -> Iterator[tuple[list[str], str]]:
        """Yield the layers whose tokens are on no grid, with the reason."""
        candidates = [c for c in self.candidates if c.name in reached]
        in_order = [c for c in candidates if not c.is_out_of_order]
        lost = [c for c in candidates if c.is_out_of_order and not (c.bypass and _stands_for(in_order, c))]
        yield [c.name for c in lost if c.weighted > 1] or [c.name for c in lost], OUT_OF_ORDER
        for why, names in self._off_grid.items():
            yield list(names), why

    def _mixes_frames(self, candidate: CandidateLayer) -> bool:
        """Return whether a layer is a branch inside a block whose tokens are those of several frames."""
        return candidate.bypass > 0 and any(
            candidate.name.startswith(f"{name}.") for name in self._off_grid.get(_OF_CLIPS, ())
        )

    def keeps_order(self, point: Tensor) -> bool:
        """Return whether the tokens of a tensor are in the order of the image's rows, as far as its graph shows."""
        position = Graph([point], self.candidates.first_features()).position_of(value_of(point))
        return position is None or position.keeps_order

    def note_features(self, layer: nn.Module, given: Tensor | None) -> None:
        """Note what a layer gives that may be the first to read the images."""
        images = self._images.latest
        if given is not None and images is not None and images.may_begin_at(layer):
            self.candidates.note_source(self._images.count, given, is_sure=images.is_sure)

    def note_call(self, name: str, layer: nn.Module, inputs: Any, output: Any, *, is_entry_module: bool) -> None:
        """Note a call of a layer: whether it gives features on a grid, and where in the network it stands."""
        given = lone_tensor(output)
        t = first_tensor(inputs) if self._target == "input" else given
        self._note_candidate(name, layer, t, returns=_same_locations(lone_tensor(inputs), given))
        if is_entry_module:
            self.candidates.locate(floating_tensors(output), has_weights=has_weights(layer))

    def _note_candidate(self, name: str, layer: nn.Module, t: Tensor | None, *, returns: bool) -> None:
        images, number = self._images.latest, self._images.count
        if t is None or t.is_nested or not self.candidates.wants(name, number):
            return
        if t.is_complex():
            self.has_seen_complex = True
            return
        image_shape, patches = (None, None) if images is None else (images.shape, images.patch_grid)
        try:
            layout = self._layouts.of(layer, t, image_shape, patches)
        except ValueError as error:
            if images is not None and images.may_hold_patches(t) and has_weights(layer):
                why = str(error) if t.shape[0] == images.shape[0] else _OF_CLIPS
                self._off_grid.setdefault(why, {})[name] = None
            return
        image_grid = None if image_shape is None else tuple(image_shape[2:])
        self.candidates.add(number, t, name, layer, layout, image_grid=image_grid, returns=returns)
        self.has_seen_grid |= t.requires_grad or has_weights(layer)


def lone_tensor(output: Any) -> Tensor | None:
    """Return what a layer gives, if it is one tensor, or a first one on a grid before states with fewer axes."""
    if isinstance(output, Tensor):
        return output
    candidates = [t for t in floating_tensors(output) if t.dim() >= 3]
    is_alone = candidates and all(t.dim() < candidates[0].dim() for t in candidates[1:])
    return candidates[0] if is_alone else None


def _stands_for(others: Iterable[CandidateLayer], one: CandidateLayer) -> bool:
    """Return whether any of these layers holds the one, or is on its grid."""
    return any(one.name.startswith(f"{other.name}.") or other.layout.grid == one.layout.grid for other in others)


def _same_locations(taken: Tensor | None, given: Tensor | None) -> bool:
    """Return whether two tensors have the same axes; channels, first or last, may differ."""
    if taken is None or given is None or taken.is_nested or given.is_nested:
        return False
    if taken.dim() != given.dim() or taken.dim() < 3:
        return False
    return taken.shape[2:] == given.shape[2:] or taken.shape[1:-1] == given.shape[1:-1]
