"""The callback in real training runs: it changes nothing, shows the right thing, and survives what goes wrong."""

import copy
import logging
import math
import pickle
import random
import warnings
from types import SimpleNamespace

import lightning.pytorch
import numpy as np
import pytest
import pytorch_lightning
import torch
import torch.nn.functional as F
from networks import ResNet, batch
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from twice import ALL_VIEWS, History, panels, pictures, same, scalars

from normgrad_lightning import NormGrad, NormGradCallback

PACKAGES = {"pytorch_lightning": pytorch_lightning, "lightning": lightning.pytorch}


def lit(package=pytorch_lightning, **options):
    """A classifier as a user would write it, in one of the two Lightnings."""

    class Lit(package.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = ResNet(dropout=0.3, **options)
            self.seen = 0

        def training_step(self, batch, batch_idx):
            images, labels = batch
            loss = F.cross_entropy(self.net(images + 0.1 * torch.randn_like(images)), labels)
            self.seen += len(images)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Lit()


def data(n=24, batch_size=4, shuffle=True):
    return DataLoader(TensorDataset(*batch(n)), batch_size=batch_size, shuffle=shuffle)


def fit(module, callbacks, folder, package=pytorch_lightning, loader=None, **options):
    settings = dict(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
        callbacks=callbacks,
    )
    trainer = package.Trainer(**{**settings, **options})
    loaders = (loader or data(),) if "val" not in options else (loader or data(), options["val"])
    with warnings.catch_warnings():
        for noise in (
            ".*does not have many workers.*",
            ".*LeafSpec.*",
            ".*number of training batches.*",
            ".*val_loop.*",
        ):
            warnings.filterwarnings("ignore", noise)
        warnings.filterwarnings("ignore", ".*defined a `validation_step`.*")
        trainer.fit(module, *loaders)
    return trainer


class Metrics(pytorch_lightning.Callback):
    """What the run told its progress bar and its other callbacks, step by step."""

    def __init__(self):
        self.log_of_steps = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.log_of_steps.append({k: float(v) for k, v in trainer.callback_metrics.items()})


@pytest.mark.parametrize(
    "flags", [{}, {"images": "random", "target": "weight"}, {"images": "hardest", "target": "input"}]
)
def test_training_keeps_every_bit(tmp_path, flags):
    runs = []
    for watched in (False, True):
        pytorch_lightning.seed_everything(7, verbose=False)
        module, metrics = lit(), Metrics()
        callback = NormGradCallback(every_n_steps=1, num_images=2, on_error="raise", **flags)
        trainer = fit(
            module,
            [metrics, callback] if watched else [metrics],
            tmp_path / str(watched),
            max_epochs=3,
            accumulate_grad_batches=3,
            gradient_clip_val=0.5,
        )
        assert bool(callback.maps) == watched
        optimizer = trainer.optimizers[0].state_dict()
        runs.append(
            {
                "weights and buffers": [*module.state_dict().values()],
                "momentum": [s["momentum_buffer"] for s in optimizer["state"].values()],
                "groups": optimizer["param_groups"],
                "gradients": [p.grad for p in module.parameters()],
                "torch": torch.get_rng_state(),
                "numpy": np.random.get_state()[1].tolist(),
                "python": random.getstate(),
                "attributes": sorted(vars(module)),
                "own attributes": module.seen,
                "hooks": [[len(m._forward_hooks), len(m._forward_pre_hooks)] for m in module.modules()],
                "metrics": metrics.log_of_steps,
                "scalars": scalars(trainer),
                "steps": trainer.global_step,
            }
        )
    plain, watched = runs
    assert plain["steps"] == 6
    assert len(plain["scalars"]["loss_step"]) > 3
    for what in plain:
        assert same(plain[what], watched[what]), what


@pytest.mark.parametrize("package", PACKAGES)
def test_each_lightning_runs_it(tmp_path, package):
    callback = NormGradCallback(every_n_steps=2, views=ALL_VIEWS, probe=False, on_error="raise")
    trainer = fit(lit(PACKAGES[package]), [callback], tmp_path, PACKAGES[package])
    assert panels(trainer) == {
        "normgrad_order0/00_net.stage1": [0, 2, 4, 5],
        "normgrad_order0/01_net.stage2": [0, 2, 4, 5],
        "normgrad_order0/02_net.stage3": [0, 2, 4, 5],
    }


def test_it_may_stand_alone_as_callbacks_argument(tmp_path):
    callback = NormGradCallback()
    fit(lit(), callback, tmp_path)
    assert callback.maps


def test_maps_are_those_of_the_weights_before_the_update(tmp_path):
    module = lit()
    plain = copy.deepcopy(module)
    plain.training_step = lambda batch, batch_idx: None
    callback = NormGradCallback(every_n_steps=100, num_images=3, images="first", on_error="raise")
    loader = data(shuffle=False)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    fit(module, [callback], tmp_path, loader=loader, max_steps=1)

    torch.set_rng_state(state)
    images, labels = next(iter(loader))
    with NormGrad(plain.net, "stage*", num_images=3) as recorder:
        seen = images + 0.1 * torch.randn_like(images)
        F.cross_entropy(plain.net(seen), labels).backward()
    assert torch.equal(callback.inputs, seen[:3])
    for name, m in recorder.maps.items():
        torch.testing.assert_close(callback.maps[f"net.{name}"], m)


def test_the_image_shown_is_what_the_network_saw(tmp_path):
    class Augmented(type(lit())):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch[0].flip(3) * 5, batch[1]), batch_idx)

    module = lit()
    original = module.net.forward
    saw = []

    def forward(x):
        saw.append(x.detach().clone())
        return original(x)

    module.net.forward = forward
    callback = NormGradCallback(num_images=2, images="first")
    fit(module, [callback], tmp_path, limit_train_batches=1)
    assert torch.equal(callback.inputs, saw[0][:2])


@pytest.mark.parametrize(
    ("every", "accumulate", "batches", "expected"),
    [(1, 1, 3, [0, 1, 2]), (2, 1, 5, [0, 2, 4]), (1, 3, 6, [0, 1]), (2, 2, 6, [0, 2]), (100, 1, 4, [0, 3])],
)
def test_events_follow_optimizer_steps(tmp_path, every, accumulate, batches, expected):
    trainer = fit(
        lit(),
        [NormGradCallback(every_n_steps=every, views="panels")],
        tmp_path,
        limit_train_batches=batches,
        accumulate_grad_batches=accumulate,
    )
    assert set(map(tuple, panels(trainer).values())) == {tuple(expected)}


def test_accumulated_batches_do_not_change_raw_values(tmp_path):
    values = []
    for accumulate in (1, 3):
        callback = NormGradCallback(every_n_steps=100, on_error="raise")
        history = History(callback)
        torch.manual_seed(0)
        fit(lit(), [callback, history], tmp_path, loader=data(shuffle=False), accumulate_grad_batches=accumulate)
        values.append(history.maps[0]["net.stage2"])
    torch.testing.assert_close(values[0], values[1], rtol=1e-5, atol=0)


def test_steps_that_come_in_twos_are_not_missed(tmp_path):
    """Two optimizers advance the global step by two: odd multiples are passed over, but no event is."""

    class Two(type(lit())):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(self.net.parameters(), 0.01), torch.optim.SGD(self.net.fc.parameters(), 0.01)], []

    trainer = fit(Two(), [NormGradCallback(every_n_steps=3, views="panels", on_error="raise")], tmp_path)
    assert set(map(tuple, panels(trainer).values())) == {(0, 4, 6, 10)}


def test_validation_and_sanity_checks_are_not_recorded(tmp_path):
    callback = NormGradCallback(every_n_steps=1, views=ALL_VIEWS, probe=False, on_error="raise")
    module = lit()
    trainer = pytorch_lightning.Trainer(
        max_epochs=1,
        callbacks=[callback],
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=2,
        val_check_interval=2,
        accelerator="cpu",
    )
    trainer.fit(module, data(), data())
    assert set(map(tuple, panels(trainer).values())) == {(0, 1, 2, 3, 4, 5)}
    trainer.validate(module, data(), verbose=False)
    assert _hooks(module) == 0


def test_hardest_images_are_those_with_most_signal(tmp_path):
    runs = {}
    for images in ("first", "hardest"):
        callback = NormGradCallback(num_images=4 if images == "first" else 2, images=images)
        torch.manual_seed(0)
        fit(lit(), [callback], tmp_path, loader=data(shuffle=False), limit_train_batches=1)
        runs[images] = callback
    shares = sum(m.flatten(1).sum(1) / m.sum() for m in runs["first"].maps.values())
    order = shares.argsort(descending=True)[:2]
    assert torch.equal(runs["hardest"].inputs, runs["first"].inputs[order])
    assert torch.equal(runs["hardest"].maps["net.stage2"], runs["first"].maps["net.stage2"][order])


def test_random_images_are_drawn_anew_and_go_on_after_a_resume(tmp_path):
    class Watch(pytorch_lightning.Callback):
        def __init__(self, callback):
            self.callback, self.shown = callback, []

        def on_train_batch_end(self, *_):
            self.shown.append(self.callback.inputs[:, 0, 0, 0].tolist())

    def run(epochs, checkpoint=None):
        callback = NormGradCallback(images="random", num_images=3, every_n_steps=1)
        watch = Watch(callback)
        torch.manual_seed(0)
        module = lit()
        module.training_step = lambda batch, batch_idx: F.cross_entropy(module.net(batch[0]), batch[1])
        trainer = pytorch_lightning.Trainer(
            max_epochs=epochs, callbacks=[callback, watch], default_root_dir=tmp_path, logger=False, accelerator="cpu",
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(module, data(shuffle=False, batch_size=8), ckpt_path=checkpoint)
        return watch.shown, trainer

    whole, _ = run(2)
    half, trainer = run(1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    rest, _ = run(2, tmp_path / "half.ckpt")
    assert len(whole) == 6
    assert len({tuple(shown) for shown in whole}) == 6
    assert half + rest == whole


def test_a_resumed_run_goes_on_with_its_schedule(tmp_path):
    first = NormGradCallback(every_n_steps=4, views=ALL_VIEWS, probe=False)
    trainer = fit(lit(), [first], tmp_path, max_epochs=1)
    assert next(iter(panels(trainer).values())) == [0, 4, 5]
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = pytorch_lightning.Trainer(
        max_epochs=2, default_root_dir=tmp_path,
        callbacks=[NormGradCallback(every_n_steps=4, views=ALL_VIEWS, probe=False)],
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    again.fit(lit(), data(), ckpt_path=tmp_path / "a.ckpt")
    assert next(iter(panels(again).values())) == [8, 11]


def test_the_layers_are_announced_once_by_name(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("pytorch_lightning"), "propagate", True)
    fit(lit(), [NormGradCallback(every_n_steps=1)], tmp_path)
    told = [record.getMessage() for record in caplog.records if "NormGrad reads" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(
        "NormGrad reads net.stage1, net.stage2, net.stage3 (auto) every step. Pictures go to TensorBoard ("
    )


def _hooks(module):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


@pytest.mark.parametrize("how", ["well", "an error", "Ctrl-C"])
def test_hooks_are_gone_however_training_ends(tmp_path, how):
    module = lit()
    if how != "well":
        error = KeyboardInterrupt() if how == "Ctrl-C" else RuntimeError("boom")

        def training_step(batch, batch_idx):
            if batch_idx == 2:
                assert _hooks(module) > 0
                raise error
            return F.cross_entropy(module.net(batch[0]), batch[1])

        module.training_step = training_step
        with pytest.raises((RuntimeError, SystemExit, KeyboardInterrupt)):
            fit(module, [NormGradCallback(every_n_steps=1)], tmp_path)
    else:
        fit(module, [NormGradCallback()], tmp_path)
    assert _hooks(module) == 0


def test_between_events_the_model_has_no_hooks(tmp_path):
    module, hooks = lit(), []
    module.on_train_batch_start = lambda *_: hooks.append(_hooks(module) > 0)
    module.on_train_epoch_end = lambda: hooks.append(_hooks(module))
    fit(module, [NormGradCallback(every_n_steps=3)], tmp_path)
    assert hooks == [True, False, False, True, False, True, 0]


def test_one_callback_serves_two_fits(tmp_path):
    callback = NormGradCallback(every_n_steps=4, views=ALL_VIEWS, probe=False)
    for i in range(2):
        trainer = fit(lit(), [callback], tmp_path / str(i))
        assert next(iter(panels(trainer).values())) == [0, 4, 5]


def test_switched_off_it_attaches_nothing(tmp_path):
    module, callback = lit(), NormGradCallback(enabled=False)
    counts = []
    module.on_train_batch_start = lambda *_: counts.append(_hooks(module))
    trainer = fit(module, [callback], tmp_path)
    assert set(counts) == {0}
    assert callback.maps == {}
    assert panels(trainer) == {}


# What the user gets wrong is told before the first batch.


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            {"every_n_steps": 0},
            "`every_n_steps`: expected a whole number of at least 1, but got 0.*set `enabled=False`",
        ),
        ({"every_n_steps": 2.5}, "`every_n_steps`: expected a whole number"),
        ({"num_images": 0}, "`num_images`: expected a whole number of at least 1, but got 0"),
        ({"num_images": True}, "`num_images`: expected a whole number of at least 1, but got True"),
        ({"tile_size": 4}, "`tile_size`: expected a whole number of at least 16, but got 4"),
        (
            {"images": "last"},
            "`images`: expected one of 'balanced', 'first', 'random', 'hardest', 'easiest', but got 'last'",
        ),
        ({"target": "weights"}, "`target`: expected one of 'output', 'input', 'weight', but got 'weights'"),
        ({"scale": "batch"}, "`scale`: expected one of 'robust', 'image', 'shared', but got 'batch'"),
        ({"on_error": "ignore"}, "`on_error`: expected one of 'warn', 'raise', but got 'ignore'"),
        ({"layers": 5}, '`layers`: expected "auto", a layer\'s name, a glob or a list of these, but got 5'),
        ({"colormap": "infrno"}, "`colormap`: expected the name of a colour map.*Did you mean 'inferno'"),
        ({"opacity": 1.5}, r"`opacity`: expected a number from 0 \(image only\) to 1 \(map only\), but got 1.5"),
        (
            {"mean": "imagenet"},
            "`mean`: expected None, a number, or a list with one for each channel, but got 'imagenet'",
        ),
        ({"std": [0.2, None]}, "`std`: expected None, a number, or a list with one for each channel"),
        ({"std": [0.2, 0.0, 0.2]}, "`std`: expected positive numbers, but got"),
        ({"mean": [0.5, 0.5], "std": [0.2] * 3}, "`std`: expected as many numbers as `mean` has, 2, but got 3"),
        ({"mean": True}, "`mean`: expected None, a number, or a list"),
        ({"opacity": True}, "`opacity`: expected a number from 0"),
        ({"enabled": "false"}, "`enabled`: expected True or False, but got 'false'"),
        ({"check": "yes"}, "`check`: expected True, False or None, but got 'yes'"),
        ({"channels_last": "no"}, "`channels_last`: expected True, False or None, but got 'no'"),
        (
            {"images": ["first"]},
            r"`images`: expected one of 'balanced', 'first', 'random', 'hardest', 'easiest', but got \['first'\]",
        ),
        ({"colormap": ["inferno"]}, "`colormap`: expected the name of a colour map"),
        ({"token_grid": (True, 3)}, r"`token_grid`: expected None or the sizes \(rows, columns\)"),
        ({"token_grid": (0, 3)}, r"`token_grid`: expected None or the sizes \(rows, columns\), .* but got \[0, 3\]"),
    ],
)
def test_a_wrong_flag_is_told_at_once(flags, told):
    with pytest.raises(ValueError, match=told):
        NormGradCallback(**flags)


def test_numbers_of_numpy_are_numbers():
    callback = NormGradCallback(every_n_steps=np.int64(5), opacity=np.float32(0.5), mean=np.float64(0.5), std=0.25)
    assert callback.every_n_steps == 5


def test_an_unknown_flag_is_told_at_once():
    with pytest.raises(TypeError, match="every_n_step"):
        NormGradCallback(every_n_step=5)


def test_a_layer_that_is_not_there_is_told_before_the_first_batch(tmp_path):
    module, started = lit(), []
    module.on_train_batch_start = lambda *_: started.append(1)
    with pytest.raises(ValueError, match=r"'net.stage4' matches none. Nearest names: net.stage3"):
        fit(module, [NormGradCallback(layers="net.stage4")], tmp_path)
    assert started == []
    assert _hooks(module) == 0


# What goes wrong on the way is one warning, and training goes on, to the same bits.


def finished(folder, callback, change=lambda module: None, loader=None, **options):
    """The final weights, and what was warned of, of a run with this callback."""
    pytorch_lightning.seed_everything(3, verbose=False)
    module = lit()
    change(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(module, [callback] if callback else [], folder, loader=loader, **options)
    assert trainer.state.finished
    told = [str(w.message) for w in caught if "NormGrad" in str(w.message)]
    return [p.detach().clone() for p in module.parameters()], told, trainer


def freeze(*names):
    return lambda module: [module.get_submodule(name).requires_grad_(False) for name in names]


@pytest.mark.parametrize(
    ("layers", "change", "told"),
    [
        ("net.fc", lambda m: None, "cannot read the layer 'net.fc': its shape (4, 5) has no spatial axis"),
        (
            ["net.stage1", "net.stage3"],
            freeze("net.stem", "net.stage1"),
            "'net.stage1': it gets no gradient: it and all",
        ),
        (
            "auto",
            freeze("net.stem", "net.stage1", "net.stage2", "net.stage3"),
            "found no layer to read: no layer that gives",
        ),
    ],
)
def test_layers_that_cannot_be_read_are_told_once(tmp_path, layers, change, told):
    plain, _, _ = finished(tmp_path, None, change)
    callback = NormGradCallback(layers=layers, every_n_steps=1)
    weights, warned, _ = finished(tmp_path, callback, change)
    assert all(map(torch.equal, plain, weights))
    assert len(warned) == 1
    assert told in warned[0]
    assert list(callback.maps) == (["net.stage3"] if isinstance(layers, list) else [])


class Tabular(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_batch_without_an_image_is_told_once(tmp_path):
    loader = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2)
    with pytest.warns(UserWarning, match="no module was given an image") as caught:
        trainer = fit(Tabular(), [NormGradCallback(every_n_steps=1)], tmp_path, loader=loader)
    assert trainer.global_step == 4
    assert sum("no module was given an image" in str(w.message) for w in caught) == 1


def test_a_module_that_computes_no_gradient_is_told(tmp_path):
    module = lit()
    module.automatic_optimization = False
    module.training_step = lambda batch, batch_idx: module.net(batch[0]).detach().sum()
    with pytest.warns(UserWarning, match="no layer that gives features on a grid gets a gradient"):
        fit(module, [NormGradCallback(every_n_steps=1)], tmp_path)


@pytest.mark.parametrize("options", [{"logger": False}, {"fast_dev_run": 2}])
def test_without_a_logger_there_are_maps_but_no_files(tmp_path, options):
    callback = NormGradCallback(every_n_steps=1, on_error="raise")
    plain, _, _ = finished(tmp_path / "plain", None, **options)
    weights, told, _ = finished(tmp_path / "run", callback, **options)
    assert all(map(torch.equal, plain, weights))
    assert told == []
    assert list(callback.maps) == ["net.stage1", "net.stage2", "net.stage3"]
    assert list(tmp_path.rglob("*.jpg")) == list(tmp_path.rglob("events*")) == []


def test_a_logger_without_images_gets_files(tmp_path):
    callback = NormGradCallback(every_n_steps=3, views=ALL_VIEWS, probe=False, on_error="raise")
    _, told, trainer = finished(tmp_path, callback, logger=CSVLogger(tmp_path))
    folder = f"{trainer.logger.log_dir}/normgrad"
    assert told == []
    files = sorted(str(p.relative_to(folder)) for p in tmp_path.rglob("*.jpg"))
    tags = [*OF_ALL_LAYERS, *(f"normgrad_order0/0{i}_net.stage{i + 1}" for i in range(3))]
    assert files == sorted(f"{tag}/step_0000000{step}.jpg" for tag in tags for step in (0, 3, 5))


def test_every_logger_gets_the_panels(tmp_path):
    loggers = [TensorBoardLogger(tmp_path, "a"), CSVLogger(tmp_path, "b"), TensorBoardLogger(tmp_path, "c")]
    fit(lit(), [NormGradCallback(views=ALL_VIEWS, probe=False, on_error="raise")], tmp_path, logger=loggers)
    for board in (loggers[0], loggers[2]):
        events = EventAccumulator(board.log_dir)
        events.Reload()
        assert len(events.Tags()["images"]) == len(OF_ALL_LAYERS) + 3  # and a panel for each layer
    assert len(list((tmp_path / "b").rglob("*.jpg"))) == 2 * (len(OF_ALL_LAYERS) + 3)  # of the first step and the last


def test_a_folder_that_cannot_be_written_any_more_is_one_warning(tmp_path):
    """In the middle of training a file takes the folder's place: what a full or lost disk does, also to root."""
    plain, _, _ = finished(tmp_path / "plain", None, logger=CSVLogger(tmp_path / "plain"))

    def sabotage(module):
        def lose_the_folder(batch, batch_idx):
            folder = tmp_path / "run" / "lightning_logs" / "version_0" / "normgrad"
            if batch_idx == 2:
                folder.rename(tmp_path / "moved")
                folder.write_text("in the way")

        module.on_train_batch_start = lose_the_folder

    callback = NormGradCallback(every_n_steps=1, views=ALL_VIEWS, probe=False)
    weights, told, _ = finished(tmp_path / "run", callback, sabotage, logger=CSVLogger(tmp_path / "run"))
    assert all(map(torch.equal, plain, weights))
    # and a panel for each layer; the pages of the second event come too late
    assert len(list(tmp_path.rglob("*.jpg"))) == len(OF_ALL_LAYERS) + 3
    failures = [sentence for sentence in told if "failed" in sentence]
    assert len(failures) == 1
    assert "NormGrad failed while writing to" in failures[0]
    assert "training continues. NotADirectoryError" in failures[0]
    assert callback.maps


def test_a_writer_that_fails_does_not_keep_the_others_from_writing(tmp_path):
    broken, sound = CSVLogger(tmp_path, "broken"), TensorBoardLogger(tmp_path, "sound")
    (tmp_path / "broken" / "version_0").mkdir(parents=True)
    broken._version = 0
    (tmp_path / "broken" / "version_0" / "normgrad").write_text("in the way")
    with pytest.warns(UserWarning, match="NormGrad failed while writing to"):
        fit(lit(), [NormGradCallback(every_n_steps=3, views=ALL_VIEWS, probe=False)], tmp_path, logger=[broken, sound])
    events = EventAccumulator(sound.log_dir)
    events.Reload()
    tags = [*OF_ALL_LAYERS, *(f"normgrad_order0/0{i}_net.stage{i + 1}" for i in range(3))]
    assert {tag: len(events.Images(tag)) for tag in events.Tags()["images"]} == dict.fromkeys(tags, 3)


@pytest.mark.parametrize("place", ["views.panels.Sheet", "views.panels.input_tiles", "step.image_choice.signal"])
def test_a_failure_of_ours_is_one_warning_or_an_error_as_asked(tmp_path, monkeypatch, place):
    def broken(*args, **kwargs):
        raise RuntimeError("we are broken")

    plain, _, _ = finished(tmp_path / "plain", None)
    monkeypatch.setattr(f"normgrad_lightning.{place}", broken)
    flags = {"every_n_steps": 1, "images": "hardest", "views": ALL_VIEWS}
    weights, told, _ = finished(tmp_path / "run", NormGradCallback(**flags))
    assert all(map(torch.equal, plain, weights))
    assert len(told) == 1
    assert "training continues. RuntimeError: we are broken" in told[0]
    with pytest.raises(RuntimeError, match="we are broken"):
        finished(tmp_path / "raise", NormGradCallback(**flags, on_error="raise"))


def test_a_failure_inside_a_hook_is_one_warning_for_each_layer(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("we are broken")

    plain, _, _ = finished(tmp_path / "plain", None)
    monkeypatch.setattr("normgrad_lightning.maths.products.channel_norm", broken)
    weights, told, _ = finished(tmp_path / "run", NormGradCallback(layers="net.stage2", every_n_steps=1))
    assert all(map(torch.equal, plain, weights))
    assert told == ["NormGrad cannot read the layer 'net.stage2': RuntimeError: we are broken."]
    with pytest.raises(RuntimeError, match="we are broken"):
        finished(tmp_path, NormGradCallback(layers="net.stage2", on_error="raise"))


def test_steps_whose_gradients_are_not_finite_are_skipped_and_counted(tmp_path):
    def poison(module):
        step = module.training_step
        module.training_step = lambda batch, batch_idx: (
            step(batch, batch_idx) * (math.inf if batch_idx in (1, 4) else 1.0)
        )
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.0)

    callback = NormGradCallback(every_n_steps=1)
    _, told, _ = finished(tmp_path, callback, poison)
    assert callback.skipped >= 1
    assert any("not finite" in sentence for sentence in told)
    assert all(m.isfinite().all() for m in callback.maps.values())


# Set-ups that other tools break on.


def test_a_copy_carries_neither_hooks_nor_writers(tmp_path):
    """As spawned processes and tuners need it; torch's own generators do not survive the way to a spawned process."""
    callback = NormGradCallback(every_n_steps=1, images="random")
    module, copies = lit(), []
    module.on_train_batch_end = lambda *_: copies.append((pickle.dumps(callback), copy.deepcopy(callback)))
    fit(module, [callback], tmp_path, limit_train_batches=2)
    for pickled, copied in copies:
        fresh = pickle.loads(pickled)
        assert same(fresh.state_dict(), copied.state_dict())
        assert list(fresh.maps) == list(callback.maps)
        fit(lit(), [fresh], tmp_path / "again", limit_train_batches=1)


class Compiled(type(lit())):
    """A part of the network is compiled, and must not be broken up by hooks."""

    def __init__(self):
        super().__init__()
        self.net.stage2 = torch.compile(self.net.stage2, backend="aot_eager", fullgraph=True)


def test_compiled_parts_are_read_at_their_border_and_keep_their_bits(tmp_path):
    runs = []
    for callbacks in ([], [NormGradCallback(every_n_steps=1, on_error="raise")]):
        torch._dynamo.reset()
        pytorch_lightning.seed_everything(1, verbose=False)
        module = Compiled()
        fit(module, callbacks, tmp_path)
        runs.append(module.state_dict())
    assert all(map(torch.equal, *(run.values() for run in runs)))
    assert list(callbacks[0].maps) == ["net.stage1", "net.stage2", "net.stage3"]


def test_a_module_compiled_as_a_whole_whose_steps_cannot_be_replayed_is_told_and_trains(tmp_path):
    class Manual(BoringModel):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.steps = 0

        def training_step(self, batch, batch_idx):
            self.steps += 1

    module = torch.compile(Manual(), backend="eager")
    with pytest.warns(UserWarning, match="cannot read this module: it is compiled as a whole. .* need the loss"):
        fit(module, [NormGradCallback()], tmp_path)
    assert module.steps == 6


def test_scripted_parts_take_no_hooks_and_do_no_harm(tmp_path):
    module = lit()
    module.net.stage2 = torch.jit.script(nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()))
    callback = NormGradCallback(on_error="raise")
    fit(module, [callback], tmp_path)
    assert list(callback.maps) == ["net.stage1", "net.stage3"]


def test_two_callbacks_on_one_layer_do_not_overwrite_each_other(tmp_path):
    callbacks = [
        NormGradCallback(layers="net.stage1.conv1", target=target, views=ALL_VIEWS, probe=False, on_error="raise")
        for target in ("output", "weight")
    ]
    trainer = fit(lit(), callbacks, tmp_path)
    of_classes = [f"{view}/{of}" for view in ("1_patches", "4_atlas") for of in ("0_combined", "00_net.stage1.conv1")]
    assert set(pictures(trainer)) == {
        "normgrad_order0/00_net.stage1.conv1",
        "normgrad_2_order0_weight/00_net.stage1.conv1",
        "normgrad/5_overview/0_order0",
        "normgrad_2/5_overview/0_order0_weight",
        *(f"{group}/{tag}" for group in ("normgrad", "normgrad_2") for tag in of_classes),
    }


def test_layers_that_are_never_called_as_such_are_told(tmp_path):
    torch._dynamo.utils.counters.clear()
    module = lit()
    module.training_step = lambda batch, batch_idx: F.cross_entropy(
        module.net.fc.forward(batch[0][:, 0, 0, :24]), batch[1]
    )
    with pytest.warns(UserWarning, match="NormGrad's hooks never fired. Hooks see only layers that are called"):
        fit(module, [NormGradCallback()], tmp_path)


def test_an_event_waits_for_a_batch_that_is_not_skipped(tmp_path):
    module = lit()
    step = module.training_step
    module.training_step = lambda batch, batch_idx: None if batch_idx < 2 else step(batch, batch_idx)
    callback = NormGradCallback(views="panels", on_error="raise")
    trainer = fit(module, [callback], tmp_path)
    assert callback.maps
    assert len(panels(trainer)) == 3


class Skips(pytorch_lightning.LightningModule):
    """Runs its network on each batch, and trains on those from number `first` on.

    Args:
        first: the first batch that is not skipped.
        how: in which way it trains.
    """

    def __init__(self, first, how):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.first, self.how = ResNet(), first, how
        self.automatic_optimization = how == "automatic"

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if batch_idx < self.first or self.how == "automatic":
            return None if batch_idx < self.first else loss
        self.optimizers().zero_grad()
        loss.backward() if self.how == "its own backward" else self.manual_backward(loss)
        self.optimizers().step()
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


OF_ALL_LAYERS = [
    "normgrad/5_overview/0_order0",
    *(f"normgrad/{view}/{of}" for view in ("1_patches", "4_atlas") for of in ("0_combined", "02_net.stage3")),
]
"""The pictures of an event beside the panels."""
WAYS = ["automatic", "manual", "its own backward"]


@pytest.mark.parametrize("how", WAYS)
def test_nothing_is_said_of_batches_that_are_skipped_before_the_first_maps(tmp_path, how):
    callback = NormGradCallback(every_n_steps=1, views=ALL_VIEWS, probe=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(Skips(2, how), [callback], tmp_path)
    assert [str(w.message) for w in caught if "NormGrad" in str(w.message)] == []
    assert list(callback.maps) == ["net.stage1", "net.stage2", "net.stage3"]
    assert {len(steps) for steps in panels(trainer).values()} == {4}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(
    ("layers", "told"),
    [("auto", "no layer that gives features on a grid gets a gradient"), ("net.stage2", "it saw no backward pass")],
)
def test_a_run_that_skips_all_batches_ends_with_one_warning(tmp_path, how, layers, told):
    callback = NormGradCallback(layers=layers, every_n_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Skips(6, how), [callback], tmp_path)
    (warned,) = [str(w.message) for w in caught if "NormGrad" in str(w.message)]
    assert told in warned
    assert not callback.maps


class Mlp(pytorch_lightning.LightningModule):
    """A network of linear layers, with or without layers before it that have no weights."""

    def __init__(self, *before):
        super().__init__()
        self.net = nn.Sequential(*before, nn.Flatten(), nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 5))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


NO_IMAGE, NO_GRID = "no module was given an image", "no layer gives features on a grid over the image"


@pytest.mark.parametrize("by", ["the environment", "the script"])
@pytest.mark.parametrize(
    ("module", "shape", "told"),
    [
        (Mlp, (3, 16, 24), NO_GRID),
        (lambda: Mlp(nn.Identity(), nn.ZeroPad2d(1)), (3, 16, 24), NO_GRID),
        (Mlp, (12,), NO_IMAGE),
        (Tabular, (4,), NO_IMAGE),
        (BoringModel, (32,), NO_IMAGE),
    ],
    ids=["MLP on images", "MLP behind layers without weights", "MLP on vectors", "one linear layer", "BoringModel"],
)
def test_a_model_without_a_grid_gets_one_true_sentence(tmp_path, monkeypatch, caplog, by, module, shape, told):
    if by == "the environment":
        monkeypatch.setenv("NORMGRAD", "1")
    monkeypatch.setattr(logging.getLogger("pytorch_lightning"), "propagate", True)
    inputs = torch.randn(4, *shape)
    loader = DataLoader(inputs if module is BoringModel else TensorDataset(inputs), batch_size=2)
    made = module()
    made.val_dataloader = made.test_dataloader = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(made, [NormGradCallback(every_n_steps=1)] if by == "the script" else [], tmp_path, loader=loader)
    (warned,) = [str(w.message) for w in caught if "NormGrad" in str(w.message)]
    assert told in warned
    assert "frozen" not in warned
    assert not [message for message in caplog.messages if "NormGrad" in message]


class OwnLogger(Logger):
    """A logger that we do not know."""

    name = version = "mine"

    def log_metrics(self, metrics, step=None): ...

    def log_hyperparams(self, params): ...


def told_in_order(caught, caplog):
    return [str(w.message) for w in caught if "NormGrad" in str(w.message)], [
        message for message in caplog.messages if "NormGrad reads" in message
    ]


def test_where_panels_go_is_told_with_the_first_one(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("pytorch_lightning"), "propagate", True)
    vectors = DataLoader(TensorDataset(torch.randn(4, 4)), batch_size=2)
    with pytest.warns(UserWarning, match="NormGrad") as caught:
        fit(Tabular(), [NormGradCallback()], tmp_path / "a", loader=vectors, logger=OwnLogger())
    (warned,), said = told_in_order(caught, caplog)
    assert NO_IMAGE in warned
    assert not said
    with pytest.warns(UserWarning, match="NormGrad") as caught:
        fit(lit(), [NormGradCallback(every_n_steps=1)], tmp_path / "b", logger=OwnLogger())
    folder = tmp_path / "b" / "normgrad"
    (warned,), (said,) = told_in_order(caught, caplog)
    assert warned == f"NormGrad cannot log images to OwnLogger. It writes files to {folder}."
    assert said.endswith(f"Pictures go to {folder}.")


def test_a_place_where_no_panel_could_be_written_is_not_told(tmp_path, caplog, monkeypatch):
    """The disk is full at first."""
    monkeypatch.setattr(logging.getLogger("pytorch_lightning"), "propagate", True)
    room = iter([10 * 2**20, 2**30, 2**30, 2**30])
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=2**30, free=next(room)))
    said = []

    class Looks(pytorch_lightning.Callback):
        def on_train_batch_end(self, *_):
            said.append([message for message in caplog.messages if "Pictures go to" in message])

    with pytest.warns(UserWarning, match="NormGrad failed while writing"):
        fit(lit(), [NormGradCallback(every_n_steps=2), Looks()], tmp_path)
    assert [len(messages) for messages in said] == [0, 0, 0, 1, 1, 1]  # one step after the second event


def test_whoever_only_sets_the_switch_hears_nothing_of_attributes(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("pytorch_lightning"), "propagate", True)
    monkeypatch.setenv("NORMGRAD", "1")
    fit(lit(), [], tmp_path, fast_dev_run=True)
    (said,) = [message for message in caplog.messages if "NormGrad" in message]
    assert said.startswith("NormGrad reads net.stage1, net.stage2, net.stage3 (auto)")
    assert "no logger" in said
    assert "callback" not in said


def test_warnings_as_errors_do_not_stop_training(tmp_path):
    module = lit()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "NormGrad.*")
        trainer = fit(module, [NormGradCallback(layers="net.fc")], tmp_path)
    assert trainer.global_step == 6


def test_maps_without_an_image_are_drawn_on_grey(tmp_path):
    """Patches are cut before the network: no tensor in it is an image."""

    class Patches(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Linear(12, 8), nn.Linear(8, 5)

        def training_step(self, batch, batch_idx):
            tokens = F.unfold(batch[0], 2, stride=2).transpose(1, 2)
            return F.cross_entropy(self.head(self.embed(tokens).relu().mean(1)), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    callback = NormGradCallback(layers="embed", token_grid=(8, 12), views=ALL_VIEWS, probe=False, on_error="raise")
    trainer = fit(Patches(), [callback], tmp_path)
    assert callback.maps["embed"].shape == (4, 8, 12)
    assert callback.inputs is None
    assert list(panels(trainer)) == ["normgrad_order0/00_embed"]


@pytest.mark.parametrize(
    ("layers", "told"),
    [("net.stage1", "the map of 'net.stage1' is zero everywhere"), ("auto", "the maps of all layers are zero")],
)
def test_maps_of_zeros_are_told_once(tmp_path, layers, told):
    module = lit()
    nn.init.zeros_(module.net.fc.weight)
    with pytest.warns(UserWarning, match=told) as caught:
        fit(module, [NormGradCallback(layers=layers)], tmp_path)
    assert sum("zero everywhere" in str(w.message) for w in caught) == 1


def test_an_epoch_that_is_broken_off_leaves_no_hooks(tmp_path):
    module, hooks = lit(), []
    module.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 2 else None
    module.on_train_epoch_end = lambda: hooks.append(_hooks(module))
    callback = NormGradCallback(every_n_steps=1, on_error="raise")
    fit(module, [callback], tmp_path, max_epochs=2)
    assert hooks == [0, 0]
    assert callback.maps


def test_a_network_that_is_exchanged_in_mid_run_is_read_as_it_is_now(tmp_path):
    module, shown = lit(), []

    def exchange():
        if module.current_epoch == 1:
            module.net.stage3 = nn.Sequential(module.net.stage3, nn.Conv2d(24, 24, 3, 2, 1), nn.ReLU())

    module.on_train_epoch_start = exchange
    module.on_train_epoch_end = lambda: shown.append(list(callback.maps))
    callback = NormGradCallback(every_n_steps=1, on_error="raise")
    fit(module, [callback], tmp_path, max_epochs=2)
    first = ["net.stage1", "net.stage2", "net.stage3"]
    assert shown == [first, ["net.stage1", "net.stage2", "net.stage3.0", "net.stage3.2"]]


def test_a_network_that_is_compiled_when_training_starts_is_rehearsed_from_the_first_step(tmp_path):
    torch._dynamo.reset()
    module = lit()

    def compile_it():
        module.net = torch.compile(module.net, backend="aot_eager", fullgraph=True)

    module.on_train_start = compile_it
    torch._dynamo.utils.counters.clear()
    callback = NormGradCallback(every_n_steps=100, on_error="raise")
    fit(module, [callback], tmp_path)
    assert list(callback.maps) == ["net.stage1", "net.stage2", "net.stage3"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_network_that_is_compiled_after_the_first_event_is_rehearsed_from_then_on(tmp_path):
    torch._dynamo.reset()
    module = lit()

    def compile_it():
        if module.current_epoch == 1:
            module.net.compile(backend="aot_eager", fullgraph=True)

    module.on_train_epoch_start = compile_it
    torch._dynamo.utils.counters.clear()
    callback = NormGradCallback(every_n_steps=1, on_error="raise")
    fit(module, [callback], tmp_path, max_epochs=2)
    assert list(callback.maps) == ["net.stage1", "net.stage2", "net.stage3"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Prickly(nn.Module):
    """A module that does not take every question well."""

    def __getattr__(self, name):
        return self.__dict__["_modules"][name]


def test_a_module_that_raises_when_asked_does_not_stop_training(tmp_path):
    module = lit()
    module.net.pool = nn.Sequential(module.net.pool, Prickly())
    module.net.pool[1].forward = lambda x: x
    callback = NormGradCallback(on_error="raise")
    fit(module, [callback], tmp_path)
    assert callback.maps
