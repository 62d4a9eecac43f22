"""What version 0.2.0 left behind still works: checkpoints, configs and variables; or an error says what to write."""

import random
from importlib.metadata import EntryPoint
from typing import get_type_hints

import pytest
import pytorch_lightning as pl
import torch
from hydra.utils import instantiate
from jsonargparse import ArgumentParser
from pytorch_lightning.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from twice import Lit, loader

from normgrad_lightning import NormGradCallback
from normgrad_lightning.env_activation.entry_point import callbacks
from normgrad_lightning.environment import REMOVED
from normgrad_lightning.environment import flags as flags_of_the_environment

FLAGS = {"layers": ("net.stage1", "net.stage3"), "images": "random", "every_n_steps": 2, "num_images": 3}
KEYS = {
    "flags that are gone": "NormGradCallback{'layers': ['net.stage1'], 'patch_layers': ('last',)}",
    "the same flags": "NormGradCallback{'layers': ['net.stage1', 'net.stage3'], 'every_n_steps': 2, 'num_images': 3, "
    "'images': 'random'}",
}
"""As 0.2.0 wrote them into checkpoints."""


def state_of_0_2_0():
    """Its schedule, and its random generator after two draws."""
    generator = random.Random(0)
    generator.sample(range(4), 3)
    generator.sample(range(4), 3)
    version, numbers, gauss = generator.getstate()
    drawn = {"random": [version, list(numbers), gauss], "times_shown": {}}
    compared = {"first_sameness": {}, "first_hot_spots": {}}
    return {"last_event": 2, "last_order1": None, "last_reading": 2, **drawn, **compared}, generator


def trained(folder, callback, module=Lit, data=loader, epochs=2, logger=False, **fit):
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[callback],
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module(), data(), **fit)
    return trainer


def left_behind(folder, key, state, **trained_with):
    """A checkpoint of the first epochs, with what 0.2.0 kept in it."""
    trained(folder, pl.Callback(), **trained_with).save_checkpoint(folder / "new.ckpt")
    contents = torch.load(folder / "new.ckpt", weights_only=True)
    contents["callbacks"] = {key: state}
    torch.save(contents, folder / "old.ckpt")
    return folder / "old.ckpt"


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_checkpoint_goes_on_with_its_schedule_and_its_random_images(tmp_path, key):
    """Its state is found also by a key that is no longer written."""
    state, generator = state_of_0_2_0()
    callback = NormGradCallback(**FLAGS)
    trained(tmp_path, callback, ckpt_path=left_behind(tmp_path, key, state))  # all its epochs are over
    assert callback.state_dict()["last_event"] == 2
    assert callback.state_dict()["random"] == [3, list(generator.getstate()[1]), None]


class Tiny(pl.LightningModule):
    """One layer, on images of one colour each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


COLOURS = torch.tensor([0, 0.25, 0.5, 0.75]).reshape(4, 1, 1, 1).expand(4, 1, 4, 4)


def four_images():
    return DataLoader(TensorDataset(COLOURS, torch.arange(4) % 2), batch_size=2)


def frame_of_0_2_0(step):
    return {"step": step, "maps": {"net.0": torch.full((2, 4, 4), 0.5 + step / 4, dtype=torch.float16)}}


KEY_OF_A_PROBE = (
    "NormGradCallback{'layers': 'net.0', 'every_n_steps': 1, 'order1_every_n_steps': 2, 'num_images': 2, "
    "'second_order': False, 'views': ('film', 'overview'), 'patch_layers': ('last',)}"
)
STATE_OF_A_PROBE = {
    "last_event": 1,
    "last_order1": 1,
    "last_reading": 1,
    "random": state_of_0_2_0()[0]["random"],
    "times_shown": {0: 2, 1: 2},
    "probe": {"of": "train", "batch": [COLOURS[:2].clone(), torch.tensor([0, 1])], "labels": [0, 1]},
    "film": {
        "frames": [frame_of_0_2_0(0), frame_of_0_2_0(1)],
        "is_extra": False,
        "images": COLOURS[:2].flatten(1),
        "count": 2,
        "stride": 1,
    },
    "first_sameness": {},
    "first_hot_spots": {},
}
"""Of two steps on `four_images`, as 0.2.0 wrote it, but for the values of its maps."""


def test_a_checkpoint_goes_on_with_its_probe_its_film_and_its_order_1(tmp_path):
    flags = {"layers": "net.0", "every_n_steps": 1, "order1_every_n_steps": 2, "num_images": 2, "on_error": "raise"}
    callback = NormGradCallback(**flags, probe="train", views=["film", "overview"])
    set_up = {"module": Tiny, "data": lambda: DataLoader(TensorDataset(COLOURS.flip(0), torch.arange(4) % 2), 2)}
    path = left_behind(tmp_path, KEY_OF_A_PROBE, STATE_OF_A_PROBE, module=Tiny, data=four_images, epochs=1)
    trained(tmp_path, callback, **set_up, logger=TensorBoardLogger(tmp_path), ckpt_path=path)
    probe = callback.latest["probe_order0"]
    assert torch.equal(probe.images, COLOURS[:2])  # the first batch of the new data has others
    assert probe.labels == [0, 1]
    assert {name: one.step for name, one in callback.latest.items() if "contrast" in name} == {
        "contrast": 3,
        "probe_contrast": 3,
    }
    film = callback.state_dict()["film"]["frames"]
    assert [frame["step"] for frame in film] == [0, 1, 2, 3]
    assert torch.equal(film[1]["maps"]["net.0"], frame_of_0_2_0(1)["maps"]["net.0"])


def test_the_key_names_the_flags_that_are_not_the_default_and_the_state_has_what_it_had():
    assert NormGradCallback().state_key == "NormGradCallback{}"
    named = "{'layers': ['net.stage1', 'net.stage3'], 'every_n_steps': 2, 'num_images': 3, 'images': 'random'}"
    assert NormGradCallback(**FLAGS).state_key == f"NormGradCallback{named}"
    older = {"last_event", "last_order1", "random", "times_shown"}
    newer = {"last_reading", "first_patches", "first_lifts", "typical_maps", "budget", "check", "tab"}
    assert set(NormGradCallback().state_dict()) == older | newer
    older.add("last_reading")
    NormGradCallback().load_state_dict({name: NormGradCallback().state_dict()[name] for name in older})


def test_the_entry_point_loads_that_an_editable_install_of_0_2_0_still_names():
    """Lightning loads it in each Trainer of any script, and an error there would end the script."""
    named = EntryPoint(
        "normgrad", "normgrad_lightning.switch.entry_point:callbacks", "lightning.pytorch.callbacks_factory"
    )
    assert named.load() is callbacks


def test_configs_that_name_the_class_by_its_module_load():
    parser = ArgumentParser()
    parser.add_subclass_arguments(pl.Callback, "callback")
    for path in ("normgrad_lightning.NormGradCallback", "normgrad_lightning.callback.NormGradCallback"):
        config = {"callback": {"class_path": path, "init_args": {"every_n_steps": 7}}}
        made = parser.instantiate(parser.parse_object(config)).callback
        assert type(made) is NormGradCallback
        assert made.every_n_steps == 7


OF_0_2_0 = {
    "enabled": ("1", True),
    "layers": ("net.layer1,net.layer4", ["net.layer1", "net.layer4"]),
    "target": ("output", "output"),
    "grad_cam": ("0", False),
    "name": ("none", None),
    "every_n_steps": ("100", 100),
    "num_images": ("8", 8),
    "images": ("balanced", "balanced"),
    "classes": ("cat,dog", ["cat", "dog"]),
    "probe": ("val", "val"),
    "views": (
        "overview,panels,patches,atlas,curves,film",
        ["overview", "panels", "patches", "atlas", "curves", "film"],
    ),
    "patch_layers": ("combined,last", ["combined", "last"]),
    "read_every_n_steps": ("10", 10),
    "order1_every_n_steps": ("500", 500),
    "order1_maps": ("order1,adversarial,contrast", ["order1", "adversarial", "contrast"]),
    "epsilon": ("0.0005", 0.0005),
    "per_image": ("1", True),
    "second_order": ("1", True),
    "factorised": ("1", True),
    "mean": ("0.5,0.5,0.5", [0.5, 0.5, 0.5]),
    "std": ("0.2,0.2,0.2", [0.2, 0.2, 0.2]),
    "colormap": ("inferno", "inferno"),
    "opacity": ("0.6", 0.6),
    "scale": ("robust", "robust"),
    "tile_size": ("128", 128),
    "token_grid": ("14,14", [14, 14]),
    "channels_last": ("none", None),
    "on_error": ("warn", "warn"),
}
"""All flags of 0.2.0, as variables say them and as configs do."""
KEPT = {name: value for name, (_, value) in OF_0_2_0.items() if name not in REMOVED}


def as_config(flags):
    """What a config file makes of the callback."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(pl.Callback, "callback")
    config = {"class_path": "normgrad_lightning.NormGradCallback", "init_args": flags}
    return parser.instantiate(parser.parse_object({"callback": config})).callback


def as_hydra(flags):
    return instantiate({"_target_": "normgrad_lightning.NormGradCallback", **flags})


def as_variables(flags):
    with pytest.MonkeyPatch.context() as patch:
        for name in flags:
            patch.setenv(f"NORMGRAD_{name.upper()}", OF_0_2_0[name][0])
        return NormGradCallback(**flags_of_the_environment(get_type_hints(NormGradCallback.__init__)))


@pytest.mark.parametrize("made", [as_config, as_hydra, as_variables])
def test_every_flag_of_0_2_0_means_what_it_meant_or_names_itself(made):
    assert set(OF_0_2_0) == set(KEPT) | set(REMOVED)
    assert repr(made(KEPT)._settings) == repr(NormGradCallback(**KEPT)._settings)
    for name in REMOVED:
        with pytest.raises(Exception, match=f"(?i){name}(`: .*leave (it|this) out|' is not accepted)"):
            made({**KEPT, name: OF_0_2_0[name][1]})
