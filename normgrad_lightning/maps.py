"""The kinds of maps there are, and a set of maps on its way from a source to the views.

Plain data, without torch at run time: the command line reads the same table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MapKind:
    """A kind of map.

    Attributes:
        name: what flags, tags and files call it.
        meaning: what a bright place means, in a few words, for captions.
        signed: whether zero means something: values above and below it have different colours.
        scales_with_loss: whether a loss twice as large makes a map twice as large.
        step: direction of the inner step that the kind is made after, along the gradient: -1 lowers the loss, +1 raises
            it. 0: no inner step; the kind is read from the training step itself, by its entry in
            `hooks.readings.READINGS`.
        of_weights: whether it has a meaning for a layer's own weight (`target="weight"`).
        made_of: the kinds, each with a `step`, that it is computed from, by the function of its name in `functional`.
    """

    name: str
    meaning: str
    signed: bool = False
    scales_with_loss: bool = True
    step: int = 0
    of_weights: bool = False
    made_of: tuple[str, ...] = ()

    @property
    def needs_passes(self) -> bool:
        """Whether it takes extra passes, after an inner step."""
        return self.step != 0 or bool(self.made_of)


_ROWS = (
    MapKind("order0", "training signal", of_weights=True),
    MapKind("order1", "matters for training", step=-1, of_weights=True),
    MapKind("adversarial", "would degrade the model", step=+1, of_weights=True),
    MapKind(
        "contrast",
        "red: order1, blue: adversarial",
        signed=True,
        scales_with_loss=False,
        of_weights=True,
        made_of=("order1", "adversarial"),
    ),
    MapKind("grad_cam", "speaks for the label"),
)

KINDS = {kind.name: kind for kind in _ROWS}
"""Every kind, by name."""

EPSILON = 5e-4
"""Size of the inner step, for kinds that take one: the paper's, and the default everywhere."""

READ_KINDS = tuple(name for name, kind in KINDS.items() if not kind.needs_passes)
"""Those that are read from a training step."""

Order1Kind = Literal["order1", "adversarial", "contrast"]
"""Those that take extra passes, as a type: command lines and editors list them."""

ORDER1_KINDS: tuple[Order1Kind, ...] = get_args(Order1Kind)


@dataclass(frozen=True)
class MapSet:
    """The maps of one kind at one step: of the images that are shown, on the CPU, or of a whole batch, where it is.

    Attributes:
        kind: what they show.
        step: `trainer.global_step` of the weights that they belong to.
        maps: the map `(N, *S)` of each layer that has one, in the order of the network.
        images: `(N, C, *S)`, as the network saw them; None if none was recognised.
        images_of: the same by layer. Another tensor than `images` if another backward pass reached the layer, as in a
            GAN.
        layers: all layers asked for, in the order of the network: a layer's index here is its number in tags.
        variant: distinguishes these tags from others of the kind: `_weight`, `_batch`.
        source: where the images came from: the training batch, or a probe.
        labels: the class of each image, where it is known; negative: none. A tensor as long as the set is on a device.
        classes: the names of the classes, by number; None: they have none.
        sums: the sum of each map `(N,)` over its locations, by layer, of the whole batch.
        largest: the largest value of each layer's maps, over the whole batch.
        group: what all tags of a callback begin with.
        masks: where the object is in each image, `(N, *S)` from 0 to 1, where the module says so.
    """

    kind: MapKind
    step: int
    maps: Mapping[str, Tensor]
    images: Tensor | None
    images_of: Mapping[str, Tensor | None]
    layers: Sequence[str]
    variant: str = ""
    source: str = "batch"
    labels: Sequence[int] | None = None
    classes: Sequence[str] | None = None
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    largest: Mapping[str, Tensor] = field(default_factory=dict)
    group: str = "normgrad"
    masks: Tensor | None = None

    @property
    def name(self) -> str:
        """The kind, and where the images came from if not from the training batch: `order0`, `probe_order0`."""
        return self.kind.name if self.source == "batch" else f"{self.source}_{self.kind.name}"

    @property
    def tag(self) -> str:
        """What its pictures are logged under."""
        return f"{self.group}_{self.name}{self.variant}"

    @property
    def tags(self) -> dict[str, str]:
        """What each layer's picture is logged under."""
        return numbered_tags(self.tag, self.layers)

    @property
    def class_names(self) -> list[str]:
        """The name of each image's class, or its number; empty where it is not known."""
        return ["" if label < 0 else class_name(label, self.classes) for label in self.labels or ()]

    @property
    def layers_of_one_input(self) -> list[str]:
        """The layers whose maps belong to the same images, which are there if any are: in a GAN not all do."""
        groups: dict[int, list[str]] = {}
        for layer in self.maps:
            groups.setdefault(id(self.images_of[layer]), []).append(layer)
        return max(groups.values(), key=lambda layers: (self.images_of[layers[0]] is not None, len(layers)))


def class_name(label: int, classes: Sequence[str] | None) -> str:
    """Return the name of a class, or its number."""
    return classes[label] if classes is not None and label < len(classes) else str(label)


def numbered_tags(group: str, layers: Iterable[str]) -> dict[str, str]:
    """Return a tag for each layer in a group; its number keeps the order of the network."""
    return {layer: f"{group}/{number:02d}_{layer}" for number, layer in enumerate(layers)}
