"""What version 0.2.0 left behind still works: checkpoints, and configs that name the callback."""

import random

import pytest
import pytorch_lightning as pl
import torch
from jsonargparse import ArgumentParser
from twice import Lit, loader

from normgrad_lightning import NormGradCallback

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


def trained(folder, callback, **fit):
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Lit(), loader(), **fit)
    return trainer


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_checkpoint_goes_on_with_its_schedule_and_its_random_images(tmp_path, key):
    """Its state is found also by a key that is no longer written."""
    trainer = trained(tmp_path, pl.Callback())
    trainer.save_checkpoint(tmp_path / "new.ckpt")
    contents = torch.load(tmp_path / "new.ckpt", weights_only=True)
    state, generator = state_of_0_2_0()
    contents["callbacks"] = {key: state}
    torch.save(contents, tmp_path / "old.ckpt")
    callback = NormGradCallback(**FLAGS)
    trained(tmp_path, callback, ckpt_path=tmp_path / "old.ckpt")  # all its epochs are over
    assert callback.state_dict()["last_event"] == 2
    assert callback.state_dict()["random"] == [3, list(generator.getstate()[1]), None]


def test_the_key_names_the_flags_that_are_not_the_default_and_the_state_has_what_it_had():
    assert NormGradCallback().state_key == "NormGradCallback{}"
    named = "{'layers': ['net.stage1', 'net.stage3'], 'every_n_steps': 2, 'num_images': 3, 'images': 'random'}"
    assert NormGradCallback(**FLAGS).state_key == f"NormGradCallback{named}"
    older = {"last_event", "last_order1", "random", "times_shown"}
    newer = {"last_reading", "first_patches", "first_lifts", "typical_maps", "budget", "check", "tab"}
    assert set(NormGradCallback().state_dict()) == older | newer
    older.add("last_reading")
    NormGradCallback().load_state_dict({name: NormGradCallback().state_dict()[name] for name in older})


def test_configs_that_name_the_class_by_its_module_load():
    parser = ArgumentParser()
    parser.add_subclass_arguments(pl.Callback, "callback")
    for path in ("normgrad_lightning.NormGradCallback", "normgrad_lightning.callback.NormGradCallback"):
        config = {"callback": {"class_path": path, "init_args": {"every_n_steps": 7}}}
        made = parser.instantiate(parser.parse_object(config)).callback
        assert type(made) is NormGradCallback
        assert made.every_n_steps == 7
