"""Batches of any make are cut into single images; what could be cut in two ways is refused, and never cut wrongly."""

from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping, MutableMapping
from dataclasses import InitVar, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from normgrad_lightning.isolated.batches import CannotSlice, batch_size, copied, images_at, single_images
from normgrad_lightning.layers.nested import map_tensors


def numbers(*shape: int) -> Tensor:
    """A tensor without a number twice, so that no part of it can be taken for another."""
    count = int(np.prod(shape))
    numbers.start = getattr(numbers, "start", 0) + count
    return torch.arange(numbers.start - count, numbers.start, dtype=torch.float64).reshape(shape)


def images(count: int = 4) -> Tensor:
    return numbers(count, 3, 2, 5)


def labels(count: int = 4) -> Tensor:
    return torch.arange(count) + 10


def parts(value: Any) -> list[Any] | None:
    """What is compared one by one, if anything."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return list(value)
    return [getattr(value, f.name) for f in fields(value)] if is_dataclass(value) else None


def same(a: Any, b: Any) -> bool:
    """Whether both are of the same types and hold the same numbers."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor | np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if parts(a) is None:
        return bool(a == b)
    return len(parts(a)) == len(parts(b)) and all(map(same, parts(a), parts(b)))


def right_or_refused(batch: Any, expected: list[Any]) -> bool:
    """Whether a batch that could be read in two ways is not read in the wrong one."""
    try:
        return same(single_images(batch), expected)
    except CannotSlice:
        return True


Pair = namedtuple("Pair", "image label")


@dataclass
class Sample:
    image: Tensor
    label: Any


@dataclass(frozen=True)
class Frozen:
    image: Tensor
    area: Tensor = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "area", self.image.flatten(1).sum(1))


class Fields(UserDict):
    """As tokenizers give them."""


# ---------------------------------------------------------------------------------------------------------------------
# One part for each image


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(), (7,), (7, 2), (3, 5, 6), (3, 2, 5, 6)], ids=str)
def test_a_tensor_is_cut_along_its_first_axis(shape, count):
    t = numbers(count, *shape)
    assert batch_size(t) == count
    assert same(single_images(t), list(t.split(1)))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: [x, y],
        lambda x, y: (x, y),
        Pair,
        Sample,
        lambda x, y: {"image": x, "label": y},
        lambda x, y: OrderedDict(image=x, label=y),
        lambda x, y: defaultdict(list, {"image": x, "label": y}),
        lambda x, y: Fields(image=x, label=y),
        lambda x, y: {0: x, (1, "b"): y},
        lambda x, y: {"inputs": {"image": x}, "targets": {"deep": {"label": y}}},
        lambda x, y: {"pair": Pair(x, y)},
        lambda x, y: (Sample(x, y), 0.5),
        lambda x, y: [x, y, None, 0.3, torch.tensor(0.7), True, "train", torch.float16],
        lambda x, y: [x, y.numpy()],
        lambda x, y: {"path": [f"{int(i)}.png" for i in y], "x": x},
        lambda x, y: [x, tuple(Path(f"{int(i)}.png") for i in y)],
        lambda x, y: [x, [int(i) for i in y]],
        lambda x, y: [x, [i for i in y]],
        lambda x, y: (x, {"boxes": y[:, None].expand(-1, 4)}),
    ],
)
def test_images_and_labels_of_any_make_are_cut(make, count):
    """A list of things that are one for each image gives a list of one; everything else keeps its shape."""
    x, y = images(count), labels(count)
    batch = make(x, y)
    assert batch_size(batch) == count
    assert same(single_images(batch), [make(x[i : i + 1], y[i : i + 1]) for i in range(count)])
    indices = list(range(count))[::-2]
    assert same(images_at(batch, indices), make(x[indices], y[indices]))


@pytest.mark.parametrize(
    "values",
    [
        [["a"], ["b", "c"], [], ["d"]],
        [["one", "two", "three", "of", "five"]] * 4,
        [(5, 6)] * 4,
        [(5, 6), (7, 8), (9, 5), (4, 4)],
        [None, "a", "b", "c"],
        [0, 0.5, 1, 2],
        [None] * 4,
    ],
    ids=["tags", "captions", "sizes", "other sizes", "names or none", "int or float", "none"],
)
@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_that_hold_something_of_each_image_are_cut(kind, values):
    x = images(4)
    batch = [x, kind(values)]
    assert same(single_images(batch), [[x[i : i + 1], kind([values[i]])] for i in range(4)])
    assert same(images_at(batch, [3, 1]), [x[[3, 1]], kind([values[3], values[1]])])


@pytest.mark.parametrize("count", [2, 3])
def test_targets_of_some_images_only_are_not_cut_themselves(count):
    x, targets = images(count), [None] + [{"boxes": numbers(2, 4)} for _ in range(count - 1)]
    assert right_or_refused([x, targets], [[x[i : i + 1], targets[i : i + 1]] for i in range(count)])


def test_labels_in_an_object_array_are_cut():
    cut = single_images([images(3), np.array(["a", "b", "c"])])
    assert [names.tolist() for _, names in cut] == [["a"], ["b"], ["c"]]


def test_mappings_stay_what_they_are():
    (cut,) = single_images(defaultdict(list, x=images(1)))
    assert cut["nothing yet"] == []
    cut = single_images(OrderedDict(b=images(2), a=labels(2)))
    assert [list(one) for one in cut] == [["b", "a"]] * 2


def test_frozen_dataclasses_with_computed_fields_are_cut():
    batch = Frozen(images(3))
    cut = single_images(batch)
    assert same([one.image for one in cut], list(batch.image.split(1)))
    assert same([one.area for one in cut], list(batch.area.split(1)))


@pytest.mark.parametrize("count", [3, 4])
def test_batches_of_several_loaders_are_cut(count):
    def both(x, y):
        return {"a": [x, y], "b": [x + 0.5, y]}

    x, y = images(count), labels(count)
    assert same(single_images(both(x, y)), [both(x[i : i + 1], y[i : i + 1]) for i in range(count)])
    assert same(single_images(([x, y], None)), [([x[i : i + 1], y[i : i + 1]], None) for i in range(count)])


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("loaders", [1, 2])
@pytest.mark.parametrize("make", [lambda x, y: [x, y], lambda x, y: {"x": x, "y": y}, Sample, Pair])
def test_batches_of_a_list_of_loaders_are_cut(make, loaders, count):
    """As Lightning gives them for a list of loaders. Images with a batch axis are no samples without one."""
    x, y = images(count), labels(count)
    batch = [make(x + i, y + i) for i in range(loaders)]
    expected = [[make(x[k : k + 1] + i, y[k : k + 1] + i) for i in range(loaders)] for k in range(count)]
    assert same(single_images(batch), expected)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_two_views_are_cut_together(count):
    first, second, y = images(count), images(count), labels(count)
    cut = single_images([[first, second], y])
    assert same(cut, [[[first[i : i + 1], second[i : i + 1]], y[i : i + 1]] for i in range(count)])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_views_alone_are_cut_together_whatever_their_number(count):
    views = [images(count) for _ in range(3)]
    assert same(single_images(views), [[view[i : i + 1] for view in views] for i in range(count)])


@pytest.mark.parametrize("count", [1, 2, 4, 5])
@pytest.mark.parametrize("share", [0.3, torch.tensor(0.3)], ids=["float", "tensor"])
def test_mixed_labels_keep_their_share(share, count):
    x, a, b = images(count), labels(count), labels(count).flip(0)
    cut = single_images([x, (a, b, share)])
    assert same(cut, [[x[i : i + 1], (a[i : i + 1], b[i : i + 1], share)] for i in range(count)])


@pytest.mark.parametrize(
    "inputs",
    [
        {"audio": numbers(4, 2, 100)},
        {"video": numbers(4, 3, 8, 5, 6)},
        {"ids": torch.arange(28).reshape(4, 7), "attention": torch.ones(4, 7)},
        {"points": numbers(4, 50, 3), "classes": numbers(4, 50)},
        {"x": images(), "mask": torch.ones(4, 5, 6, dtype=torch.bool)},
    ],
    ids=lambda inputs: next(iter(inputs)),
)
def test_it_need_not_be_images(inputs):
    cut = single_images({**inputs, "label": labels()})
    assert same(cut, [{k: t[i : i + 1] for k, t in {**inputs, "label": labels()}.items()} for i in range(4)])


def test_only_the_chosen_ones_are_cut():
    x = images()
    assert same(single_images([x, labels()], [2, 0]), [[x[2:3], labels()[2:3]], [x[:1], labels()[:1]]])
    assert single_images(x, []) == []


def test_some_images_are_a_copy():
    x = images()
    some = images_at(x, [0, 1])
    some.zero_()
    assert x.any(dim=-1).all()


@pytest.mark.parametrize("index", [-1, 4])
def test_an_image_that_is_not_there_is_not_an_empty_batch(index):
    with pytest.raises((IndexError, CannotSlice)):
        single_images(images(4), [index])


# ---------------------------------------------------------------------------------------------------------------------
# Detection: a list of images of any size, and a list of targets


def detection(objects: list[int], sizes: list[tuple[int, int]] | None = None, kind: type = tuple, stack: Any = None):
    """A batch of a detector: images with so many objects, each."""
    sizes = sizes or [(5, 6)] * len(objects)
    pictures = kind(numbers(3, *size) for size in sizes)
    targets = kind(
        {"boxes": numbers(m, 4), "labels": numbers(m), "masks": numbers(m, *size), "name": f"{i}.png"}
        for i, (m, size) in enumerate(zip(objects, sizes, strict=True))
    )
    return kind((pictures if stack is None else stack, targets))


def of_each(batch: Any) -> list[Any]:
    pictures, targets = batch
    return [type(batch)((pictures[i : i + 1], targets[i : i + 1])) for i in range(len(targets))]


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize(
    ("objects", "sizes"),
    [
        ([1], None),
        ([3], None),
        ([2, 5], None),
        ([2, 2], None),
        ([2, 2], [(5, 6), (7, 6)]),
        ([3, 3], None),
        ([0, 1, 4, 2], None),
        ([4, 4, 4, 4], None),
        ([3, 3, 3, 3], None),
        ([1, 2, 3, 4], [(5, 6), (6, 5), (5, 5), (9, 9)]),
    ],
    ids=str,
)
def test_a_detector_gets_one_image_and_its_objects(objects, sizes, kind):
    batch = detection(objects, sizes, kind)
    assert batch_size(batch) == len(objects)
    assert same(single_images(batch), of_each(batch))
    last, first = of_each(batch)[-1], of_each(batch)[0]
    both = kind(a + b for a, b in zip(last, first, strict=True))
    assert same(images_at(batch, [len(objects) - 1, 0]), both)


@pytest.mark.parametrize("objects", [[1, 2, 5], [3, 3, 3]], ids=str)
@pytest.mark.parametrize("sizes", [[(5, 6)] * 3, [(5, 6), (7, 6), (5, 5)]], ids=["same", "different"])
def test_three_images_of_three_channels_are_three_images(objects, sizes):
    """A list of targets says that the other list is one of images: this is not the one batch size that is refused."""
    batch = detection(objects, sizes)
    assert same(single_images(batch), of_each(batch))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_targets_may_come_with_stacked_images(count):
    batch = detection([2] * count, stack=images(count))
    assert same(single_images(batch), of_each(batch))


def test_a_dict_of_images_and_targets_is_cut():
    pictures, targets = detection([1, 2, 3, 5], kind=list)
    cut = single_images({"images": pictures, "targets": targets})
    assert same(cut, [{"images": [p], "targets": [t]} for p, t in zip(pictures, targets, strict=True)])


@pytest.mark.parametrize("objects", [[3], [2, 2], [2, 2, 2, 2], [4, 4, 4, 4]], ids=str)
def test_masks_with_a_channel_are_not_taken_for_a_batch_of_images(objects):
    pictures, targets = detection(objects)
    batch = pictures, tuple({**target, "masks": target["masks"][:, None]} for target in targets)
    assert right_or_refused(batch, of_each(batch))


def test_boxes_of_all_images_in_one_tensor_are_refused():
    with pytest.raises(CannotSlice, match=r"boxes`? has shape \(7, 4\)"):
        single_images((images(), {"boxes": numbers(7, 4), "image": torch.zeros(7)}))


# ---------------------------------------------------------------------------------------------------------------------
# What could be cut in two ways


@pytest.mark.parametrize(
    ("batch", "part"),
    [
        ([[images(2), images(2)], labels(2)], "`0`"),
        ([images(3), (labels(3), labels(3), labels(3))], "`1`"),
        ({"a": [images(2), images(2)]}, "`a`"),
        ([[numbers(4, 5, 6) for _ in range(4)], labels()], "`0`"),
        (Sample(images(2), [labels(2), labels(2)]), "`label`"),
        ([images(2), [labels(2).numpy(), labels(2).numpy()]], "`1`"),
        ([images(2), [("a red cat", "a dog"), ("a cat", "a brown dog")]], "`1`"),
        ([images(2), [[labels(2), labels(2)], [labels(2), labels(2)]]], "`1`"),
    ],
    ids=["views", "3 heads", "in a dict", "4 channels", "dataclass", "arrays", "2 captions each", "lists"],
)
def test_as_many_tensors_as_images_are_refused_by_name(batch, part):
    """Two views of two images may be two clips of two frames, and so on."""
    with pytest.raises(CannotSlice, match=f"but {part} may be"):
        single_images(batch)


@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: {"a": [x, y]},
        lambda x, y: {"a": [x, None]},
        lambda x, y: {"a": [x, 7]},
        lambda x, y: {"a": [x, {"label": y}]},
        lambda x, y: {"a": [x, Sample(x, y)]},
        lambda x, y: ([x, y], [x, y]),
        lambda x, y: ([x, {"label": y}], 0.5),
    ],
    ids=["labels", "none", "int", "dict", "dataclass", "two loaders", "dict in tuple"],
)
def test_two_parts_of_two_images_are_not_taken_for_one_of_each(make):
    x, y = images(2), labels(2)
    assert right_or_refused(make(x, y), [make(x[i : i + 1], y[i : i + 1]) for i in range(2)])


def test_two_parts_of_two_images_and_their_names_are_not_taken_for_one_of_each():
    x = images(2)
    assert right_or_refused({"a": [x, ["p", "q"]]}, [{"a": [x[:1], ["p"]]}, {"a": [x[1:], ["q"]]}])


@pytest.mark.parametrize("share", [0.3, torch.tensor(0.3)], ids=["float", "tensor"])
def test_mixed_labels_of_three_images_are_not_taken_for_one_of_each(share):
    x, a, b = images(3), labels(3), labels(3).flip(0)
    expected = [[x[i : i + 1], (a[i : i + 1], b[i : i + 1], share)] for i in range(3)]
    assert right_or_refused([x, (a, b, share)], expected)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_list_of_images_is_not_cut_into_channels(count):
    batch = [numbers(3, 5, 6) for _ in range(count)]
    assert right_or_refused(batch, [[image] for image in batch])


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: (x, y),
        lambda x, y: [x, y[None]],
        lambda x, y: {"image": x, "boxes": numbers(3, 4)},
        lambda x, y: {"image": x, "label": y},
        lambda x, y: Sample(x, y),
    ],
    ids=["pairs", "pairs of tensors", "boxes", "dicts", "dataclasses"],
)
def test_a_list_of_samples_is_not_cut_into_channels(make, count):
    batch = [make(numbers(3, 5, 6), torch.tensor(i)) for i in range(count)]
    assert right_or_refused(batch, [[sample] for sample in batch])


@pytest.mark.parametrize("classes", [[0, 1], [torch.tensor(0), torch.tensor(1)], ["cat", "dog"]], ids=str)
def test_a_list_of_clips_is_not_cut_into_frames(classes):
    clips = [numbers(7, 3, 5, 6) for _ in range(2)]
    assert right_or_refused((clips, classes), [([clip], [c]) for clip, c in zip(clips, classes, strict=True)])


def test_a_single_clip_is_not_cut_into_frames():
    clip = numbers(7, 3, 5, 6)
    assert right_or_refused(([clip], [1]), [([clip], [1])])


def test_the_shape_of_a_batch_is_no_part_of_an_image():
    x = images(4)
    assert right_or_refused({"x": x, "shape": x.shape}, [{"x": x[i : i + 1], "shape": x.shape} for i in range(4)])


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be cut


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        (None, "there is no tensor with a batch axis"),
        ([], "there is no tensor with a batch axis"),
        ("text", "there is no tensor with a batch axis"),
        (torch.tensor(1.0), "there is no tensor with a batch axis"),
        (numbers(0, 3, 5, 6), "there is no tensor with a batch axis"),
        ([images(), labels(3)], r"`1` has shape \(3,\), which does not begin with 4"),
        ([labels(3), images()], r"`0` has shape \(3,\), which does not begin with 4"),
        ({"x": images(), "weights": numbers(10)}, r"`weights` has shape \(10,\), which does not begin with 4"),
        ([images(1), labels(2).numpy()], r"`1` has shape \(2,\), which does not begin with 1"),
        ({"x": images(), "more": {1, 2, 3, 4}}, "`more` is a 'set'"),
        (Sample(images(), object()), "`label` is a 'object'"),
        ([images(), iter("abcd")], "`1` is a 'str_(ascii_)?iterator'"),
    ],
)
def test_what_cannot_be_cut_is_told_by_name(batch, told):
    with pytest.raises(
        CannotSlice,
        match=f"^`batch`: expected tensors, .*, but {told}. Set `per_image=False`, which takes the batch as it is.$",
    ):
        batch_size(batch)


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        ({"a": [images(), labels()], "b": [images(3), labels(3)]}, "`b.0`"),
        ({"a": {"b": Sample(images(), numbers(7))}}, "`a.b.label`"),
        ([images(), Pair(labels(), {"x": set()})], r"`1\.(1|label)\.x`"),
    ],
)
def test_a_part_of_a_part_is_told_by_its_whole_name(batch, name):
    with pytest.raises(CannotSlice, match=rf"but {name} "):
        single_images(batch)


@pytest.mark.parametrize(
    "odd",
    [
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.nested.nested_tensor([numbers(2)] * 4, layout=torch.jagged),
        lambda: torch.nested.nested_tensor([numbers(2)] * 4),
    ],
    ids=["sparse", "jagged", "nested"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_have_no_slices_are_refused(odd):
    """Or cut, by a torch that can; but no other error comes out."""
    try:
        assert len(single_images([images(), odd()])) == 4
    except CannotSlice as error:
        assert "`1`" in str(error)  # noqa: PT017


def test_packed_sequences_are_refused():
    for sequences in ([numbers(5, 2)], [numbers(5, 2), numbers(3, 2)]):
        with pytest.raises(CannotSlice):
            single_images(pack_sequence(sequences))


def test_mappings_that_cannot_be_written_to_are_cut_or_refused():
    x = images(2)
    try:
        cut = single_images(MappingProxyType({"x": x}))
    except CannotSlice:
        return
    assert same([one["x"] for one in cut], list(x.split(1)))


def test_numbers_of_numpy_are_numbers():
    cut = single_images([images(2), np.float32(0.3), np.int64(7), np.bool_(True)])
    assert [one[1:] for one in cut] == [[np.float32(0.3), 7, True]] * 2


def test_dataclasses_are_not_made_anew():
    """What their `__post_init__` does is done already."""

    @dataclass
    class Bytes:
        image: Tensor
        scale: InitVar[float]

        def __post_init__(self, scale: float):
            self.image = self.image / scale

    batch = Bytes(images(2), 255.0)
    assert same([one.image for one in single_images(batch)], list(batch.image.split(1)))
    assert torch.equal(copied(batch).image, batch.image)


def test_post_init_is_not_run_a_second_time():
    @dataclass
    class Normalised:
        image: Tensor

        def __post_init__(self):
            self.image = self.image / 255

    batch = Normalised(images(2))
    assert same([one.image for one in single_images(batch)], list(batch.image.split(1)))
    assert torch.equal(copied(batch).image, batch.image)


# ---------------------------------------------------------------------------------------------------------------------
# No trace in the batch


class Own(MutableMapping):
    """A mapping that does not say how to copy it."""

    def __init__(self, **items):
        self.items_by_name = items

    def __getitem__(self, name):
        return self.items_by_name[name]

    def __setitem__(self, name, value):
        self.items_by_name[name] = value

    def __delitem__(self, name):
        del self.items_by_name[name]

    def __iter__(self):
        return iter(self.items_by_name)

    def __len__(self):
        return len(self.items_by_name)


@pytest.mark.parametrize("kind", [dict, OrderedDict, Fields, Own, Counter], ids=lambda kind: kind.__name__)
def test_cutting_a_mapping_does_not_change_it(kind):
    x = images(2)
    batch = kind(x=x)
    assert same([one["x"] for one in single_images(batch)], list(x.split(1)))
    copied(batch)["x"].zero_()
    map_tensors(lambda t: None, batch)
    assert list(batch) == ["x"]
    assert batch["x"] is x
    assert x.sum() > 0


def everything(x: Tensor) -> list[Any]:
    """All kinds of containers, each with a tensor."""
    return [x, (x, [x]), Pair(x, {"deep": x}), Sample(x, "note"), Frozen(x), Fields(x=x), OrderedDict(x=x), 0.5, None]


def tensors(nested: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, nested)
    return found


def test_a_copy_can_be_written_to():
    x = images(2)
    batch, before = everything(x), everything(x.clone())
    copy = copied(batch)
    assert same(copy, batch)
    written = tensors(copy)
    assert len(written) == 10
    for t in written:
        t.fill_(-1)
    copy[1][1].append("more")
    copy[2].label["more"] = copy[5]["more"] = 1
    copy[3].label = "other"
    assert same(batch, before)


def test_a_copy_can_be_written_to_where_it_is_an_array():
    array = np.arange(4)
    copy = copied([images(), {"labels": array}])
    copy[1]["labels"] += 1
    assert array.tolist() == [0, 1, 2, 3]


def test_a_copy_asks_for_no_gradient_and_keeps_its_layout():
    x = images(2).to(memory_format=torch.channels_last).requires_grad_()
    (copy,) = copied([x])
    assert not copy.requires_grad
    assert copy.stride() == x.stride()
    assert x.requires_grad


def test_every_tensor_is_mapped_in_order_and_nothing_else():
    count = iter(range(100))
    mapped = map_tensors(lambda t: next(count), {"a": [images(), 0.5], "b": Sample(labels(), Pair(labels(), "c"))})
    assert mapped == {"a": [0, 0.5], "b": Sample(1, Pair(2, "c"))}


def test_marked_tensors_keep_their_marks():
    """Boxes and masks of torchvision know what they are, and transforms go by it."""
    tv = pytest.importorskip("torchvision.tv_tensors")

    def target(m: int) -> dict[str, Any]:
        boxes = tv.BoundingBoxes(torch.rand(m, 4), format="XYXY", canvas_size=(5, 6))
        return {"boxes": boxes, "masks": tv.Mask(torch.ones(m, 5, 6))}

    batch = [tv.Image(torch.rand(3, 5, 6)) for _ in range(2)], [target(1), target(5)]
    cut = single_images(copied(batch))
    assert same(cut, [([p], [t]) for p, t in zip(*batch, strict=True)])
    assert cut[1][1][0]["boxes"].canvas_size == (5, 6)


def test_a_stack_of_marked_images_is_cut():
    tv = pytest.importorskip("torchvision.tv_tensors")
    x = images(2)
    cut = single_images([tv.Image(x), labels(2)])
    assert [torch.equal(image.as_subclass(Tensor), x[i : i + 1]) for i, (image, _) in enumerate(cut)] == [True] * 2


# ---------------------------------------------------------------------------------------------------------------------
# Any batch: built of what belongs to each image, it is taken apart into just that

Part = tuple[Any, list[Any]]
"""A part of a batch, and what it holds of each image."""


@st.composite
def leaves(draw: st.DrawFn, count: int) -> Part:
    kind = draw(st.sampled_from(["stack", "array", "ragged", "names", "targets", "constant"]))
    if kind in ("stack", "array"):
        t = numbers(count, *draw(st.lists(st.integers(1, 4), max_size=4)))
        whole = t.numpy() if kind == "array" else t
        return whole, [whole[i : i + 1] for i in range(count)]
    if kind == "constant":
        value = draw(st.sampled_from([None, 0.5, 7, "train", torch.tensor(0.5)]))
        return value, [value] * count
    sizes = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    each = {
        "ragged": lambda m: numbers(m, 4),
        "names": lambda m: "x" * m,
        "targets": lambda m: {"boxes": numbers(m, 4), "labels": numbers(m)},
    }[kind]
    values = [each(m) for m in sizes]
    sequence = draw(st.sampled_from([list, tuple]))
    return sequence(values), [sequence([value]) for value in values]


Three = namedtuple("Three", "a b c", defaults=[None, None])


@dataclass
class Data:
    a: Any
    b: Any = None
    c: Any = None


MAKES = {
    "list": list,
    "tuple": tuple,
    "dict": lambda values: dict(zip("abc", values, strict=False)),
    "namedtuple": lambda values: Three(*values),
    "dataclass": lambda values: Data(*values),
}


def joined(make: Any, children: list[Part]) -> Part:
    wholes, items = zip(*children, strict=True)
    return make(wholes), [make(values) for values in zip(*items, strict=True)]


def nests(count: int) -> st.SearchStrategy[Part]:
    def deeper(children: st.SearchStrategy[Part]) -> st.SearchStrategy[Part]:
        lists = st.lists(children, min_size=1, max_size=3)
        return st.builds(joined, st.sampled_from(list(MAKES.values())), lists).filter(lambda part: tellable(part[0]))

    return st.recursive(leaves(count), deeper, max_leaves=6)


def tellable(nested: Any) -> bool:
    """Not a list of numbers for all images, nor a list of dicts for all: below the top, these are one for each image.

    Nobody could tell the difference. An image without targets may have None.
    """
    if not isinstance(nested, list | tuple) or hasattr(nested, "_fields"):
        return True
    alike = all(item is None or isinstance(item, dict) or is_dataclass(item) for item in nested)
    constant = all(
        item is None or isinstance(item, int | float | str) or not np.ndim(item) for item in map(flat, nested)
    )
    return not alike and not constant


def flat(item: Any) -> Any:
    return item if isinstance(item, Tensor | np.ndarray | str | int | float | None) else [1]


@st.composite
def batches(draw: st.DrawFn, counts: st.SearchStrategy[int]) -> Part:
    count = draw(counts)
    x = images(count)
    children = [(x, list(x.split(1))), *draw(st.lists(nests(count), max_size=2))]
    return joined(draw(st.sampled_from(list(MAKES.values()))), draw(st.permutations(children)))


@settings(max_examples=150)
@given(batches(st.just(7)))
def test_any_batch_of_a_size_that_nothing_else_has_is_cut(part):
    batch, items = part
    assert batch_size(batch) == 7
    assert same(single_images(batch), items)


@settings(max_examples=300)
@given(batches(st.integers(1, 4)))
def test_any_batch_is_cut_rightly_or_refused(part):
    batch, items = part
    assert right_or_refused(batch, items)


@settings(max_examples=150)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.booleans(), st.sampled_from([list, tuple]), st.data())
def test_any_detection_batch_is_cut(objects, same_sizes, kind, data):
    sides = st.tuples(st.integers(1, 4), st.integers(1, 4))
    sizes = None if same_sizes else [data.draw(sides) for _ in objects]
    batch = detection(objects, sizes, kind)
    assert same(single_images(batch), of_each(batch))
