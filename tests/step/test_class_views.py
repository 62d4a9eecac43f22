"""What is collected between events, on real runs: which steps are read, what is shown, and that no bit changes."""

import gc
import math
import random

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from networks import ResNet, UNet
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, TensorDataset
from twice import Lit, assert_same, loader, pictures, same, train, watching

from normgrad_lightning import NormGradCallback
from normgrad_lightning.views.run_views import RunViews

LAYERS = ["net.stage1", "net.stage2", "net.stage3"]
NUMBERED = ["00_net.stage1", "01_net.stage2", "02_net.stage3"]


def collecting(**flags):
    """As users have it, but with short distances."""
    return watching(
        **{"every_n_steps": 4, "read_every_n_steps": 2, "order1_every_n_steps": None, "images": "balanced", **flags}
    )


@pytest.fixture
def readings(monkeypatch):
    """The whole batches that are read, in order."""
    read, original = [], RunViews.add

    def note(self, batch, *rest):
        read.append(batch)
        original(self, batch, *rest)

    monkeypatch.setattr(RunViews, "add", note)
    return read


def logged(run):
    found = EventAccumulator(run.trainer.logger.log_dir, size_guidance={"scalars": 0})
    found.Reload()
    return {
        tag: {event.step: event.value for event in found.Scalars(tag)}
        for tag in found.Tags()["scalars"]
        if tag.startswith("normgrad")
    }


def test_no_bit_of_training_changes_with_everything_on(tmp_path):
    flags = {"probe": "train", "grad_cam": True, "order1_every_n_steps": 3}
    plain = train(Lit, tmp_path / "plain", max_epochs=3)
    watched = train(Lit, tmp_path / "watched", collecting(**flags), max_epochs=3)
    assert_same(plain, watched)
    assert not watched.warned
    of_curves = {"hot_spot", "concentration", "border_share", "energy", "drift", "cost"}
    assert of_curves <= {tag.split("/")[1] for tag in logged(watched)}


def test_every_second_step_is_read_and_the_pages_come_with_the_events(tmp_path, readings):
    run = train(Lit, tmp_path, collecting(), max_epochs=2)
    assert [batch.step for batch in readings] == [0, 2, 4, 6, 8, 10, 11]
    assert list(run.history.maps) == [0, 4, 8, 11]
    of_classes = {tag: steps for tag, steps in pictures(run.trainer).items() if "patches" in tag or "atlas" in tag}
    assert of_classes == {
        f"normgrad/{view}/{of}": [0, 4, 8, 11]
        for view in ("1_patches", "4_atlas")
        for of in ("0_combined", "02_net.stage3")
    }


def test_all_images_are_read_and_their_maps_are_those_of_the_step(tmp_path, readings):
    run = train(Lit, tmp_path, collecting(images="first", num_images=2, every_n_steps=1), max_epochs=1)
    for batch in readings:
        assert len(batch.images) == 4
        for layer, shown in run.history.maps[batch.step].items():
            assert len(shown) == 2
            torch.testing.assert_close(batch.maps[layer][:2], shown, rtol=0, atol=0)


def test_curves_are_means_since_the_last_event(tmp_path, readings):
    run = train(Lit, tmp_path, collecting(every_n_steps=6), max_epochs=1)
    values = logged(run)
    energy = {batch.step: batch.maps["net.stage2"].sum().item() for batch in readings}
    assert list(energy) == [0, 2, 4, 5]
    assert values["normgrad_layers/energy/01_net.stage2"] == pytest.approx(
        {0: energy[0], 5: np.mean([energy[step] for step in (2, 4, 5)])}, rel=1e-5
    )
    assert set(values["normgrad/hot_spot/0"]) <= {0, 5}


def test_only_the_views_that_are_asked_for(tmp_path, readings):
    run = train(Lit, tmp_path, collecting(views=["overview", "atlas"], probe=False))
    of_atlas = {"normgrad/4_atlas/0_combined", "normgrad/4_atlas/02_net.stage3"}
    assert set(pictures(run.trainer)) == {"normgrad/5_overview/0_order0", *of_atlas}
    assert readings
    readings.clear()
    run = train(Lit, tmp_path / "none", collecting(views="panels", images="first", probe=False))
    assert set(pictures(run.trainer)) == {f"normgrad_order0/{layer}" for layer in NUMBERED}
    assert not logged(run)
    assert not readings


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ({"views": "patch"}, "`views`: expected some of 'overview', 'panels', 'patches', .* but got 'patch'"),
        ({"views": []}, "`views`: expected a list of"),
        ({"views": 3}, "`views`"),
        ({"read_every_n_steps": 0}, "`read_every_n_steps`: expected a whole number of at least 1, but got 0"),
    ],
)
def test_wrong_flags_are_errors_at_once(flags, match):
    with pytest.raises(ValueError, match=match):
        NormGradCallback(**flags)


class Masked(Lit):
    """Says where the object is: in the left half of class 0's images, in the right half of the others'."""

    def normgrad_masks(self, batch):
        images, labels = batch
        masks = torch.zeros(len(images), *images.shape[2:])
        masks[labels == 0, :, : images.shape[3] // 2] = 1
        masks[labels != 0, :, images.shape[3] // 2 :] = 1
        return masks


def test_with_masks_there_is_the_share_on_the_object(tmp_path, readings):
    run = train(Masked, tmp_path, collecting(every_n_steps=1))
    values, batch = logged(run), readings[-1]
    masks = F.interpolate(batch.masks[:, None], batch.maps["net.stage1"].shape[1:], mode="area")[:, 0]
    m = batch.maps["net.stage1"]
    shares = (m * masks).sum((1, 2)) / m.sum((1, 2))
    at_end = values["normgrad/share_on_object/00_net.stage1"][batch.step]
    assert at_end == pytest.approx(shares.mean().item(), rel=1e-4)
    assert {f"normgrad/share_on_object/{of}" for of in (*NUMBERED, "combined")} <= set(values)
    seen = {label for read in readings for label in read.labels}
    assert {tag.split("/")[2] for tag in values if "by_class" in tag} == {str(label) for label in seen}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(Lit, tmp_path_factory.mktemp("plain"))


def test_random_masks_leave_the_random_numbers_of_training_alone(tmp_path, plain):
    draws = {
        "normgrad_masks": lambda self, batch: torch.rand(len(batch[0]), 16, 16) * np.random.rand() * random.random()
    }
    run = train(type("Made", (Lit,), draws), tmp_path, collecting())
    assert_same(plain, run)
    assert "normgrad/share_on_object/combined" in logged(run)


WRONG_MASKS = {
    "too few": lambda batch: torch.zeros(len(batch[0]) - 1, 16, 16),
    "another shape": lambda batch: torch.zeros(len(batch[0]), 5, 16, 16),
    "no tensor": lambda batch: [[0, 1]],
    "a failure": lambda batch: batch["masks"],
    "sparse": lambda batch: torch.ones(len(batch[0]), 16, 16).to_sparse(),
    "nested": lambda batch: torch.nested.nested_tensor([torch.ones(4, 4), torch.ones(5, 5)]),
    "without values": lambda batch: torch.ones(len(batch[0]), 16, 16, device="meta"),
    "empty": lambda batch: torch.ones(len(batch[0]), 0, 16),
    "of colours": lambda batch: torch.full((len(batch[0]), 16, 16), 255),
}


@pytest.mark.parametrize("masks", WRONG_MASKS.values(), ids=WRONG_MASKS)
def test_wrong_masks_are_one_warning_and_the_rest_goes_on(masks, tmp_path, plain):
    made = type("Made", (Lit,), {"normgrad_masks": lambda self, batch: masks(batch)})
    run = train(made, tmp_path, collecting(on_error="warn"))
    assert_same(plain, run)
    (warned,) = run.warned
    assert "masks`: expected" in warned or "KeyError" in warned or "TypeError" in warned
    assert {"normgrad/5_overview/0_order0", "normgrad/1_patches/0_combined"} <= set(pictures(run.trainer))
    assert "normgrad_layers/energy/00_net.stage1" in logged(run)


def labelled(labels):
    """Batches with these labels beside images that a network of ten classes learns something else from."""

    class Made(Lit):
        def loss(self, batch):
            return self.net(batch[0]).square().mean()

        def normgrad_labels(self, batch):
            return labels(batch)

    return Made


LABELS = {
    "none": (lambda batch: None, ["all"]),
    "too many": (lambda batch: list(range(9)), ["all"]),
    "too few": (lambda batch: [1], ["all"]),
    "one class only": (lambda batch: [3] * len(batch[0]), ["3"]),
    "negative": (lambda batch: [-1, -100] + [0] * (len(batch[0]) - 2), ["unlabelled", "0"]),
    "many classes": (lambda batch: (batch[0].sum((1, 2, 3)).abs() * 1e4).long().tolist(), None),
}


@pytest.mark.parametrize(("labels", "rows"), LABELS.values(), ids=LABELS)
def test_odd_labels_are_classes_or_all(labels, rows, tmp_path):
    torch.manual_seed(0)
    run = train(labelled(labels), tmp_path, collecting(on_error="raise"))
    assert not run.warned
    assert len(pictures(run.trainer)["normgrad/1_patches/0_combined"]) == 3
    if rows is not None:
        assert set(run.callback.patches["combined"]) == set(rows)


def test_labels_that_are_floats_are_one_warning_if_the_module_returns_them(tmp_path):
    run = train(labelled(lambda batch: torch.rand(len(batch[0]))), tmp_path, collecting(on_error="warn"))
    (warned,) = run.warned
    assert "`normgrad_labels`: expected the class of each image as a vector of whole numbers" in warned
    assert set(run.callback.patches["combined"]) == {"all"}


def test_labels_that_are_drawn_at_random_change_no_bit(tmp_path, plain):
    def drawn(self, batch):
        np.random.rand()
        return torch.randint(3, (len(batch[0]),))

    run = train(type("Made", (Lit,), {"normgrad_labels": drawn}), tmp_path, collecting())
    assert_same(plain, run)
    assert not run.warned


def test_ten_thousand_classes_do_not_grow_without_limit(tmp_path):
    data = DataLoader(TensorDataset(torch.rand(2048, 3, 8, 8), torch.randperm(10000)[:1024].repeat(2)), 64)

    class Many(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 10000))

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    names = [f"class {number}" for number in range(10000)]  # without names, these would be taken for ids
    flags = {"every_n_steps": 100, "read_every_n_steps": 1, "classes": names, "on_error": "raise"}
    callback = NormGradCallback(layers="net.0", **flags)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[callback],
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=CSVLogger(tmp_path),
    )
    trainer.fit(Many(), data)
    assert len(callback._state.views["atlas"]._counts) <= 1000
    assert len(callback.patches["combined"]) == 12


def test_a_segmenter_has_one_row(tmp_path):
    images = torch.rand(24, 3, 16, 16)
    data = DataLoader(TensorDataset(images, (images.sum(1) > 1.5).long()), 4)
    run = train(lambda: Lit(UNet), tmp_path, collecting(), data=lambda: data)
    assert set(run.callback.patches["combined"]) == {"all"}
    assert not any("hot_spot" in tag for tag in logged(run))


def test_several_loggers_get_pictures_and_scalars(tmp_path):
    loggers = [TensorBoardLogger(tmp_path / "a"), CSVLogger(tmp_path / "b")]
    run = train(Lit, tmp_path, collecting(), logger=loggers)
    folder = next((tmp_path / "b").rglob("normgrad"))
    assert (folder / "normgrad" / "1_patches" / "0_combined" / "step_00000004.jpg").exists()
    rows = [line.split(",") for line in (folder / "scalars.csv").read_text().splitlines()[1:]]
    in_csv = {(tag, int(step)): float(value) for step, tag, value in rows}
    in_tensorboard = {(tag, step): value for tag, of in logged(run).items() for step, value in of.items()}
    assert in_csv == pytest.approx(in_tensorboard, rel=1e-5)


def test_a_resumed_run_goes_on(tmp_path, readings):
    whole = train(Lit, tmp_path / "whole", collecting(), max_epochs=2)
    readings.clear()
    first = train(Lit, tmp_path / "first", collecting(), max_epochs=1)
    first.trainer.save_checkpoint(tmp_path / "last.ckpt")
    before = first.callback._state.views.state_dict()
    assert before["first_patches"]["combined"]
    resumed = train(Lit, tmp_path / "then", collecting(), max_epochs=2, fit={"ckpt_path": tmp_path / "last.ckpt"})
    after = resumed.callback._state.views.state_dict()
    for name in ("first_patches", "first_lifts"):
        for of, by_class in before[name].items():
            for label, first in by_class.items():
                assert same(first, after[name][of][label])
    assert [batch.step for batch in readings][-3:] == [8, 10, 11]
    assert set(pictures(resumed.trainer)) == set(pictures(whole.trainer))


def test_a_resumed_run_reads_the_steps_that_it_would_have_read(tmp_path, readings):
    flags = {"every_n_steps": 100, "read_every_n_steps": 4}
    first = train(Lit, tmp_path / "first", collecting(**flags), max_epochs=1)
    assert [batch.step for batch in readings] == [0, 4, 5]
    first.trainer.save_checkpoint(tmp_path / "last.ckpt")
    readings.clear()
    train(Lit, tmp_path / "then", collecting(**flags), max_epochs=2, fit={"ckpt_path": tmp_path / "last.ckpt"})
    assert [batch.step for batch in readings] == [8, 11]


def test_gradients_that_are_not_finite_are_not_read(tmp_path):
    class Overflows(Lit):
        def loss(self, batch):
            loss = super().loss(batch)
            return loss * math.inf if len(self.losses) == 2 else loss

    run = train(Overflows, tmp_path, collecting(every_n_steps=100), max_epochs=1, detect_anomaly=False)
    assert all(math.isfinite(value) for of in logged(run).values() for value in of.values())


def test_a_batch_that_is_skipped_is_not_read(tmp_path, readings):
    class Skips(Lit):
        def training_step(self, batch, batch_idx):
            return None if batch_idx in (2, 3) else super().training_step(batch, batch_idx)

    train(Skips, tmp_path, collecting(), max_epochs=1)
    assert [batch.step for batch in readings] == [0, 4, 5]  # 2 and 3 are skipped


def test_compiled_models_are_read_at_events_only(tmp_path, readings):
    def compiled():
        made = Lit()
        made.net = torch.compile(made.net, backend="eager")
        return made

    run = train(compiled, tmp_path, collecting(), max_epochs=1)
    assert [batch.step for batch in readings] == [0, 4, 5]
    assert "normgrad/1_patches/0_combined" in pictures(run.trainer)


def test_nothing_is_read_if_nobody_takes_pictures(tmp_path, readings):
    run = train(Lit, tmp_path, collecting(), logger=False)
    assert not readings
    assert run.callback.patches == {}


def test_nothing_of_a_reading_outlives_it(tmp_path):
    import weakref

    alive = []

    class Watches(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            gc.collect()
            alive.append(sum(ref() is not None for ref in self.refs) if batch_idx > 2 else 0)

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.refs = [ref for ref in getattr(self, "refs", []) if ref() is not None]
            alive.append(len(self.refs))
            self.refs.append(weakref.ref(batch[0]))

    train(Lit, tmp_path, collecting(every_n_steps=100), callbacks=lambda: [Watches()])
    assert max(alive[::2]) <= 1  # the batch before, which Lightning still holds


def test_patches_are_there_in_code(tmp_path):
    run = train(lambda: Lit(ResNet), tmp_path, collecting())
    crops = [crop for rows in run.callback.patches["combined"].values() for crop in rows]
    assert crops
    assert all(crop.pixels.dtype == np.uint8 and crop.ratio > 0 for crop in crops)


def test_more_than_one_callback_have_tags_of_their_own(tmp_path):
    run = train(Lit, tmp_path, collecting(), callbacks=lambda: [collecting(name="fine")])
    tags = set(pictures(run.trainer))
    assert {"normgrad/1_patches/0_combined", "normgrad_fine/1_patches/0_combined"} <= tags


def test_the_loader_is_not_asked_for_more_batches(tmp_path):
    asked = []

    class Counting(TensorDataset):
        def __getitem__(self, index):
            asked.append(index)
            return super().__getitem__(index)

    data = loader().dataset.tensors
    train(Lit, tmp_path, collecting(), data=lambda: DataLoader(Counting(*data), 4))
    assert len(asked) == 24
