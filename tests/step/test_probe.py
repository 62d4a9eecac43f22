"""The probe: the same images through training, in passes that leave no trace."""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from networks import batch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from twice import (
    LAYERS,
    Lit,
    assert_close,
    assert_same,
    at,
    loader,
    order1,
    panels,
    pictures,
    train,
    twice,
    watching,
    with_statistics,
)

from normgrad_lightning import NormGradCallback, grad_cam_maps, order0_maps
from normgrad_lightning.env_activation.environment_callback import EnvironmentCallback
from normgrad_lightning.isolated.batches import DoNotFit, joined
from normgrad_lightning.views.film import Film

KINDS = ["order0", "order1", "adversarial", "contrast"]


class WithValidation(Lit):
    """It validates, too."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=4)


class Seen(pl.Callback):
    """Keeps the maps of the probe at each step."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        self.at: dict[int, dict[str, Any]] = {}

    def on_train_batch_start(self, *_: Any) -> None:
        self.style()

    def on_train_end(self, *_: Any) -> None:
        self.style()

    def style(self) -> None:
        sets = {name: one for name, one in self.callback.latest.items() if one.source == "probe"}
        latest = max((one.step for one in sets.values()), default=None)
        if latest is not None:
            self.at[latest] = {name: one for name, one in sets.items() if one.step == latest}


def both(folder: Any, probe: Any, make: Any = WithValidation, **options: Any) -> tuple[Any, Any, Seen]:
    """Train without and with a probe; no bit may differ."""
    callback = watching(probe=probe, **options.pop("flags", {}))
    seen = Seen(callback)
    plain = train(make, folder / "plain", **options)
    watched = train(make, folder / "watched", callback, callbacks=lambda: [seen], **options)
    assert_same(plain, watched)
    assert watched.warned == []
    return plain, watched, seen


def validated(n: int = 12) -> dict[str, Any]:
    images, labels = batch(n, seed=3)
    return {"val_dataloaders": DataLoader(TensorDataset(images, labels % 3), batch_size=6)}


OWN = batch(3, seed=9)


def test_statistics_that_are_old_enough_are_taken_as_they_are(tmp_path):
    class LearnsFast(Lit):
        def __init__(self) -> None:
            super().__init__()
            for layer in self.modules():
                if isinstance(layer, nn.BatchNorm2d):
                    layer.momentum = 0.9

    plain, _, seen = both(tmp_path, OWN, LearnsFast)
    for step, is_young in {0: True, 1: True, 2: False, 5: False}.items():
        moment = plain.moments[step]
        as_it_is, renewed = (
            order0_maps(at(one, LearnsFast).train(), lambda m, b: m.loss(b), OWN, LAYERS)
            for one in (moment, with_statistics(moment, LearnsFast, OWN))
        )
        assert_close_all(seen.at[step]["probe_order0"].maps, renewed)
        assert torch.allclose(as_it_is["net.stage1"], renewed["net.stage1"]) is not is_young


@pytest.mark.parametrize("probe", ["train", "val", OWN], ids=["train", "val", "a batch"])
def test_a_probe_changes_no_bit_and_its_maps_are_those_of_the_same_images_at_each_step(tmp_path, probe):
    plain, watched, seen = both(tmp_path, probe, fit=validated())
    assert list(seen.at) == [0, 1, 2, 3, 4, 5]
    first = seen.at[0]["probe_order0"]
    for step, sets in seen.at.items():
        wanted = KINDS if step in (0, 3, 5) else KINDS[:1]
        assert list(sets) == [f"probe_{kind}" for kind in wanted]
        for one in sets.values():
            assert torch.equal(one.images, first.images)
            assert one.labels == first.labels
        probed = (first.images, torch.tensor(first.labels))
        moment = with_statistics(plain.moments[step], WithValidation, probed)
        module = at(moment, WithValidation).train()
        maps = order0_maps(module, lambda m, b: m.loss(b), probed, LAYERS)
        assert_close_all(sets["probe_order0"].maps, maps)
        if step in (0, 3, 5):
            for kind in ("order1", "adversarial"):
                of_two = order1(moment, WithValidation, LAYERS, tuple, adversarial=kind == "adversarial")
                assert_close({k: m[:2] for k, m in sets[f"probe_{kind}"].maps.items()}, of_two, 1e-4)
    tags = panels(watched.trainer, probe=True)
    assert tags["normgrad_probe_order0/00_net.stage1"] == [0, 1, 2, 3, 4, 5]
    assert tags["normgrad_probe_contrast/02_net.stage3"] == [0, 3, 5]
    assert tags["normgrad_order0/00_net.stage1"] == [0, 1, 2, 3, 4, 5]


def assert_close_all(maps: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert list(maps) == list(wanted)
    for name, m in wanted.items():
        assert maps[name].shape == m.shape
        assert float((maps[name] - m).norm() / m.norm()) < tolerance


def test_grad_cam_of_the_probe_comes_in_the_same_pass(tmp_path):
    plain, watched, seen = both(tmp_path, OWN, flags={"grad_cam": True, "order1_every_n_steps": None})
    for step, sets in seen.at.items():
        assert list(sets) == ["probe_order0", "probe_grad_cam"]
        moment = with_statistics(plain.moments[step], WithValidation, OWN)
        module = at(moment, WithValidation).train()
        assert_close_all(sets["probe_order0"].maps, order0_maps(module, lambda m, b: m.loss(b), OWN, LAYERS))
        wanted = grad_cam_maps(module, OWN, LAYERS, loss_fn=lambda m, b: m.loss(b))
        assert_close_all(sets["probe_grad_cam"].maps, wanted, 1e-4)
    assert panels(watched.trainer, probe=True)["normgrad_probe_grad_cam/00_net.stage1"] == [0, 1, 2, 3, 4, 5]
    with Image.open(film_of(watched)) as film:
        assert film.n_frames == 6


# ---------------------------------------------------------------- which images


def test_the_images_are_of_the_first_batch_with_classes_in_turn(tmp_path):
    images, _ = batch(12, seed=5)
    labels = torch.tensor([0, 0, 0, 0, 2, 1, 0, 1, 2, 2, 2, 2])
    ordered = DataLoader(TensorDataset(images, labels), batch_size=8)
    callback = watching(probe="train", num_images=5, order1_every_n_steps=None)
    train(Lit, tmp_path, callback, data=lambda: ordered)
    shown = callback.latest["probe_order0"]
    assert shown.labels == [0, 0, 1, 1, 2]
    assert torch.equal(shown.images, images[[0, 1, 5, 7, 4]])
    assert callback.latest["order0"].source == "batch"
    assert torch.equal(callback.inputs, images[8:])
    assert callback.maps.keys() == shown.maps.keys()


def test_images_without_labels_are_the_first(tmp_path):
    class Autoencoder(Lit):
        def loss(self, batch: Any) -> Tensor:
            return self.net(batch[0]).square().mean()

    images, _ = batch(12, seed=5)
    callback = watching(probe="train", num_images=3, order1_every_n_steps=None)
    train(Autoencoder, tmp_path, callback, data=lambda: DataLoader(TensorDataset(images), batch_size=6))
    shown = callback.latest["probe_order0"]
    assert shown.labels is None
    assert torch.equal(shown.images, images[:3])


def test_without_a_sanity_check_a_probe_of_validation_begins_after_the_first_validation(tmp_path):
    _, _, seen = both(
        tmp_path, "val", fit=validated(), num_sanity_val_steps=0, val_check_interval=3, flags={"num_images": 3}
    )
    assert list(seen.at) == [3, 4, 5]
    _, labels = batch(12, seed=3)
    first = [int(label) % 3 for label in labels[:6]]
    assert len(set(first)) == 3
    assert sorted(seen.at[3]["probe_order0"].labels) == [0, 1, 2]


class Named(Dataset):
    """Batches are dicts with labels under a usual name, beside other whole numbers; classes have names."""

    classes = ("cat", "dog", "owl")

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> dict[str, Any]:
        images, _ = batch(12, seed=5)
        return {"id": i, "file": f"{i}.jpg", "image": images[i], "target": (i + 1) % 3}


class TakesDicts(WithValidation):
    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch["image"], batch["target"]))


def test_labels_and_names_of_dicts_and_wrapped_data_sets_are_those_of_batch_and_probe(tmp_path):
    def data() -> DataLoader:
        return DataLoader(Subset(Named(), range(6)), batch_size=6)

    callback = watching(probe="val", num_images=3, order1_every_n_steps=None, images="balanced")
    run = train(TakesDicts, tmp_path, callback, data=data, fit={"val_dataloaders": data()})
    assert run.warned == []
    for name in ("order0", "probe_order0"):
        assert callback.latest[name].labels == [0, 1, 2]
        assert callback.latest[name].class_names == ["cat", "dog", "owl"]
        assert torch.equal(callback.latest[name].images, batch(12, seed=5)[0][[2, 0, 1]])
    module = TakesDicts()
    with pytest.raises(ValueError, match=r"^`classes`: expected a name for each class, but got 2 names"):
        train(lambda: module, tmp_path / "wrong", watching(classes=["cat", "dog"]), data=data)
    assert module.losses == []


def sorted_validation(n: int = 18) -> dict[str, Any]:
    """A third of the images of each class, one class after the other, in batches of three."""
    images, _ = batch(n, seed=3)
    labels = torch.arange(n) * 3 // n
    return {"val_dataloaders": DataLoader(TensorDataset(images, labels), batch_size=3)}


def test_a_probe_of_sorted_validation_data_has_all_classes_of_the_first_batches(tmp_path):
    flags = {"num_images": 4, "order1_every_n_steps": None}
    _, _, seen = both(tmp_path, "val", fit=sorted_validation(), num_sanity_val_steps=8, flags=flags)
    assert list(seen.at) == [0, 1, 2, 3, 4, 5]
    shown = seen.at[0]["probe_order0"]
    assert shown.labels == [0, 0, 1, 2]
    assert torch.equal(shown.images, batch(18, seed=3)[0][[0, 1, 6, 12]])
    _, _, seen = both(
        tmp_path / "later", "val", fit=sorted_validation(), num_sanity_val_steps=0, val_check_interval=3, flags=flags
    )
    assert list(seen.at) == [3, 4, 5]
    assert seen.at[3]["probe_order0"].labels == [0, 0, 1, 2]


def test_images_of_one_class_are_chosen_anew_in_the_first_whole_validation(tmp_path):
    fit = sorted_validation(90)  # ten batches of each class: the sanity check sees one of them
    flags = {"num_images": 4, "order1_every_n_steps": None}
    _, _, seen = both(tmp_path, "val", fit=fit, num_sanity_val_steps=2, val_check_interval=2, flags=flags)
    assert [seen.at[step]["probe_order0"].labels for step in (0, 1)] == [[0, 0, 0, 0]] * 2
    assert [seen.at[step]["probe_order0"].labels for step in (2, 3, 4, 5)] == [[0, 0, 1, 2]] * 4
    images = batch(90, seed=3)[0]
    for step in (2, 5):  # chosen once, and then followed
        assert torch.equal(seen.at[step]["probe_order0"].images, images[[0, 1, 30, 60]])


def test_validation_of_one_class_in_a_run_with_several_is_a_warning_that_says_what_to_do(tmp_path):
    images, _ = batch(6, seed=3)
    of_one = {"val_dataloaders": DataLoader(TensorDataset(images, torch.zeros(6).long()), batch_size=3)}
    callback = watching(probe="val", num_images=4, order1_every_n_steps=None)
    run = train(WithValidation, tmp_path, callback, fit=of_one, num_sanity_val_steps=2, val_check_interval=2)
    (told,) = run.warned
    assert told.startswith("NormGrad follows images of one class: validation has no other.")
    assert told.endswith("`probe=batch`.")


def test_batches_are_joined_whatever_they_are_made_of():
    @dataclass
    class Pair:
        x: Tensor
        y: Tensor

    def made(first: int, n: int) -> Any:
        x = torch.arange(first, first + n).float()[:, None, None, None].expand(n, 3, 2, 2)
        names = [f"{i}.jpg" for i in range(first, first + n)]
        return {
            "x": x,
            "y": torch.arange(n),
            "names": names,
            "pair": Pair(x, torch.ones(n)),
            "rate": 0.5,
        }

    for n in (1, 2, 3):
        whole = joined(made(0, 2), made(2, n), (2, n))
        wanted = made(0, 2 + n)
        assert whole["names"] == wanted["names"]
        assert whole["rate"] == 0.5
        assert torch.equal(whole["pair"].x, wanted["x"])
    images, labels = batch(2)
    assert torch.equal(joined([images, labels], [images, labels], (2, 2))[0], torch.cat([images, images]))
    for other in (
        (images[..., :8], labels),
        [images, labels],
        (images.double(), labels),
        (images, labels, labels),
        (images.numpy(), labels),
    ):
        with pytest.raises(DoNotFit):
            joined((images, labels), other, (2, 2))


def test_validation_batches_of_several_sizes_leave_the_images_of_the_first(tmp_path):
    parts = [(batch(3, seed=i)[0][..., : 16 - 4 * i, : 16 - 4 * i], torch.full((3,), i)) for i in range(3)]
    callback = watching(probe="val", num_images=4, order1_every_n_steps=None)
    fit = {"val_dataloaders": DataLoader(parts, batch_size=None)}
    train(WithValidation, tmp_path, callback, fit=fit, num_sanity_val_steps=3)
    shown = callback.latest["probe_order0"]
    assert shown.labels == [0, 0, 0]
    assert torch.equal(shown.images, parts[0][0])


class AugmentsOnDevice(Lit):
    """Prepares batches on the device: scales them, and adds noise."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        images, labels = batch
        return images / 2 + 0.1 * torch.randn_like(images), labels


def test_a_batch_in_code_is_prepared_as_batches_are_once_and_without_a_trace(tmp_path):
    images, labels = batch(3, seed=9)
    before = images.clone()
    _, _, seen = both(tmp_path, (images, labels), AugmentsOnDevice)
    shown = [sets["probe_order0"].images for sets in seen.at.values()]
    assert 0.02 < float((shown[0] - images / 2).std()) < 0.2
    assert all(torch.equal(one, shown[0]) for one in shown)
    assert torch.equal(images, before)


class AugmentsInItsStep(Lit):
    """Adds noise, and resizes at random."""

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        size = int(torch.randint(12, 20, ()))
        resized = torch.nn.functional.interpolate(images, (size, size))
        return super().loss((resized + 0.1 * random.random() * torch.randn_like(resized), labels))


def test_a_step_that_augments_at_random_sees_the_same_images_at_each_event(tmp_path):
    _, run, seen = both(tmp_path, OWN, AugmentsInItsStep)
    shown = [one.images for sets in seen.at.values() for name, one in sets.items() if name == "probe_order0"]
    assert len(shown) == 6
    assert all(torch.equal(one, shown[0]) for one in shown)
    assert len({tuple(m.shape) for m in seen.at[0]["probe_order0"].maps.values()}) == 3
    with Image.open(film_of(run)) as film:
        assert film.n_frames == 6


@pytest.mark.parametrize("count", [2, 9])
def test_labels_that_are_not_one_for_each_image_are_left_out(tmp_path, count):
    class Odd(WithValidation):
        def normgrad_labels(self, batch: Any) -> Tensor:
            return torch.arange(count).flip(0) // 2

    callback = watching(probe="val", num_images=3, order1_every_n_steps=None)
    train(Odd, tmp_path, callback, fit=validated())
    shown = callback.latest["probe_order0"]
    assert shown.labels is None
    assert torch.equal(shown.images, batch(12, seed=3)[0][:3])


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ((), "IndexError"),
        ((torch.full((12,), -1),), "IndexError: Target -1 is out of bounds"),
    ],
    ids=["no labels", "labels of -1"],
)
def test_validation_data_that_training_cannot_take_is_one_warning(tmp_path, made, said):
    images, _ = batch(12, seed=3)
    fit = {"val_dataloaders": DataLoader(TensorDataset(images, *made), batch_size=6)}

    class ValidatesNothing(Lit):
        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    callback = watching(probe="val", order1_every_n_steps=None, on_error="warn")
    run = train(ValidatesNothing, tmp_path, callback, fit=fit)
    (told,) = run.warned
    assert "(its batch must be one that the training loss takes)" in told
    assert said in told
    assert list(callback.latest) == ["order0"]


def test_a_tuple_stays_a_tuple(tmp_path):
    @dataclass
    class Batch:
        images: Tensor
        labels: Tensor

    class TakesDataclasses(Lit):
        def loss(self, batch: Any) -> Tensor:
            return super().loss((batch.images, batch.labels))

    collate = lambda rows: Batch(torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows]))  # noqa: E731
    own = Batch(*batch(2, seed=4))
    callback = watching(probe=own, order1_every_n_steps=None)
    assert callback.probe is own
    train(TakesDataclasses, tmp_path, callback, data=lambda: loader(collate_fn=collate))
    assert torch.equal(callback.latest["probe_order0"].images, own.images)
    assert NormGradCallback(probe=(own.images, own.labels)).probe == (own.images, own.labels)


def test_a_copy_of_the_callback_follows_the_same_images(tmp_path):
    callback = watching(probe=OWN, order1_every_n_steps=None)
    train(Lit, tmp_path, callback)
    twin = pickle.loads(pickle.dumps(callback))
    assert twin._state.probe_images.are_of(twin.probe)
    assert not twin._state.probe_images.are_of(callback.probe)
    assert torch.equal(twin._state.probe_images.batch[0], OWN[0])


def test_the_flag_can_change_between_events(tmp_path):
    callback = watching(probe=False, order1_every_n_steps=None)
    own = batch(3, seed=4)

    class Changes(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            callback.probe = {0: False, 1: "train", 2: "train", 3: own, 4: own, 5: False}[trainer.global_step]
            shown.append(callback.latest.get("probe_order0"))

    shown: list[Any] = []
    train(Lit, tmp_path, callback, callbacks=lambda: [Changes()])
    assert [None if one is None else (one.step, len(one.images)) for one in shown] == [
        None, None, (1, 2), (2, 2), (3, 3), (4, 3),
    ]  # fmt: skip


# ---------------------------------------------------------------- after a resume


def test_a_resumed_run_follows_the_same_images_and_its_checkpoint_needs_no_trust(tmp_path):
    def run(folder: str, epochs: int, **fit: Any) -> Any:
        callback = watching(probe="train", order1_every_n_steps=None)
        return train(Lit, tmp_path / folder, callback, max_epochs=epochs, fit=fit)

    first = run("first", 1)
    first.trainer.save_checkpoint(tmp_path / "half.ckpt")
    torch.load(tmp_path / "half.ckpt", weights_only=True)
    again = run("again", 2, ckpt_path=tmp_path / "half.ckpt")
    one, other = (of.callback.latest["probe_order0"] for of in (first, again))
    assert (one.step, other.step) == (5, 11)
    assert torch.equal(one.images, other.images)
    assert one.labels == other.labels
    assert not torch.equal(again.callback.inputs, other.images)
    fresh = run("fresh", 1)
    assert torch.equal(fresh.callback.latest["probe_order0"].images, one.images)  # the same seed
    train(Lit, tmp_path / "new", again.callback, data=lambda: loader(12, shuffle=False))  # and a new run chooses anew
    assert torch.equal(again.callback.latest["probe_order0"].images[0], batch(12)[0][0])


def test_a_probe_of_another_place_is_chosen_anew_after_a_resume(tmp_path):
    first = train(Lit, tmp_path, watching(probe="train", order1_every_n_steps=None))
    first.trainer.save_checkpoint(tmp_path / "half.ckpt")
    callback = watching(probe="val", order1_every_n_steps=None)
    resumed = {"ckpt_path": tmp_path / "half.ckpt", **validated()}
    train(WithValidation, tmp_path / "again", callback, max_epochs=2, fit=resumed)
    shown = callback.latest["probe_order0"].images
    assert all(any(torch.equal(one, other) for other in batch(12, seed=3)[0][:6]) for one in shown)


def test_a_batch_that_a_checkpoint_cannot_carry_is_a_warning(tmp_path):
    class WithNames(Lit):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch[:2])

    def collate(rows: Any) -> Any:
        return torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows]), np.arange(len(rows))

    callback = watching(probe="train", order1_every_n_steps=None)
    run = train(WithNames, tmp_path, callback, data=lambda: loader(collate_fn=collate))
    with pytest.warns(UserWarning, match="does not keep the images of the probe in checkpoints"):
        run.trainer.save_checkpoint(tmp_path / "a.ckpt")
    torch.load(tmp_path / "a.ckpt", weights_only=True)


# ---------------------------------------------------------------- models of all kinds


class Manual(Lit):
    """Does its own steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.keep(loss)


class ManualWithLoss(Manual):
    normgrad_loss = Lit.loss


def test_manual_optimisation_needs_a_normgrad_loss(tmp_path):
    both(tmp_path, "train", ManualWithLoss)
    module = Manual()
    with pytest.raises(
        ValueError, match=r"(?s)^`probe`: maps of the same images .* manual optimisation .*normgrad_loss"
    ):
        train(lambda: module, tmp_path / "refused", watching(probe="train", order1_every_n_steps=None))
    assert module.losses == []


def test_the_environment_cannot_end_a_run_that_has_no_loss_for_a_probe(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMGRAD_PROBE", "train")
    monkeypatch.setenv("NORMGRAD_EVERY_N_STEPS", "1")
    callback = EnvironmentCallback()
    run = train(Manual, tmp_path, callback)
    (told,) = run.warned
    assert told.startswith("NormGrad ignores NORMGRAD_PROBE; training continues without it. `probe`: ")
    assert list(callback.latest) == ["order0"]
    assert callback.probe is False


class CompiledNet(WithValidation):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(self.net, backend="aot_eager")


def test_a_compiled_network(tmp_path):
    _, _, seen = both(tmp_path, "val", CompiledNet, fit=validated())
    assert list(seen.at) == [0, 1, 2, 3, 4, 5]
    assert list(seen.at[5]["probe_order0"].maps) == LAYERS


def test_half_precision_and_accumulated_batches(tmp_path):
    plain, _, seen = both(tmp_path, OWN, Lit, precision="bf16-true", accumulate_grad_batches=2)
    assert list(seen.at) == [0, 1, 2]
    probed = OWN[0].bfloat16().float(), OWN[1]
    module = at(with_statistics(plain.moments[2], Lit, probed), Lit).train()
    wanted = order0_maps(module, lambda m, b: m.loss(b), probed, LAYERS)
    assert_close_all(seen.at[2]["probe_order0"].maps, wanted, 1e-3)


def test_the_batch_takes_one_inner_step_if_that_is_asked_for(tmp_path):
    _, watched, seen = both(tmp_path, OWN, flags={"per_image": False})
    assert "normgrad_probe_order1_batch/00_net.stage1" in panels(watched.trainer, probe=True)
    assert len(seen.at[0]["probe_order1"].maps["net.stage1"]) == 3


# ---------------------------------------------------------------- what cannot be done


def test_a_batch_that_cannot_be_cut_is_one_warning(tmp_path):
    class Odd(Lit):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch[:2])

    def collate(rows: Any) -> Any:
        return torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows]), torch.zeros(7, 2)

    callback = watching(probe="train", order1_every_n_steps=None, on_error="warn")
    run = train(Odd, tmp_path, callback, data=lambda: loader(collate_fn=collate))
    (told,) = run.warned
    assert '`probe="train"`: expected a batch that single images can be taken out of, but' in told
    assert "`probe=batch`" in told
    assert list(callback.latest) == ["order0"]


def test_a_loss_that_fails_on_the_probe_is_one_warning_and_the_rest_goes_on(tmp_path):
    class Particular(WithValidation):
        def loss(self, batch: Any) -> Tensor:
            if len(batch[0]) != 4 and self.trainer.training:
                raise RuntimeError("four images, please")
            return super().loss(batch)

    callback = watching(probe="val", order1_every_n_steps=None, on_error="warn")
    run = train(Particular, tmp_path, callback, fit=validated())
    (told,) = run.warned
    assert "a pass on the probe (its batch must be one that the training loss takes); training continues. " in told
    assert told.endswith("RuntimeError: four images, please")
    assert list(callback.latest) == ["order0"]


def test_a_validation_batch_that_cannot_be_cut_is_one_warning(tmp_path):
    class Odd(WithValidation):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch[:2])

    images, labels = batch(6, seed=3)
    odd = DataLoader([(images, labels, torch.zeros(7, 2))], batch_size=None)
    callback = watching(probe="val", order1_every_n_steps=None, on_error="warn")
    run = train(Odd, tmp_path, callback, fit={"val_dataloaders": odd})
    (told,) = run.warned
    assert '`probe="val"`: expected a batch that single images can be taken out of, but `2` has shape (7, 2)' in told


def test_no_validation_is_a_warning_at_the_end(tmp_path):
    run = train(Lit, tmp_path, watching(probe="val", order1_every_n_steps=None))
    (told,) = run.warned
    assert told.startswith('NormGrad had no images to follow: `probe="val"` takes them of the first validation batch')


def test_a_batch_that_training_skips_has_no_maps_of_the_probe_and_the_event_waits(tmp_path):
    class Skips(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx < 2 else loss

    callback = watching(probe=OWN, order1_every_n_steps=None)
    run = train(Skips, tmp_path, callback)
    assert panels(run.trainer, probe=True)["normgrad_probe_order0/00_net.stage1"] == [2, 3, 4, 5]


@pytest.mark.parametrize("wrong", ["training", 3, True, [], ["a.jpg"], {"images": 1}])
def test_what_is_no_probe_is_an_error_at_once(wrong):
    with pytest.raises(ValueError, match=r"^`probe`: expected None, False, 'train', 'val' or, in code, a batch"):
        NormGradCallback(probe=wrong)


@pytest.mark.parametrize("wrong", [loader(), loader().dataset], ids=["a loader", "a data set"])
def test_what_holds_batches_is_no_batch(wrong):
    name = type(wrong).__name__
    with pytest.raises(
        ValueError, match=rf"^`probe`: expected .* but got {name}\. Take one batch out of it: `probe=next"
    ):
        NormGradCallback(probe=wrong)


# ---------------------------------------------------------------- the film


def film_of(run: Any) -> Path:
    return Path(run.trainer.logger.log_dir, "normgrad", "film.webp")


def test_a_run_with_a_probe_leaves_a_film_and_one_without_none(tmp_path):
    run = train(Lit, tmp_path, watching(probe="train", order1_every_n_steps=None))
    with Image.open(film_of(run)) as film:
        assert film.n_frames == 6
    assert pictures(run.trainer)["normgrad/film"] == [5]
    twice(tmp_path / "without", order1_steps=None, flags={"order1_every_n_steps": None, "probe": False})
    assert not list((tmp_path / "without").rglob("*.webp"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_breaks_off_leaves_a_film_of_what_there_is(tmp_path, error):
    class BreaksOff(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 4:
                raise error
            return super().training_step(batch, batch_idx)

    callback, folder = watching(probe="train", order1_every_n_steps=None), tmp_path / "run"
    with pytest.raises((SystemExit, error)):
        train(BreaksOff, folder, callback)
    (path,) = folder.rglob("film.webp")
    with Image.open(path) as film:
        assert film.n_frames == 4


def test_a_film_that_cannot_be_made_is_one_warning(tmp_path, monkeypatch):
    def fails(*_: Any) -> None:
        raise OSError("no film today")

    monkeypatch.setattr(Film, "last_page", fails)
    run = train(Lit, tmp_path, watching(probe="train", order1_every_n_steps=None, on_error="warn"))
    assert run.warned == ["NormGrad failed while making the film; training continues. OSError: no film today"]


@pytest.mark.parametrize("options", [{"logger": False}, {"fast_dev_run": 3}], ids=str)
def test_nothing_is_written_where_nothing_is_logged(tmp_path, options, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callback = watching(probe="train", order1_every_n_steps=None)
    run = train(Lit, tmp_path, callback, **options)
    assert run.warned == []
    assert callback.latest["probe_order0"].maps
    assert not list(tmp_path.rglob("*.webp"))


def test_a_fit_that_goes_on_adds_to_the_film(tmp_path):
    def run(trainer: Any, module: Any, data: Any) -> None:
        trainer.fit(module, data)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, data)

    done = train(Lit, tmp_path, watching(probe="train", order1_every_n_steps=None), run=run)
    with Image.open(film_of(done)) as film:
        assert film.n_frames == 12


def test_the_film_of_a_resumed_run_begins_where_training_did(tmp_path):
    def run(folder: str, epochs: int, **fit: Any) -> Any:
        callback = watching(probe="train", order1_every_n_steps=None)
        return train(Lit, tmp_path / folder, callback, max_epochs=epochs, fit=fit)

    run("first", 1).trainer.save_checkpoint(tmp_path / "half.ckpt")
    torch.load(tmp_path / "half.ckpt", weights_only=True)
    again = run("again", 2, ckpt_path=tmp_path / "half.ckpt")
    with Image.open(film_of(again)) as film:
        assert film.n_frames == 12
    assert [frame.step for frame in again.callback._state.views["film"].frames] == list(range(12))


def test_a_resumed_run_with_other_images_has_a_film_of_its_own(tmp_path):
    first = train(Lit, tmp_path, watching(probe="train", order1_every_n_steps=None))
    first.trainer.save_checkpoint(tmp_path / "half.ckpt")
    callback = watching(probe="val", order1_every_n_steps=None)
    resumed = {"ckpt_path": tmp_path / "half.ckpt", **validated()}
    again = train(WithValidation, tmp_path / "again", callback, max_epochs=2, fit=resumed, val_check_interval=2)
    assert again.warned == []
    assert [frame.step for frame in callback._state.views["film"].frames] == [6, 7, 8, 9, 10, 11]
