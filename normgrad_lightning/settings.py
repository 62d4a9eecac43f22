"""The flags of `NormGradCallback`, in groups that check themselves.

A new flag is a field of its group and an argument of the callback; everything else follows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args, get_type_hints

from torch.utils.data import DataLoader, Dataset

from normgrad_lightning.checks import check_choice, check_choices, check_flag, check_names, check_positive, check_whole
from normgrad_lightning.hooks.readings import check_kinds
from normgrad_lightning.isolated.inner_step import InnerStep
from normgrad_lightning.layers.names import AUTO, check_spec
from normgrad_lightning.layers.options import ReadOptions
from normgrad_lightning.maps import EPSILON, ORDER1_KINDS, READ_KINDS, Order1Kind
from normgrad_lightning.views.catalogue import ViewFlags
from normgrad_lightning.views.style import Style

Images = Literal["balanced", "first", "random", "hardest", "easiest"]
"""All classes in turn, the first of the batch, random ones, those with the most training signal or with the least."""

OnError = Literal["warn", "raise"]
"""Whether a failure of NormGrad is one warning, or an error."""

_NAME = re.compile(r"[\w.-]+")

ProbeOf = Literal["train", "val"]
"""Where the images of a probe are taken from: the first batch of training, or of validation."""

if TYPE_CHECKING:
    Probe: TypeAlias = ProbeOf | Any
else:
    Probe = ProbeOf | bool | None  # what command lines and configs can say; a batch can be given in code only

AS_IS = "as_is"
"""Marks a flag whose value is not a list of a config."""


@dataclass(frozen=True)
class GeneralFlags:
    """What to look at, and whether at all."""

    enabled: bool = True
    layers: str | Sequence[str] = AUTO
    grad_cam: bool = False
    check: bool | None = None
    name: str | None = None
    on_error: OnError = "warn"

    def __post_init__(self) -> None:
        check_flag("enabled", self.enabled)
        if self.name is not None and not (isinstance(self.name, str) and _NAME.fullmatch(self.name)):
            raise ValueError(
                f"`name`: expected letters, digits, dots, hyphens and underscores, or None, but got {self.name!r}."
            )
        check_spec(self.layers)
        for kind in READ_KINDS[1:]:
            check_flag(kind, getattr(self, kind))
        check_flag("check", self.check, or_none=True)
        check_choice("on_error", self.on_error, get_args(OnError))

    @property
    def kinds(self) -> list[str]:
        """What to read of the training step: order 0, and the kinds whose flag is on."""
        first, *others = READ_KINDS
        return [first, *(kind for kind in others if getattr(self, kind))]


@dataclass(frozen=True)
class ScheduleFlags:
    """Which steps are events."""

    every_n_steps: int | None = None
    order1_every_n_steps: int | None = None
    read_every_n_steps: int | None = None
    budget: float | None = 0.01

    def __post_init__(self) -> None:
        for name, hint in _INTERVALS.items():
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1, hint)
        if self.budget is not None:
            check_positive("budget", self.budget)
            if self.budget >= 1:
                raise ValueError(
                    f"`budget`: expected a share of the training time below 1, such as 0.01, but got {self.budget!r}."
                )

    @property
    def steps(self) -> str:
        """When there are events, for an announcement."""
        return "at steps 0, 10, 20, 50, 100, …" if self.every_n_steps is None else every(self.every_n_steps)


_INTERVALS = {
    "read_every_n_steps": " A large number reads events only.",
    "every_n_steps": " To switch the callback off, set `enabled=False`.",
    "order1_every_n_steps": " None switches order-1 maps off.",
}


def check_probe(probe: object) -> None:
    """Raise if it is none of the texts, no batch, and not False."""
    if probe is False or (isinstance(probe, str) and probe in get_args(ProbeOf)):
        return
    are_batches = isinstance(probe, DataLoader | Dataset)
    if are_batches or (probe is not None and _is_made_of_plain_values(probe)):
        known, came = ", ".join(map(repr, get_args(ProbeOf))), type(probe).__name__ if are_batches else repr(probe)
        hint = " Take one batch out of it: `probe=next(iter(loader))`." if are_batches else ""
        raise ValueError(
            f"`probe`: expected None, False, {known} or, in code, a batch of images, but got {came}.{hint}"
        )


def _is_made_of_plain_values(value: object) -> bool:
    """Return whether it is what a config can say: text, numbers, and lists and mappings of these."""
    if isinstance(value, str | bytes | int | float | None):
        return True
    if isinstance(value, Mapping):
        return all(map(_is_made_of_plain_values, value.values()))
    return isinstance(value, Sequence) and all(map(_is_made_of_plain_values, value))


def every(steps: int) -> str:
    """Return a number of steps in the words of an announcement."""
    return "every step" if steps == 1 else f"every {steps} steps"


MOST_READ = 64
"""Images of a batch that are read, at most: they say as much about a class as hundreds."""


@dataclass(frozen=True)
class ImageFlags:
    """Which images of the batch to show."""

    num_images: int = 8
    images: Images = "balanced"
    classes: Sequence[str] | None = None
    probe: Probe = field(default=None, metadata={AS_IS: True})

    def __post_init__(self) -> None:
        check_whole("num_images", self.num_images, 1)
        check_choice("images", self.images, get_args(Images))
        if self.classes is not None:
            check_names("classes", self.classes, "class")
        check_probe(self.probe)

    @property
    def asks_for_probe(self) -> bool:
        """Whether the user asks for a probe; None is one by default, where the network is recognised."""
        return self.probe is not None and self.probe is not False

    @property
    def by_signal(self) -> bool:
        """Whether the choice depends on the maps."""
        return self.images in ("hardest", "easiest")

    @property
    def read_first(self) -> int:
        """How many images of a batch are read at most, from the first on."""
        return self.num_images if self.images == "first" else max(self.num_images, MOST_READ)


@dataclass(frozen=True)
class Order1Flags:
    """Which order-1 maps to make, and how."""

    order1_maps: Order1Kind | Sequence[Order1Kind] = ORDER1_KINDS
    epsilon: float = EPSILON
    per_image: bool = True

    def __post_init__(self) -> None:
        kinds = [self.order1_maps] if isinstance(self.order1_maps, str) else self.order1_maps
        check_choices("order1_maps", kinds, ORDER1_KINDS)
        object.__setattr__(self, "order1_maps", tuple(kinds))
        check_flag("per_image", self.per_image)
        InnerStep(self.epsilon)

    @property
    def inner_step(self) -> InnerStep:
        """The inner step of each image, or of the batch."""
        return InnerStep(self.epsilon)


@dataclass(frozen=True)
class Settings:
    """All flags, by group."""

    general: GeneralFlags
    read: ReadOptions
    schedule: ScheduleFlags
    images: ImageFlags
    order1: Order1Flags
    style: Style
    views: ViewFlags

    def __post_init__(self) -> None:
        check_kinds(self.general.kinds, self.read.target)

    @classmethod
    def of(cls, flags: Mapping[str, Any]) -> Settings:
        """Return the settings that these flags mean; values of other names are ignored."""
        groups = {
            name: group(**{flag.name: _value(flag, flags[flag.name]) for flag in fields(group)})
            for name, group in get_type_hints(cls).items()
        }
        return cls(**groups)

    @property
    def variant(self) -> str:
        """Part of the tags of maps at other targets than a layer's output."""
        return "" if self.read.target == "output" else f"_{self.read.target}"

    @property
    def read_first(self) -> int:
        """How many images of a batch are read at most, from the first on."""
        return max(self.images.num_images, MOST_READ) if self.views.collects else self.images.read_first

    @property
    def recording(self) -> tuple[Any, ...]:
        """What hooks are put on the model for: other values of these need other hooks."""
        return self.general.layers, self.general.kinds, self.read, self.read_first

    def flags(self) -> dict[str, Any]:
        """Return each flag's value, by its name."""
        groups = [getattr(self, group.name) for group in fields(self)]
        return {flag.name: getattr(group, flag.name) for group in groups for flag in fields(group)}

    @cached_property
    def changed(self) -> str:
        """The flags that are not the default, but for batches and `on_error`: they tell two callbacks apart.

        Lightning asks for it several times a step.
        """
        kinds = [flag for group in get_type_hints(Settings).values() for flag in fields(group)]
        flags = {**self.flags(), "views": self.views.names}
        changed = {
            kind.name: flags[kind.name]
            for kind in kinds
            if AS_IS not in kind.metadata and flags[kind.name] != kind.default
        }
        return str(changed)

    def with_flag(self, name: str, value: Any) -> Settings:
        """Return the same settings with another value of one flag."""
        return self.of({**self.flags(), name: value})


FLAGS = frozenset(flag.name for group in get_type_hints(Settings).values() for flag in fields(group))
"""The names of all flags."""


def _value(flag: Field[Any], value: Any) -> Any:
    """Return lists of configs, such as OmegaConf's, as plain lists; other values, and batches, unchanged."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and AS_IS not in flag.metadata
    return list(value) if is_list else value
