"""Passes that give nothing at first: BatchNorm without statistics, and losses that need the whole batch."""

from __future__ import annotations

import re
import warnings

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from networks import ResNet
from networks import batch as images_and_labels
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from twice import Lit, assert_same, train, watching

from normgrad_lightning import NormGradCallback, order1_maps
from normgrad_lightning.env_activation.environment_callback import in_variables
from normgrad_lightning.isolated.one_pass import NotFinite
from normgrad_lightning.isolated.retry import NeedsBatch, WithoutStatistics

KINDS = ["order1", "adversarial", "contrast"]


# ---------------------------------------------------------------- BatchNorm without statistics


class Block(nn.Module):
    """A residual block without scaling at its end: only BatchNorm keeps its features from growing."""

    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        nn.init.normal_(self.conv.weight, std=1.0)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))


def deep(blocks=16, width=8):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, width, 3, padding=1), *(Block(width) for _ in range(blocks))]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


def batch(count=4):
    return images_and_labels(count)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def squared(model, batch):
    """Not finite in eval mode: features of 1e20 and more."""
    return loss_fn(model, batch) + model(batch[0]).square().mean()


def eval_loss(model, loss=loss_fn):
    model = model.eval()
    with torch.no_grad():
        value = float(loss(model, batch()))
    model.train()
    return value


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("per_image", [True, False])
@pytest.mark.parametrize(("blocks", "loss"), [(16, loss_fn), (40, squared)])
def test_a_deep_network_at_step_0_has_maps(blocks, loss, per_image, training):
    model = deep(blocks)
    before = [t.clone() for t in model.state_dict().values()]
    assert not eval_loss(model, loss) < 1e7
    maps = order1_maps(model.train(training), loss, batch(), ["4", "8"], per_image=per_image)
    for m in maps.values():
        assert m.isfinite().all()
        assert m.flatten(1).any(1).all()
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    assert all(m.training is training for m in model.modules())
    assert all(m.momentum == 0.1 for m in model.modules() if isinstance(m, nn.BatchNorm2d))


def test_those_maps_are_the_ones_with_the_batchs_statistics():
    model, by_hand = deep(), deep()
    layers = [m for m in by_hand.modules() if isinstance(m, nn.BatchNorm2d)]
    for layer in layers:
        layer.momentum = None
    with torch.no_grad():
        loss_fn(by_hand, batch())
    for layer in layers:
        layer.num_batches_tracked += 1000
    expected = order1_maps(by_hand, loss_fn, batch(), ["4"])["4"]
    assert torch.equal(order1_maps(model, loss_fn, batch(), ["4"])["4"], expected)


def test_a_network_with_maps_is_left_at_its_own_statistics():
    """They are what eval mode means, and the maps of a shallow network are right with them."""
    model, old = ResNet(), ResNet()
    old.load_state_dict(model.state_dict())
    for layer in old.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.num_batches_tracked += 1000
    maps = [order1_maps(m, loss_fn, batch(), "stage2")["stage2"] for m in (model, old)]
    assert torch.equal(*maps)


class OneValue(nn.Module):
    """Its BatchNorm has one value for each channel of one image: a batch of one has no statistics."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm1d(4), nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.norm(self.conv(x).mean((2, 3))) * 1e38)


def far(model, batch):
    return model(batch[0]).square().mean()


def test_where_the_batch_has_no_statistics_the_reason_is_named():
    with pytest.raises(WithoutStatistics, match=r"finite loss, but got .*BatchNorm's .*`num_batches_tracked` is 0"):
        order1_maps(OneValue(), far, batch(1), "conv")
    old = OneValue()
    old.norm.num_batches_tracked += 1000
    with pytest.raises(NotFinite) as caught:
        order1_maps(old, far, batch(1), "conv")
    assert "BatchNorm" not in str(caught.value)


def test_the_callback_has_order_1_maps_at_step_0_and_training_keeps_its_bits(tmp_path):
    made = lambda: Lit(deep)  # noqa: E731
    plain = train(made, tmp_path / "plain")
    watched = train(made, tmp_path / "watched", watching(layers=["net.4", "net.8"]))
    assert_same(plain, watched)
    assert not watched.warned
    assert watched.history is not None
    assert watched.callback.skipped == 0
    of_first = watched.history.order1[0]
    assert list(of_first) == KINDS
    assert all(m.flatten(1).any(1).all() for m in of_first["order1"].values())


# ---------------------------------------------------------------- losses that need the batch


def nt_xent(a, b):
    """SimCLR's: an image alone has no negatives, so its loss is always 0."""
    z = F.normalize(torch.cat([a, b]), dim=1)
    similarity = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
    return F.cross_entropy(similarity, torch.arange(len(z)).roll(len(a)))


def vicreg(a, b):
    """The variance over a batch of one is not a number."""
    spread = sum(F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() for z in (a, b))
    return F.mse_loss(a, b) + spread


def barlow_twins(a, b):
    """BatchNorm in train mode, as a function, refuses a batch of one."""
    a, b = (F.batch_norm(z, None, None, training=True) for z in (a, b))
    return (a.T @ b / len(a) - torch.eye(a.shape[1])).square().sum()


LOSSES = {
    "SimCLR": (nt_xent, "an image alone has no gradient"),
    "VICReg": (vicreg, "an image alone is not finite"),
    "Barlow Twins": (barlow_twins, r"an image alone fails with ValueError \(Expected more than 1 value"),
}
first, *others = LOSSES
every_loss = pytest.mark.parametrize(("loss", "why"), LOSSES.values(), ids=LOSSES)
most_at_night = pytest.mark.parametrize(
    ("loss", "why"),
    [pytest.param(*LOSSES[first], id=first), *(pytest.param(*LOSSES[n], id=n, marks=pytest.mark.slow) for n in others)],
)


class TwoViews(Lit):
    def __init__(self, loss):
        super().__init__()
        self.compare = loss

    def loss(self, batch):
        return self.compare(self.net(batch[0]), self.net(batch[0].flip(-1)))


def our_warnings(module, callback, folder):
    data = DataLoader(TensorDataset(*batch(12)), batch_size=4)
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pl.Trainer(max_epochs=1, callbacks=callback, default_root_dir=folder, **options).fit(module, data)
    return [str(w.message) for w in caught if "normgrad" in str(w.message).lower()]


@every_loss
def test_a_loss_that_needs_the_batch_gets_one_warning_with_the_reason_and_the_remedy(loss, why, tmp_path):
    callback = NormGradCallback(every_n_steps=1, order1_every_n_steps=1, num_images=2)
    (warned,) = our_warnings(TwoViews(loss), callback, tmp_path)
    assert re.search(why, warned)
    assert "Set `per_image=False`" in warned
    assert "fp16" not in warned
    assert callback.maps
    assert not callback.order1
    assert callback.skipped == 0


@most_at_night
def test_that_remedy_works(loss, why, tmp_path):
    callback = NormGradCallback(every_n_steps=1, order1_every_n_steps=1, num_images=2, per_image=False)
    assert our_warnings(TwoViews(loss), callback, tmp_path) == []
    assert all(m.any() for m in callback.order1["order1"].values())


@most_at_night
def test_training_keeps_its_bits(loss, why, tmp_path):
    plain = train(lambda: TwoViews(loss), tmp_path / "plain")
    watched = train(lambda: TwoViews(loss), tmp_path / "watched", watching(on_error="warn"))
    assert_same(plain, watched)


@most_at_night
def test_where_the_environment_has_set_it_the_remedy_is_a_variable(loss, why, tmp_path, monkeypatch):
    for flag, text in {"": "1", "_EVERY_N_STEPS": "1", "_ORDER1_EVERY_N_STEPS": "1", "_NUM_IMAGES": "2"}.items():
        monkeypatch.setenv(f"NORMGRAD{flag}", text)
    (warned,) = our_warnings(TwoViews(loss), None, tmp_path)
    assert "Set `NORMGRAD_PER_IMAGE=0`" in warned
    assert "per_image=False" not in warned
    monkeypatch.setenv("NORMGRAD_PER_IMAGE", "0")
    assert our_warnings(TwoViews(loss), None, tmp_path) == []


def test_only_flags_are_spelled_as_variables():
    said = "Set `per_image=False` or `num_images=3`, not `use_reentrant=True`, `per_image`."
    assert in_variables(said) == (
        "Set `NORMGRAD_PER_IMAGE=0` or `NORMGRAD_NUM_IMAGES=3`, not `use_reentrant=True`, `per_image`."
    )


@every_loss
def test_the_function_names_the_remedy_too(loss, why):
    """But what the loss itself raises comes out as it is."""

    def compared(model, images):
        return loss(model(images), model(images.flip(-1)))

    images = batch()[0]
    with pytest.raises(ValueError, match="Expected more than 1" if loss is barlow_twins else why) as caught:
        order1_maps(ResNet(), compared, images)
    assert isinstance(caught.value, NeedsBatch) == (loss is not barlow_twins)
    assert all(m.any() for m in order1_maps(ResNet(), compared, images, per_image=False).values())


def test_images_that_the_step_has_fitted_are_not_taken_for_a_loss_of_the_batch():
    """Their gradient vanishes after the inner step, not before it."""
    maps = order1_maps(ResNet(), loss_fn, batch(), "stage2", epsilon=10.0)["stage2"]
    assert maps.isfinite().all()


def test_images_without_a_gradient_in_the_batch_either_are_zero():
    def first_half(model, batch):
        known = batch[1] >= 0
        return (F.cross_entropy(model(batch[0]), batch[1].clamp_min(0), reduction="none") * known).sum()

    images, _ = batch()
    maps = order1_maps(ResNet(), first_half, (images, torch.full((4,), -1)), "stage2")["stage2"]
    assert not maps.any()


# ---------------------------------------------------------------- images that the loss ignores


def ignoring(model, batch):
    """Of an image alone whose label is ignored, a mean over nothing: not a number."""
    return F.cross_entropy(model(batch[0]), batch[1], ignore_index=0)


@pytest.mark.parametrize("labels", [[1, 0, 2, 3], [0, 0, 2, 0]])
def test_an_image_whose_label_is_ignored_has_a_map_of_zeros_and_the_others_theirs(labels):
    images, labels = batch(4)[0], torch.tensor(labels)
    counts = labels != 0
    model = ResNet()
    maps = order1_maps(model, ignoring, (images, labels), ["stem", "stage2"])
    expected = order1_maps(model, ignoring, (images[counts], labels[counts]), ["stem", "stage2"])
    for name, m in maps.items():
        assert torch.equal(m.flatten(1).any(1), counts)
        assert torch.equal(m[counts], expected[name])


def test_if_all_labels_are_ignored_the_loss_is_not_finite():
    with pytest.raises(NotFinite, match="expected a finite loss"):
        order1_maps(ResNet(), ignoring, (batch(2)[0], torch.zeros(2, dtype=torch.long)), "stem")


class Ignores(Lit):
    """Ignores the label of the first image of each batch."""

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1], ignore_index=-1)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        labels = batch[1].clone()
        labels[0] = -1
        return [batch[0], labels]


def test_the_callback_goes_on_with_the_other_images_and_says_why_one_has_none(tmp_path):
    watched = train(Ignores, tmp_path, watching(on_error="warn"))
    shown = watched.callback.latest["order1"]
    assert shown.images.shape[0] == 2
    for m in shown.maps.values():
        assert m.flatten(1).any(1).tolist() == [False, True]
    assert [told for told in watched.warned if "Losses that compare images" in told or "fitted" in told] == []
    assert any("their labels are ignored" in told for told in watched.warned)


class Learned(Lit):
    def loss(self, batch):
        return super().loss(batch) * 0


def test_a_loss_of_zero_is_told_as_what_it_is(tmp_path):
    watched = train(Learned, tmp_path, watching(on_error="warn", layers=["net.stem", "net.stage2"]))
    told = " ".join(watched.warned)
    assert "the loss has no gradient, as when it is zero" in told
    assert "the model has learned these images" in told
    assert "class token" not in told
    assert "fitted" not in told
