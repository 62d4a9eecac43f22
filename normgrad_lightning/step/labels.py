"""Which class each image of a batch belongs to, and what the classes are called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from normgrad_lightning.layers.nested import parts, stored_parts
from normgrad_lightning.step.own_methods import call_optional_method

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule

METHOD = "normgrad_labels"
USUAL_NAMES = ("label", "labels", "target", "targets", "y", "class", "class_id", "class_label", "category")
_DEEPEST = 8  # data sets inside of data sets; one that holds itself would never end


class _Found(NamedTuple):
    """Labels in a batch, and the key or index where they are."""

    name: str
    labels: Any


def labels_of(module: LightningModule, batch: Any) -> list[int] | None:
    """Return the class of each image: what the module's `normgrad_labels(batch)` returns, else what the batch has.

    None if there are no labels, or if several things could be them.

    Raises:
        ValueError: what `normgrad_labels` returns are not labels.
    """
    return listed(labels_on_device(module, batch))


def listed(labels: Any) -> list[int] | None:
    """Return labels as a list; those on a device are waited for."""
    return labels.tolist() if isinstance(labels, Tensor) else labels


def labels_on_device(module: LightningModule, batch: Any) -> Any:
    """Return the same, as a tensor where they are one: then nobody waits for a device.

    Raises:
        ValueError: what `normgrad_labels` returns are not labels.
    """
    if not hasattr(module, METHOD):
        return found_labels(batch)
    given = call_optional_method(module, METHOD, batch)
    if given is None:
        return None
    labels = _as_labels(given)
    if labels is None:
        raise ValueError(
            f"`{METHOD}`: expected the class of each image as a vector of whole numbers, or None, but got "
            f"{_described(given)}. Return one number for each image."
        )
    return labels


def found_labels(batch: Any) -> Any:
    """Return the labels in a batch: those of a usual name, else the only ones, else those right after the images.

    The latter not if no two of them are the same: then they may as well be numbers of the images.
    """
    image, siblings = next(_images(batch), (None, 0))
    for count in (None,) if image is None else filter(None, (siblings, len(image))):
        found = list(_search(batch, "", count))
        named = [one for one in found if one.name.lower() in USUAL_NAMES]
        for candidates in (named, found):
            if len(candidates) == 1:
                return candidates[0].labels
        after_images = [one.labels for one in found if one.name == "1"]
        if len(after_images) == 1 and _repeats(after_images[0]):
            return after_images[0]
    return None


def _repeats(labels: Any) -> bool:
    values = listed(labels) or []
    return len(set(values)) < len(values)


def _images(nested: Any, siblings: int = 0) -> Iterator[tuple[Tensor, int]]:
    """Yield tensors that may be images, and of a list of single images, how many there are."""
    if isinstance(nested, Tensor) and nested.dim() >= 3:
        yield nested, siblings
    values = [part.value for part in stored_parts(nested)]
    are_single = isinstance(nested, list) and all(isinstance(t, Tensor) and t.dim() == 3 for t in values)
    for value in values:
        yield from _images(value, len(values) if are_single else 0)


def _search(nested: Any, name: str, count: int | None) -> Iterator[_Found]:
    """Yield all that may be labels of this many images; what is in a list of dicts, one for each image, is none."""
    labels = _as_labels(nested)
    if labels is not None and count in (None, len(labels)):
        yield _Found(name, labels)
    elif not (
        isinstance(nested, list)
        and len(nested) == count
        and all(isinstance(one.value, Mapping) for one in stored_parts(nested))
    ):
        yield from chain.from_iterable(_search(part.value, part.name, count) for part in stored_parts(nested))


def _as_labels(value: Any) -> Any:
    """Return whole numbers, yes and no as 1 and 0, or the largest of each image's probabilities; None: no labels."""
    if isinstance(value, list | tuple):
        values = [part.value for part in stored_parts(value)]
        return values if values and all(type(one) is int for one in values) else None
    if not isinstance(value, Tensor) or value.is_nested or value.layout is not torch.strided or not value.numel():
        return None
    value = value.detach()
    if value.dim() == 2 and value.shape[1] == 1:
        value = value[:, 0]
    if value.dim() == 2:
        return value.argmax(1) if _are_probabilities(value) else None
    if value.dim() != 1 or value.is_complex():
        return None
    if value.is_floating_point() and not bool(((value == 0) | (value == 1)).all()):
        return None
    return value.to(torch.long, copy=True)


def _are_probabilities(rows: Tensor) -> bool:
    """Return whether each row adds up to one, as soft labels do; also after MixUp, and in half precision."""
    if rows.is_complex():
        return False
    rows = rows.float()
    return bool((rows >= 0).all() and ((rows.sum(1) - 1).abs() < 1e-2).all())


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else repr(value)


def classes_of(loaders: Any) -> list[str] | None:
    """Return the names of the classes in the first data set that has them as `classes`, as those of torchvision do."""
    for dataset in datasets_of(loaders):
        names = getattr(dataset, "classes", None)
        if isinstance(names, list | tuple) and names and all(isinstance(name, str) for name in names):
            return list(names)
    return None


def datasets_of(loaders: Any) -> Iterator[Any]:
    """Yield the data sets of loaders in any collection, and those that they are made of."""
    return chain.from_iterable(_and_inside(loader.dataset, _DEEPEST) for loader in _loaders(loaders))


def _loaders(nested: Any) -> Iterator[Any]:
    """Yield all that has a data set, also in a collection of loaders."""
    if hasattr(nested, "dataset"):
        yield nested
    for part in parts(getattr(nested, "iterables", nested)):
        yield from _loaders(part.value)


def _and_inside(dataset: Any, depth: int) -> Iterator[Any]:
    """Yield a data set, and those that it is made of, as a `Subset` or a `ConcatDataset` is."""
    if dataset is None or depth == 0:
        return
    yield dataset
    several = getattr(dataset, "datasets", ())
    for inner in (getattr(dataset, "dataset", None), *(several if isinstance(several, list | tuple) else ())):
        yield from _and_inside(inner, depth - 1)


def check_classes(classes: Sequence[str], loaders: Any, module: LightningModule) -> None:
    """Raise if there are not as many names as the data set or the module has classes, where these say so."""
    in_data = classes_of(loaders)
    hparams = getattr(module, "hparams", None) or {}
    known = {
        "the training data set has `classes` of length": None if in_data is None else len(in_data),
        f"{type(module).__name__} has `num_classes` =": getattr(module, "num_classes", None),
        "the hyperparameters have `num_classes` =": hparams.get("num_classes"),
    }
    for where, count in known.items():
        if type(count) is int and count != len(classes):
            raise ValueError(
                f"`classes`: expected a name for each class, but got {len(classes)} names, and {where} {count}. "
                "Give one name for each, in the order of their numbers."
            )
