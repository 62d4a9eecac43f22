"""The probe by default: the network runs alone, on the weights of the step, and training keeps its bits."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from networks import ResNet, batch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from twice import (
    LAYERS,
    Lit,
    assert_close,
    assert_same,
    at,
    loader,
    pictures,
    train,
    watching,
    with_statistics,
)

from normgrad_lightning import NormGradCallback, order0_maps


class Frames(pl.Callback):
    """Keeps the maps of the probe at each event."""

    def __init__(self, callback: NormGradCallback) -> None:
        self.callback = callback
        self.at: dict[int, Any] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        self.note()

    def on_train_end(self, *_: Any) -> None:
        self.note()

    def note(self) -> None:
        one = self.callback.latest.get("probe_order0")
        if one is not None:
            self.at[one.step] = one


class Augments(Lit):
    """What the network sees is not what is in the batch; counts its steps where no pass could put them back."""

    steps: list[int] = []  # noqa: RUF012

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        type(self).steps.append(batch_idx)
        return super().training_step((batch[0] + torch.randn_like(batch[0]), batch[1]), batch_idx)


def quiet(**flags: Any) -> NormGradCallback:
    return watching(**{"order1_every_n_steps": None, "views": ["overview", "film"], **flags})


def both(folder: Any, callback: NormGradCallback, make: Any = Lit, **options: Any) -> tuple[Any, Any, Frames]:
    """Train with and without the callback; no bit may differ."""
    frames = Frames(callback)
    plain = train(make, folder / "plain", **options)
    watched = train(make, folder / "watched", callback, callbacks=lambda: [frames], **options)
    assert_same(plain, watched)
    assert watched.warned == []
    return plain, watched, frames


def twelve_steps() -> Any:
    return loader(48)


SET_UPS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "accumulated": {"accumulate_grad_batches": 2, "max_epochs": 2},
    "bf16-mixed": {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize("options", SET_UPS.values(), ids=SET_UPS)
def test_frames_are_of_the_same_images_on_the_weights_of_the_step(tmp_path, options):
    callback = quiet(num_images=3, every_n_steps=10)
    plain, watched, frames = both(tmp_path, callback, data=twelve_steps, **options)
    assert list(frames.at) == [0, 10, 11]
    first = frames.at[0]
    in_batch = plain.moments[0].batch
    assert len(set(first.labels)) == len({int(label) for label in in_batch[1]} | set(first.labels))
    places = [next(i for i, other in enumerate(in_batch[0]) if torch.equal(one, other)) for one in first.images]
    assert [int(in_batch[1][i]) for i in places] == first.labels
    probed = first.images, torch.tensor(first.labels)
    for step, one in frames.at.items():
        assert torch.equal(one.images, first.images)
        assert one.labels == first.labels
        moment = with_statistics(plain.moments[step], Lit, probed)
        maps = order0_maps(at(moment, Lit).train(), lambda m, b: m.loss(b), probed, LAYERS)
        assert_close({k: m[:2] for k, m in one.maps.items()}, {k: m[:2] for k, m in maps.items()}, 1e-4)
    shown = pictures(watched.trainer)
    assert shown["normgrad/3_probe/0_order0"] == [0, 10, 11]
    assert shown["normgrad/film"] == [11]


def test_training_step_never_runs_for_it_and_images_are_as_the_network_saw_them(tmp_path):
    Augments.steps.clear()
    _, watched, frames = both(tmp_path, quiet(num_images=4, grad_cam=True, every_n_steps=5), Augments)
    assert Augments.steps == [*range(6), *range(6)]
    seen = frames.at[0].images
    assert not any(torch.equal(one, other) for one in seen for other in batch(24)[0])
    assert "probe_grad_cam" in watched.callback.latest


class Squares(Lit):
    def loss(self, batch: Any) -> Tensor:
        return (self.net(batch[0]) - F.one_hot(batch[1], 5)).square().mean()


class ByHand(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Skips(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx < 2 else loss


def test_elsewhere_there_is_none_and_no_word_of_it(tmp_path):
    for number, (make, flags) in enumerate(((Squares, {}), (ByHand, {}), (Lit, {"probe": False}))):
        _, watched, frames = both(tmp_path / str(number), quiet(**flags), make)
        assert frames.at == {}
        assert not [tag for tag in pictures(watched.trainer) if "probe" in tag or "film" in tag]


def test_a_skipped_batch_waits_for_the_next(tmp_path):
    _, _, frames = both(tmp_path, quiet(), Skips)
    assert list(frames.at) == [2, 5]


def test_a_resumed_run_follows_the_same_images(tmp_path):
    def run(folder: str, epochs: int, fit: Any = None, **flags: Any) -> tuple[Any, Frames]:
        frames = Frames(quiet(**{"num_images": 3, "every_n_steps": 6, **flags}))
        run = train(Lit, tmp_path / folder, frames.callback, callbacks=lambda: [frames], max_epochs=epochs, fit=fit)
        return run, frames

    first, before = run("first", 1)
    path = tmp_path / "first.ckpt"
    first.trainer.save_checkpoint(path)
    assert torch.load(path, weights_only=True)
    _, after = run("second", 2, {"ckpt_path": path})
    assert list(after.at) == [6, 11]
    assert torch.equal(after.at[6].images, before.at[0].images)
    assert after.at[11].labels == before.at[0].labels
    _, other = run("third", 2, {"ckpt_path": path}, probe="train", num_images=2)
    assert len(other.at[6].images) == 2


class Odd(ResNet):
    """It cannot run with as few images as a probe has."""

    def forward(self, images: Tensor) -> Tensor:
        if len(images) < 4:
            raise RuntimeError("too few images")
        return super().forward(images)


def test_a_network_that_cannot_run_on_a_probe_is_left_alone_without_a_word(tmp_path):
    plain = train(lambda: Lit(Odd), tmp_path / "plain", data=twelve_steps)
    watched = train(lambda: Lit(Odd), tmp_path / "watched", quiet(on_error="warn"), data=twelve_steps)
    assert_same(plain, watched)
    assert watched.warned == []
    assert "probe_order0" not in watched.callback.latest
    assert list(watched.callback.maps) == LAYERS


def test_true_is_no_probe():
    with pytest.raises(ValueError, match=r"^`probe`: expected None, False, 'train', 'val' or, in code, a batch"):
        NormGradCallback(probe=True)
    assert NormGradCallback(probe=False).probe is False


def test_small_steps_are_too_few_for_a_frame_each(tmp_path):
    images, labels = batch(8)
    data = DataLoader(TensorDataset(images, labels), batch_size=4)
    _, _, frames = both(tmp_path, quiet(), data=lambda: data, max_epochs=6)
    assert list(frames.at) == [0, 10, 11]
