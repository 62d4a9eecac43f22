"""The check in a fit: by default nothing of the user's runs twice, and training keeps its bits."""

import logging
import os
import weakref
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from oracles import marked_images
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.plugins import MixedPrecision
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator

from normgrad_lightning import NormGradCallback
from normgrad_lightning.check.rule import rests
from normgrad_lightning.layers.own_passes import current_pass
from normgrad_lightning.tensorboard_tab.logs import runs_in
from normgrad_lightning.tensorboard_tab.stored import decode

CALLS = []
"""A global of the user's: the batches of all steps."""


class Module(pl.LightningModule):
    """Learns the one place that tells the classes apart; counts, prints, writes, draws random numbers."""

    file = os.devnull

    def __init__(self, loss="cross-entropy"):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, 2, 1),
            nn.ReLU(),
            nn.Dropout2d(0.1),
            nn.AdaptiveMaxPool2d(4),
            nn.Flatten(),
            nn.Linear(128, 2),
        )
        self.loss = loss
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.batches = []

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        CALLS.append(batch_idx)
        print("step", batch_idx)
        with open(self.file, "a") as file:
            file.write(f"{batch_idx}\n")
        self.steps += 1
        images, labels = batch
        self.batches.append(weakref.ref(images))
        images = images + 0.05 * torch.randn_like(images)
        scores = self(images)
        self.log("accuracy", (scores.argmax(1) == labels).float().mean())
        if self.loss == "cross-entropy":
            return F.cross_entropy(scores, labels)
        return (scores - 2.0 * F.one_hot(labels, 2)).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 3e-3)


def fit(
    tmp_path,
    module,
    steps=110,
    logger=True,
    callbacks=(),
    batch_size=32,
    number_as_label=True,
    on_error="raise",
    callback=None,
    collate=None,
    options=None,
    **flags,
):
    """Train for some steps, with this callback or one with these flags, or with none; both are returned."""
    CALLS.clear()
    pl.seed_everything(3, verbose=False)
    images, labels = marked_images(256)
    data = TensorDataset(images, labels if number_as_label else 1.7 * labels - 0.8)
    data.classes = ["cat", "dog"]
    if flags:
        callback = NormGradCallback(budget=None, read_every_n_steps=5, on_error=on_error, **flags)
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=TensorBoardLogger(tmp_path, name="") if logger else False,
        callbacks=[*callbacks, *([callback] if callback else [])],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **(options() if options else {}),
    )
    order = torch.Generator().manual_seed(0)
    trainer.fit(module, DataLoader(data, batch_size, True, generator=order, collate_fn=collate))
    return callback, trainer


TYPES = set()
"""A global of the user's: what scores are computed in, by training and by passes of our own."""


class Noted(Module):
    """Notes the type of its scores."""

    def __init__(self, loss):
        super().__init__(loss)
        self.net.register_forward_hook(note)


def note(net, images, scores):
    TYPES.add(("training" if current_pass() is None else "pass", scores.dtype))


HALVES = {
    "bf16-mixed": (torch.bfloat16, lambda: {"precision": "bf16-mixed"}),
    "bf16-true": (torch.bfloat16, lambda: {"precision": "bf16-true"}),
    "16-mixed": (
        torch.float16,
        lambda: {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**24))]},
    ),
}


@pytest.mark.parametrize(("half", "options"), HALVES.values(), ids=HALVES)
@pytest.mark.parametrize("loss", ["cross-entropy", "squares"])
def test_it_computes_in_float32_what_training_computes_in_half_precision(tmp_path, loss, half, options):
    TYPES.clear()
    plain, checked = Noted(loss), Noted(loss)
    fit(tmp_path, plain, 6, options=options)
    fit(tmp_path, checked, 6, options=options, check=True, probe=False)
    assert set(TYPES) == {("training", half), ("pass", torch.float32)}
    for one, other in zip(plain.state_dict().values(), checked.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_it_tells_what_the_classes_rest_on(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        callback, trainer = fit(tmp_path, Module(), check=None)
    assert list(callback.check) == ["cat", "dog"]
    dog = callback.check["dog"]
    assert rests(dog)
    assert dog.n >= 8
    assert dog.called > 0.9 > 0.2 > dog.called_control
    said = [record.message for record in caplog.records if "rests on one small place" in record.message]
    assert any(message.startswith("NormGrad, step ") for message in said)
    assert f"raises their loss from {dog.plain:.2f} to {dog.covered:.2f}" in said[-1]
    [run] = runs_in([Path(trainer.log_dir)])
    stored = [decode(blob).header["check"] for blob in run.blobs["normgrad/tab"].values()]
    shown = " ".join(check["sentence"] for check in stored if check)
    for message in said:  # the numbers are those of a page, or more images follow
        numbers = message.partition(": ")[2].replace("`", "").partition(" A class may")[0]
        assert numbers in shown or message.endswith("More images follow.")
    events = EventAccumulator(trainer.log_dir)
    events.Reload()
    assert "normgrad/2_check/0_what_classes_rest_on" in events.Tags()["images"]
    assert {f"normgrad/check/{of}/{name}" for of in ("covered", "pasted") for name in ("cat", "dog")} <= set(
        events.Tags()["scalars"]
    )
    (*_, last) = events.Scalars("normgrad/check/covered/dog")
    assert last.value == pytest.approx(dog.covered_difference, rel=1e-5)


class Lives(pl.Callback):
    """At the start of each step, counts the batches of those before the last one that are still somewhere."""

    def __init__(self):
        self.most = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.most = max(self.most, sum(of() is not None for of in pl_module.batches[:-1]))
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in pl_module.modules())


@pytest.mark.parametrize(
    "flags", [{}, {"budget": None, "read_every_n_steps": 5, "check": None}], ids=["defaults", "often"]
)
def test_training_keeps_its_bits_and_runs_no_step_twice(tmp_path, capsys, flags):
    plain, checked, lives = Module(), Module(), Lives()
    checked.file = tmp_path / "steps.txt"
    _, trainer = fit(tmp_path, plain)
    calls, printed = list(CALLS), capsys.readouterr().out
    state = torch.get_rng_state()
    callback, _ = fit(tmp_path, checked, callbacks=[lives], callback=NormGradCallback(**flags))
    assert callback.check
    assert callback.latest["probe_order0"].maps
    assert calls == CALLS
    assert len(CALLS) == checked.steps == 110
    assert [int(line) for line in checked.file.read_text().split()] == CALLS
    assert printed.count("step") == 110
    assert [line for line in capsys.readouterr().out.splitlines() if "step" in line] == printed.splitlines()
    assert lives.most == 0
    assert torch.equal(torch.get_rng_state(), state)
    for one, other in zip(plain.state_dict().values(), checked.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in checked.modules())
    assert trainer.callback_metrics["accuracy"] > 0.9


class AnyForm(Module):
    """Takes batches of other forms apart in its step."""

    def training_step(self, batch, batch_idx):
        if isinstance(batch, dict):
            return super().training_step((batch["picture"], batch["y"]), batch_idx)
        images, labels = batch
        return super().training_step((torch.stack(images), labels), batch_idx)


def as_dict(samples):
    images, labels = map(torch.stack, zip(*samples, strict=True))
    return {"picture": images, "y": labels}


def as_list_of_images(samples):
    images, labels = zip(*samples, strict=True)
    return list(images), torch.stack(labels)


@pytest.mark.parametrize("collate", [as_dict, as_list_of_images])
def test_batches_of_other_forms_give_the_same_numbers(tmp_path, collate):
    plain, _ = fit(tmp_path / "plain", Module(), 60, check=None)
    other, _ = fit(tmp_path / "other", AnyForm(), 60, check=None, collate=collate)
    assert len(CALLS) == 60
    assert rests(plain.check["dog"])
    assert list(other.check.values()) == list(plain.check.values())


class Segmenter(Module):
    """Its labels are masks."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))

    def training_step(self, batch, batch_idx):
        CALLS.append(batch_idx)
        images = batch[0]
        return F.cross_entropy(self(images), (images[:, 0] > 0).long())


class Detector(Module):
    """Gets images and boxes in lists, and gives a sum of losses."""

    def __init__(self):
        super().__init__()
        backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU(), nn.Conv2d(8, 32, 3, 2, 1), nn.ReLU())
        backbone.out_channels = 32
        anchors = AnchorGenerator(((16,),), ((1.0,),))
        self.net = FCOS(backbone, 3, anchor_generator=anchors, min_size=64, max_size=64)

    def training_step(self, batch, batch_idx):
        CALLS.append(batch_idx)
        return sum(self.net(*batch).values())


def boxed(samples):
    return [image for image, _ in samples], [
        {"boxes": torch.tensor([[3.0, 3.0, 20.0, 24.0]]), "labels": torch.ones(1, dtype=torch.long)} for _ in samples
    ]


@pytest.mark.parametrize(("make", "collate"), [(Segmenter, None), (Detector, boxed)], ids=["segmenter", "detector"])
@pytest.mark.parametrize("check", [None, True])
def test_of_segmenters_and_detectors_the_loss_is_asked_or_nothing(tmp_path, caplog, recwarn, make, collate, check):
    def train(folder, **flags):
        module = make()
        with caplog.at_level(logging.INFO):
            callback, _ = fit(
                tmp_path / folder, module, 6, batch_size=10, number_as_label=False, collate=collate, **flags
            )
        return module, callback

    plain, _ = train("plain")
    watched, callback = train("watched", check=check)
    for one, other in zip(plain.state_dict().values(), watched.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    if check:
        found = callback.check["all"]
        assert found.n >= 8
        assert found.pasted is None
        assert found.plain > 0
        assert found.covered != found.plain
    else:
        assert callback.check == {}
        assert len(CALLS) == 6
        assert said_of(caplog, recwarn) == []


@pytest.mark.parametrize("flag", [None, False])
def test_a_loss_that_is_no_cross_entropy_is_left_alone(tmp_path, flag, recwarn):
    callback, _ = fit(tmp_path, Module("squares"), check=flag)
    assert callback.check == {}
    assert len(CALLS) == 110
    assert not [w for w in recwarn if "NormGrad" in str(w.message)]


def test_with_check_true_the_training_loss_is_asked(tmp_path):
    plain, checked = Module("squares"), Module("squares")
    fit(tmp_path, plain)
    callback, _ = fit(tmp_path, checked, check=True)
    dog = callback.check["dog"]
    assert dog.called is None
    assert dog.covered_difference > 0.5
    assert dog.pasted_difference > 0.5
    assert len(CALLS) > 110
    for one, other in zip(plain.state_dict().values(), checked.state_dict().values(), strict=True):
        assert torch.equal(one, other)


class Regression(Module):
    """No labels: what it learns is a number for each image."""

    manual = False

    def training_step(self, batch, batch_idx):
        CALLS.append(batch_idx)
        images, labels = batch
        loss = (self(images)[:, 0] - labels).square().mean()
        if self.manual:
            self.automatic_optimization = False
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
            return None
        return loss


def said_of(caplog, recwarn):
    """What is said of the check, logged and warned."""
    told = [record.message for record in caplog.records] + [str(one.message) for one in recwarn]
    words = ("the check", "The check", "was checked", "small place")
    return [text for text in told if text.startswith("NormGrad") and any(word in text for word in words)]


def without_labels(tmp_path, caplog, module=None, steps=6, **flags):
    with caplog.at_level(logging.INFO):
        return fit(tmp_path, module or Regression(), steps, number_as_label=False, **flags)[0]


def test_without_labels_there_is_one_row_where_the_check_is_asked_for(tmp_path, caplog, recwarn):
    callback = without_labels(tmp_path, caplog, check=True)
    assert list(callback.check) == ["all"]
    assert callback.check["all"].n == 8
    assert callback.check["all"].pasted is None
    asks, told = said_of(caplog, recwarn)
    assert asks.startswith("NormGrad: the check asks the loss of single images (`check=True`), so `training_step` runs")
    assert "nothing was pasted" in told


def test_without_labels_nothing_is_said_by_default(tmp_path, caplog, recwarn):
    callback = without_labels(tmp_path, caplog, check=None)
    assert callback.check == {}
    assert said_of(caplog, recwarn) == []


def test_why_there_is_no_check_is_said_once_where_it_is_asked_for(tmp_path, caplog, recwarn):
    module = Regression()
    module.manual, module.automatic_optimization = True, False
    callback = without_labels(tmp_path, caplog, module, on_error="warn", check=True)
    assert callback.check == {}
    (told,) = said_of(caplog, recwarn)
    assert told.startswith("NormGrad cannot do the check: `training_step`: ")
    assert "normgrad_loss" in told


def test_a_check_that_never_began_is_said_where_it_is_asked_for(tmp_path, caplog, recwarn):
    stop = StopsAt(3)
    without_labels(tmp_path, caplog, steps=1000, callbacks=[stop], check=True)
    (told,) = said_of(caplog, recwarn)
    assert told.startswith("NormGrad: No step was checked: the check begins at step 50, or near the end")


@pytest.mark.parametrize(("steps", "is_checked"), [(110, True), (1000, False)])
def test_in_a_short_run_the_check_begins_early(tmp_path, caplog, steps, is_checked):
    with caplog.at_level(logging.INFO):
        callback, _ = fit(tmp_path, Module(), steps, callbacks=[StopsAt(40)], check=None)
    assert bool(callback.check) == is_checked
    assert all(11 <= one.step < 40 for one in callback.check.values())


@pytest.mark.parametrize(("steps", "check", "is_said"), [(6, None, False), (6, True, True), (60, None, True)])
def test_too_few_images_are_said_unless_training_was_short(tmp_path, caplog, recwarn, steps, check, is_said):
    with caplog.at_level(logging.INFO):
        callback, _ = fit(tmp_path, Module(), steps, batch_size=2, check=check)
    assert callback.check == {}
    told = said_of(caplog, recwarn)
    assert len(told) == is_said
    assert all("fewer than 8 images of each class" in text for text in told)


def test_what_is_found_after_the_last_event_is_shown_at_the_end(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        callback, trainer = fit(tmp_path, Module(), 1000, callbacks=[StopsAt(63)], check=None)
    known = callback.check["dog"]
    assert 50 < known.step < 63
    events = EventAccumulator(trainer.log_dir)
    events.Reload()
    (*_, last) = events.Images("normgrad/2_check/0_what_classes_rest_on")
    curves = {of: events.Scalars(f"normgrad/check/{of}/dog")[-1] for of in ("covered", "pasted")}
    assert {last.step, *(one.step for one in curves.values())} == {62}
    assert curves["covered"].value == pytest.approx(known.covered_difference, rel=1e-5)
    assert curves["pasted"].value == pytest.approx(known.pasted_difference, rel=1e-5)
    assert callback.latest["order0"].step == 50  # the last event
    said = [record.message for record in caplog.records if record.message.startswith("NormGrad: ")]
    assert any("`dog`" in text or "`cat`" in text for text in said)


class StopsAt(pl.Callback):
    """Ends training without notice."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step >= self.step


def test_the_flag_can_be_set_later():
    callback = NormGradCallback()
    assert callback.check == {}
    callback.check = False
    assert callback._settings.general.check is False
    with pytest.raises(ValueError, match="check"):
        callback.check = "always"
