"""Which class an image belongs to, what the classes are called, and which images are shown because of it."""

from collections import Counter, namedtuple
from dataclasses import dataclass

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from networks import ResNet
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset
from twice import Lit as LitOfTwice
from twice import assert_same, train, watching

from normgrad_lightning import NormGradCallback
from normgrad_lightning.maths.signal import signal
from normgrad_lightning.settings import ImageFlags
from normgrad_lightning.step.image_choice import ImageChoice
from normgrad_lightning.step.labels import classes_of, labels_of

IMAGES = torch.zeros(4, 3, 8, 8)
LABELS = [2, 0, 2, 1]
VECTOR = torch.tensor(LABELS)
NAMES = ["cat", "dog", "owl"]
Sample = namedtuple("Sample", "image target")


@dataclass
class Batch:
    pixels: torch.Tensor
    y: torch.Tensor


# ---------------------------------------------------------------- labels in a batch

FOUND = {
    "a tuple": (IMAGES, VECTOR),
    "a list": [IMAGES, VECTOR],
    "a named tuple": Sample(IMAGES, VECTOR),
    "a dataclass": Batch(IMAGES, VECTOR),
    "a dict": {"image": IMAGES, "label": VECTOR},
    "a usual key beside other numbers": {"image": IMAGES, "index": torch.arange(4), "Label": VECTOR},
    "a dict in a tuple": (IMAGES, {"target": VECTOR, "id": torch.arange(4)}),
    "after the images, before other numbers": (IMAGES, VECTOR, torch.arange(4)),
    "a column": (IMAGES, VECTOR[:, None]),
    "small integers": (IMAGES, VECTOR.to(torch.uint8)),
    "a list of numbers": (IMAGES, LABELS),
    "one-hot rows": (IMAGES, F.one_hot(VECTOR)),
    "soft labels": (IMAGES, F.one_hot(VECTOR).float() * 0.7 + 0.1),
    "soft labels in half precision": (IMAGES, (F.one_hot(VECTOR).float() * 0.7 + 0.1).half()),
    "images in bytes": (IMAGES.byte(), VECTOR),
    "a list of images": (list(IMAGES), VECTOR),
    "a list of two views without channels": ([IMAGES[:, 0], IMAGES[:, 0]], VECTOR),
    "a list of images, labels in a dict": {"picture": list(IMAGES), "meta": {"label": LABELS}},
}


@pytest.mark.parametrize("batch", FOUND.values(), ids=FOUND)
def test_labels_are_found(batch):
    assert labels_of(Lit(), batch) == LABELS


def test_yes_and_no_are_two_classes():
    answer = torch.tensor([True, False, True, True])
    for labels in (answer, answer.float(), answer.float()[:, None]):
        assert labels_of(Lit(), (IMAGES, labels)) == [1, 0, 1, 1]


NOT_FOUND = {
    "images alone": IMAGES,
    "two views": (IMAGES, IMAGES),
    "masks": (IMAGES, torch.zeros(4, 8, 8, dtype=torch.long)),
    "boxes": ([IMAGES[0]] * 4, [{"boxes": torch.zeros(1, 4), "labels": torch.ones(1).long()}] * 4),
    "as many boxes as images": ([IMAGES[0]] * 4, [{"labels": VECTOR}, *[{"labels": torch.ones(1).long()}] * 3]),
    "several labels of an image": (IMAGES, torch.tensor([[1.0, 1.0, 0.0]] * 4)),
    "a regression": (IMAGES, torch.rand(4)),
    "too many": (IMAGES, torch.arange(5)),
    "too few": (IMAGES, torch.arange(3)),
    "none": (IMAGES, torch.zeros(0, dtype=torch.long)),
    "two that may be it": {"image": IMAGES, "shape": VECTOR, "colour": VECTOR},
    "numbers of the images, then labels": (IMAGES, torch.arange(4), VECTOR),
    "two under usual names": {"image": IMAGES, "label": VECTOR, "target": VECTOR},
    "complex numbers": (IMAGES, torch.zeros(4, dtype=torch.complex64)),
    "text": (IMAGES, ["a", "b", "c", "d"]),
    "nothing": None,
}


@pytest.mark.parametrize("batch", NOT_FOUND.values(), ids=NOT_FOUND)
def test_what_are_no_labels_is_not_taken_for_them(batch):
    assert labels_of(Lit(), batch) is None


# ---------------------------------------------------------------- names of classes


class Named(Dataset):
    classes = NAMES

    def __len__(self):
        return 3

    def __getitem__(self, i):
        return torch.zeros(1), i


def test_names_come_from_the_data_set_however_it_is_wrapped():
    named, other = Named(), TensorDataset(torch.zeros(3))
    for dataset in (named, Subset(named, [0]), ConcatDataset([other, named]), Subset(ConcatDataset([named]), [0])):
        assert classes_of(DataLoader(dataset)) == NAMES
    assert classes_of({"a": DataLoader(other), "b": [DataLoader(named)]}) == NAMES
    assert classes_of(DataLoader(other)) is None
    assert classes_of(None) is None


@pytest.mark.parametrize("classes", [3, [], "cat", [1, 2], [None], {"cat": 0}])
def test_classes_of_another_make_are_no_names(classes):
    named = Named()
    named.classes = classes
    assert classes_of(DataLoader(named)) is None


def test_a_data_set_that_holds_itself_ends():
    named = Named()
    named.dataset, named.classes = named, None
    assert classes_of(DataLoader(named)) is None


# ---------------------------------------------------------------- which images


def indices(images, labels, num_images, choice=None, sums=None):
    choice = choice or ImageChoice()
    return choice.indices(ImageFlags(num_images=num_images, images=images), sums or {}, len(labels), labels)


def test_classes_take_turns():
    labels = [0, 0, 0, 0, 0, 1, 0, 2]
    assert indices("balanced", labels, 3) == [0, 5, 7]
    assert indices("balanced", labels, 5) == [0, 1, 2, 5, 7]
    assert indices("balanced", labels, 99) == [0, 1, 2, 3, 4, 6, 5, 7]


def test_classes_that_were_shown_least_have_the_next_turn():
    choice, labels, shown = ImageChoice(), list(range(10)), Counter()
    for _ in range(5):
        shown.update(indices("balanced", labels, 4, choice))
    assert shown == dict.fromkeys(range(10), 2)
    resumed = ImageChoice()
    indices("balanced", labels, 4, choice)
    resumed.load_state_dict(choice.state_dict())
    assert indices("balanced", labels, 4, resumed) == indices("balanced", labels, 4, choice) == [4, 5, 6, 7]


def test_a_class_that_was_away_does_not_take_all_tiles():
    choice = ImageChoice()
    for _ in range(5):
        indices("balanced", [0, 0, 1, 1], 4, choice)
    assert indices("balanced", [2, 2, 2, 2, 0, 1], 3, choice) == [4, 5, 0]


def test_a_state_of_0_1_0_has_no_turns():
    choice = ImageChoice()
    choice.load_state_dict({"random": choice.state_dict()["random"]})
    assert indices("balanced", [1, 0], 1, choice) == [1]


def test_the_hardest_and_the_easiest_are_those_with_the_most_and_the_least_signal():
    sums = {"a": torch.tensor([1.0, 5.0, 2.0, 2.0]), "b": torch.tensor([1.0, 9.0, 8.0, 2.0])}
    assert indices("hardest", [0] * 4, 2, sums=sums) == [1, 2]
    assert indices("easiest", [0] * 4, 2, sums=sums) == [0, 3]


def test_parts_of_the_signal_add_up_to_one_and_dead_layers_do_not_count():
    sums = {"a": torch.tensor([2.0, 6.0]), "dead": torch.zeros(2), "b": torch.tensor([4.0, 4.0])}
    assert signal(sums, 2).tolist() == [(0.25 + 0.5) / 2, (0.75 + 0.5) / 2]
    assert signal({"dead": torch.zeros(2)}, 2).tolist() == [0, 0]


# ---------------------------------------------------------------- in training


class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = ResNet()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


class Pictures(TensorDataset):
    """Nine pictures of class 0, one of class 1, two of class 2."""

    labels = torch.tensor([0] * 9 + [1, 2, 2])

    def __init__(self, labels=None, **attributes):
        torch.manual_seed(1)
        super().__init__(torch.randn(12, 3, 16, 16), self.labels if labels is None else labels)
        vars(self).update(attributes)


def fit(module=None, dataset=None, **flags):
    callback = NormGradCallback(**{"every_n_steps": 1, "num_images": 4, "on_error": "raise", **flags})
    trainer = pl.Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(module or Lit(), DataLoader(dataset or Pictures(), batch_size=12))
    return callback.latest["order0"]


def test_labels_and_names_come_with_the_maps():
    seen = fit(dataset=Pictures(classes=NAMES))
    assert seen.labels == [0, 0, 1, 2]
    assert seen.class_names == ["cat", "cat", "dog", "owl"]


def test_classes_of_the_flag_come_before_those_of_the_data_set():
    assert fit(dataset=Pictures(classes=NAMES), classes=["a", "b", "c"]).class_names == ["a", "a", "b", "c"]
    assert fit(classes=["a", "b", "c"]).class_names == ["a", "a", "b", "c"]


def test_without_names_classes_have_numbers():
    assert fit().class_names == ["0", "0", "1", "2"]


def test_a_class_without_a_name_has_its_number():
    assert fit(classes=["a", "b"]).class_names == ["a", "a", "b", "2"]


def test_the_module_may_say_what_the_labels_are():
    class Own(Lit):
        def normgrad_labels(self, batch):
            return 2 - batch[1]

    seen = fit(Own())
    assert seen.labels == [0, 0, 1, 2]
    assert torch.equal(seen.images, Pictures().tensors[0][[10, 11, 9, 0]])

    class NoneAtAll(Lit):
        def normgrad_labels(self, batch):
            return None

    seen = fit(NoneAtAll())
    assert seen.labels is None
    assert torch.equal(seen.images, Pictures().tensors[0][:4])


def test_a_wrong_answer_of_the_module_is_one_warning():
    class Wrong(Lit):
        def normgrad_labels(self, batch):
            return "dog"

    with pytest.warns(UserWarning, match=r"finding the labels.*`normgrad_labels`: expected the class of each.*'dog'"):
        seen = fit(Wrong(), on_error="warn")
    assert seen.labels is None


def test_soft_labels_are_shown_by_their_largest():
    soft = F.one_hot(Pictures.labels, 5).float() * 0.75 + 0.05
    assert fit(dataset=Pictures(soft)).labels == [0, 0, 1, 2]


def test_labels_below_zero_are_none():
    seen = fit(dataset=Pictures(Pictures.labels - 1), module=Unlabelled(), classes=["a", "b", "c"])
    assert seen.labels == [-1, -1, 0, 1]
    assert seen.class_names == ["", "", "a", "b"]


class Unlabelled(Lit):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1], ignore_index=-1)


@pytest.mark.parametrize("images", ["balanced", "first", "random", "hardest", "easiest"])
def test_each_choice_of_images(images):
    seen = fit(images=images, num_images=2)
    everything, all_images = fit(num_images=12, images="first"), Pictures().tensors[0]
    chosen = [int((all_images == image).flatten(1).all(1).nonzero()) for image in seen.images]
    shares = signal({layer: m.flatten(1).sum(1) for layer, m in everything.maps.items()}, 12)
    expected = {
        "balanced": [0, 9],
        "first": [0, 1],
        "random": chosen,
        "hardest": shares.argsort(descending=True)[:2].tolist(),
        "easiest": shares.argsort()[:2].tolist(),
    }
    assert chosen == expected[images]
    assert len(set(chosen)) == 2
    for layer, maps in seen.maps.items():
        torch.testing.assert_close(maps, everything.maps[layer][chosen], rtol=1e-5, atol=1e-9)
    assert seen.labels == [int(Pictures.labels[index]) for index in chosen]


def test_labels_of_other_images_are_left_out():
    class TwoViews(Lit):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(torch.cat([batch[0], batch[0].flip(-1)])), batch[1].repeat(2))

    assert fit(TwoViews()).labels is None


@pytest.mark.parametrize("images", ["balanced", "easiest"])
def test_training_stays_the_same(tmp_path, images):
    plain = train(LitOfTwice, tmp_path / "plain")
    assert_same(plain, train(LitOfTwice, tmp_path / "watched", watching(images=images, classes=list("abcde"))))


def test_too_many_or_too_few_names_are_an_error_before_training():
    for names in (["a"], ["a", "b", "c", "d"]):
        with pytest.raises(
            ValueError, match=r"`classes`: expected a name for each class, but got \d names, and the tr"
        ):
            fit(dataset=Pictures(classes=NAMES), classes=names)
    module = Lit()
    module.num_classes = 3
    with pytest.raises(ValueError, match=r"got 2 names, and Lit has `num_classes` = 3. Give one name"):
        fit(module, classes=["a", "b"])


@pytest.mark.parametrize("classes", ["cat", [], [1, 2], ["cat", ""], 3, {"cat": 0}])
def test_what_are_no_names_is_an_error(classes):
    with pytest.raises(ValueError, match="`classes`: expected a list of names, one for each class, but got"):
        NormGradCallback(classes=classes)


def test_labels_of_a_module_that_has_none():
    assert labels_of(Lit(), (IMAGES, VECTOR)) == LABELS
