"""Switched on and off by the environment alone, in scripts that know nothing of it."""

import copy
import inspect
import logging
import pickle
import typing
import warnings

import lightning
import pytest
import pytorch_lightning
import torch
from pytorch_lightning.demos.boring_classes import BoringModel
from run_script import SCRIPTS, run_python, shown
from twice import ALL_VIEWS, Lit, loader, same

from normgrad_lightning import NormGradCallback, environment
from normgrad_lightning.env_activation.entry_point import callbacks
from normgrad_lightning.env_activation.environment_callback import EnvironmentCallback

FLAVOURS = pytest.mark.parametrize("lightning", [pytorch_lightning, lightning.pytorch], ids=lambda m: m.__name__)
ENTRY = ("environment", "env_activation", "env_activation.entry_point")

# A value of each flag that is not its default, in the ways that people write it.
WRITTEN = {
    "enabled": [("0", False), ("False", False), ("off", False), ("yes", True), ("TRUE", True)],
    "layers": [
        ("net.layer3", "net.layer3"),
        ("[n]et.layer3", "[n]et.layer3"),
        ("net.layer*.1", "net.layer*.1"),
        ("net.layer1, net.layer2", ["net.layer1", "net.layer2"]),
        ('["net.layer1", "net.layer2"]', ["net.layer1", "net.layer2"]),
        ("[net.layer1]", ["net.layer1"]),
    ],
    "target": [("weight", "weight")],
    "grad_cam": [("1", True)],
    "check": [("1", True), ("0", False), ("none", None)],
    "name": [("fine", "fine"), ("none", None)],
    "every_n_steps": [("7", 7), (" 7 ", 7)],
    "num_images": [("3", 3)],
    "images": [("hardest", "hardest")],
    "classes": [("cat,dog", ["cat", "dog"]), ("cat", ["cat"]), ("none", None)],
    "probe": [("val", "val"), ("train", "train"), ("none", None), ("0", False)],
    "views": [("patches", ("patches",)), ("overview,atlas", ("overview", "atlas")), ("none", None)],
    "read_every_n_steps": [("25", 25)],
    "budget": [("0.05", 0.05), ("none", None)],
    "order1_every_n_steps": [("500", 500), ("none", None), ("None", None), ("null", None)],
    "order1_maps": [("contrast", ("contrast",)), ("order1,contrast", ("order1", "contrast"))],
    "epsilon": [("5e-3", 5e-3)],
    "per_image": [("no", False)],
    "mean": [("0.5", 0.5), ("0.485,0.456,0.406", [0.485, 0.456, 0.406]), ("[0.1, 0.2, 0.3]", [0.1, 0.2, 0.3])],
    "std": [("0.25", 0.25), ("(0.1, 0.2, 0.3)", [0.1, 0.2, 0.3])],
    "colormap": [("viridis", "viridis")],
    "opacity": [("0", 0.0), ("0.3", 0.3)],
    "scale": [("shared", "shared")],
    "tile_size": [("64", 64)],
    "token_grid": [("14,14", [14, 14]), ("16", [16])],
    "channels_last": [("true", True), ("none", None)],
    "on_error": [("raise", "raise")],
}


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch):
    monkeypatch.delenv("NORMGRAD", raising=False)


def fit(lightning, folder, *own, module=None, **options):
    class Flavoured(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = Lit().net

        def training_step(self, batch, batch_idx):
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(own),
        **options,
    )
    trainer.fit(module or Flavoured(), loader())
    return trainer


def ours(trainer):
    return [callback for callback in trainer.callbacks if isinstance(callback, NormGradCallback)]


# ---------------------------------------------------------------- flags


def flag_kinds():
    kinds = typing.get_type_hints(NormGradCallback.__init__)
    return {name: kind for name, kind in kinds.items() if name != "return"}


def test_every_flag_has_its_case():
    assert set(WRITTEN) == set(inspect.signature(NormGradCallback).parameters)


@pytest.mark.parametrize(
    ("flag", "text", "value"), [(flag, *case) for flag, cases in WRITTEN.items() for case in cases]
)
def test_a_flag_is_read_with_its_own_type(flag, text, value, monkeypatch):
    monkeypatch.setenv("NORMGRAD", "1")
    monkeypatch.setenv(f"NORMGRAD_{flag.upper()}", text)
    if flag == "std" and isinstance(value, list):
        monkeypatch.setenv("NORMGRAD_MEAN", "0,0,0")
    (callback,) = callbacks()
    assert repr(callback._settings.flags()[flag]) == repr(value)  # `callback.check` is what was measured
    others = {name for name in flag_kinds() if name not in (flag, "mean")}
    default = NormGradCallback()
    assert all(getattr(callback, name) == getattr(default, name) for name in others)


@pytest.mark.parametrize("flag", flag_kinds())
def test_every_default_can_be_written(flag):
    default = inspect.signature(NormGradCallback).parameters[flag].default
    text = ",".join(default) if isinstance(default, tuple) else str(default)
    read = environment.parse(text, flag_kinds()[flag])
    assert repr(tuple(read) if isinstance(read, list) else read) == repr(default)


def test_a_variable_that_is_empty_is_not_set(monkeypatch):
    monkeypatch.setenv("NORMGRAD", "1")
    for empty in ("", "  "):
        monkeypatch.setenv("NORMGRAD_LAYERS", empty)
        assert callbacks()[0].layers == "auto"
    monkeypatch.setenv("NORMGRAD", "")
    assert callbacks() == []


# ---------------------------------------------------------------- on


@FLAVOURS
def test_it_adds_the_callback_to_a_trainer(lightning, tmp_path, monkeypatch):
    monkeypatch.setenv("NORMGRAD", "1")
    monkeypatch.setenv("NORMGRAD_EVERY_N_STEPS", "2")
    monkeypatch.setenv("NORMGRAD_VIEWS", "panels")
    trainer = fit(lightning, tmp_path)
    assert [type(callback) for callback in ours(trainer)] == [EnvironmentCallback]
    assert list(ours(trainer)[0].maps) == ["net.stage1", "net.stage2", "net.stage3"]
    assert {tuple(steps) for steps in shown(tmp_path).values()} == {(0, 2, 4, 5)}


@FLAVOURS
def test_a_script_with_a_callback_of_its_own_gets_no_other(lightning, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("NORMGRAD", "1")
    monkeypatch.setenv("NORMGRAD_EVERY_N_STEPS", "1")
    own = NormGradCallback(every_n_steps=3, views="panels")
    with caplog.at_level(logging.INFO):
        trainer = fit(lightning, tmp_path, own)
    assert {tuple(steps) for steps in shown(tmp_path).values()} == {(0, 3, 5)}
    (ambient,) = (callback for callback in ours(trainer) if callback is not own)
    assert not ambient.maps
    assert len(own.maps) == 3
    sentence = "NORMGRAD=1 adds no NormGradCallback because this script has its own. NORMGRAD_EVERY_N_STEPS is ignored."
    assert caplog.messages.count(sentence) == 1


def test_a_list_of_callbacks_that_serves_two_trainers(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMGRAD", "1")
    monkeypatch.setenv("NORMGRAD_VIEWS", "panels")
    mine = [pytorch_lightning.Callback()]
    options = {"callbacks": mine, "max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False}
    for name in "ab":
        trainer = pytorch_lightning.Trainer(default_root_dir=tmp_path / name, **options)
        trainer.fit(Lit(), loader())
        assert {tuple(steps) for steps in shown(tmp_path / name).values()} == {(0, 5)}
    assert len(ours(trainer)) == 2  # Lightning adds to the list that it is given


def test_a_callback_of_configure_callbacks_is_the_scripts_own(tmp_path, monkeypatch):
    class Configured(Lit):
        def configure_callbacks(self):
            return [NormGradCallback(layers="net.stage2", views="panels")]

    monkeypatch.setenv("NORMGRAD", "1")
    fit(pytorch_lightning, tmp_path, module=Configured())
    assert list(shown(tmp_path)) == ["normgrad_order0/00_net.stage2"]


def test_checkpoints_are_the_same_and_can_be_resumed_without_it(tmp_path, monkeypatch, recwarn):
    def checkpoint(folder, **options):
        trainer = fit(pytorch_lightning, folder, **options)
        trainer.save_checkpoint(folder / "last.ckpt")
        return torch.load(folder / "last.ckpt", weights_only=True)

    pytorch_lightning.seed_everything(0)
    plain = checkpoint(tmp_path / "plain", enable_checkpointing=False)
    monkeypatch.setenv("NORMGRAD", "1")
    monkeypatch.setenv("NORMGRAD_VIEWS", ",".join(ALL_VIEWS))
    pytorch_lightning.seed_everything(0)
    watched = checkpoint(tmp_path / "watched", enable_checkpointing=False)
    assert shown(tmp_path / "watched")
    assert same(plain, watched)

    monkeypatch.delenv("NORMGRAD")
    monkeypatch.delenv("NORMGRAD_VIEWS")
    trainer = pytorch_lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(Lit(), loader(), ckpt_path=tmp_path / "watched" / "last.ckpt")
    assert not [w for w in recwarn if "callbacks used to create the checkpoint" in str(w.message)]


def test_it_can_be_copied_for_spawned_processes(monkeypatch):
    monkeypatch.setenv("NORMGRAD", "1")
    monkeypatch.setenv("NORMGRAD_LAYERS", "net.stage2")
    (callback,) = callbacks()
    for twin in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert (type(twin), twin.layers) == (EnvironmentCallback, "net.stage2")


# ---------------------------------------------------------------- off


@FLAVOURS
def test_zero_switches_a_callback_off_and_says_so_once(lightning, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("NORMGRAD", "0")
    own = NormGradCallback()
    with caplog.at_level(logging.INFO):
        trainer = fit(lightning, tmp_path, own)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(trainer.lightning_module, loader())
    assert ours(trainer) == [own]
    assert not own.maps
    assert not shown(tmp_path)
    said = [record for record in caplog.records if record.name.endswith(".normgrad")]
    assert [record.getMessage() for record in said] == ["NORMGRAD=0 in the environment switches NormGradCallback off."]
    assert own.enabled  # as the script has set it: for its next run

    monkeypatch.delenv("NORMGRAD")
    trainer.fit_loop.max_epochs = 3
    trainer.fit(trainer.lightning_module, loader())
    assert own.maps


def test_zero_says_nothing_of_a_callback_that_is_off_anyway(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("NORMGRAD", "0")
    with caplog.at_level(logging.INFO):
        fit(pytorch_lightning, tmp_path, NormGradCallback(enabled=False))
    assert not [message for message in caplog.messages if "NormGrad" in message]


@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
def test_off_loads_nothing_but_the_entry_module(package, tmp_path):
    """Whether the switch is not set or says no."""
    script = (
        f"import os, sys; from {package} import Trainer; before = set(sys.modules)\n"
        "Trainer(logger=False, accelerator='cpu'); os.environ['NORMGRAD'] = '0'\n"
        "Trainer(logger=False, accelerator='cpu')\nprint(*sorted(set(sys.modules) - before))"
    )
    loaded = run_python(tmp_path, "-c", script, imported=("torch",)).stdout.splitlines()[-1].split()
    own = {name for name in loaded if name.startswith("normgrad")}
    assert own == {"normgrad_lightning", *(f"normgrad_lightning.{name}" for name in ENTRY)}
    assert not {"cmap", "PIL", "google_crc32c", "difflib"} & set(loaded)


def test_flags_without_the_switch_are_told(monkeypatch):
    monkeypatch.setenv("NORMGRAD_LAYERS", "net.stage2")
    monkeypatch.setenv("NORMGRAD_SCALE", "shared")
    with pytest.warns(UserWarning, match="^NORMGRAD_LAYERS, NORMGRAD_SCALE: ignored because NORMGRAD is not set"):
        assert callbacks() == []


# ---------------------------------------------------------------- errors (their texts are in test_messages.py)


def test_a_layer_that_does_not_exist_is_told_before_the_first_batch(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMGRAD", "1")
    monkeypatch.setenv("NORMGRAD_LAYERS", "net.stage9")
    with pytest.raises(ValueError, match=r"^`layers`: .*'net.stage9' .*NORMGRAD_LAYERS=net.stage9\."):
        fit(pytorch_lightning, tmp_path)


def test_a_bad_switch_is_told_by_a_callback_of_the_script_too(tmp_path, monkeypatch):
    trainer = pytorch_lightning.Trainer(callbacks=[NormGradCallback()], logger=False, accelerator="cpu")
    monkeypatch.setenv("NORMGRAD", "of")
    with pytest.raises(ValueError, match="`NORMGRAD`: expected 1 or 0 in the environment, but got 'of'"):
        trainer.fit(Lit(), loader())


# ---------------------------------------------------------------- a switch without code never ends a run


def test_order_1_that_the_script_cannot_give_is_left_out_with_one_warning(tmp_path):
    """A GAN with manual optimisation has no loss of a batch."""
    plain = run_python(tmp_path / "plain", SCRIPTS / "gan.py")
    flags = {"NORMGRAD_ORDER1_EVERY_N_STEPS": "1", "NORMGRAD_EVERY_N_STEPS": "1", "NORMGRAD_VIEWS": "panels"}
    watched = run_python(tmp_path / "watched", SCRIPTS / "gan.py", NORMGRAD="1", **flags)
    assert watched.stderr.count("NormGrad ignores NORMGRAD_ORDER1_EVERY_N_STEPS; training continues without it.") == 1
    assert "NORMGRAD" not in plain.stderr
    assert {tag.partition("/")[0] for tag in shown(tmp_path / "watched")} == {"normgrad_order0"}
    weights = [
        torch.load(tmp_path / run / "last.ckpt", weights_only=False)["state_dict"] for run in ("plain", "watched")
    ]
    assert same(*weights)


@FLAVOURS
def test_without_a_logger_the_panels_are_files_where_lightning_logs(lightning, tmp_path, monkeypatch, caplog):
    options = {"logger": False, "enable_checkpointing": False}
    plain = fit(lightning, tmp_path / "plain", **options)
    assert not list((tmp_path / "plain").rglob("*.jpg"))
    monkeypatch.setenv("NORMGRAD", "1")
    monkeypatch.setenv("NORMGRAD_VIEWS", ",".join(ALL_VIEWS))
    monkeypatch.setattr(logging.getLogger(lightning.__name__), "propagate", True)
    watched = fit(lightning, tmp_path / "watched", **options)
    folder = tmp_path / "watched" / "lightning_logs" / "version_0" / "normgrad"
    assert [path.name for path in (tmp_path / "watched").iterdir()] == ["lightning_logs"]
    files = {str(path.relative_to(folder)) for path in (tmp_path / "watched").rglob("*.jpg")}
    of_classes = [f"{view}/{of}" for view in ("1_patches", "4_atlas") for of in ("0_combined", "02_net.stage3")]
    of_all = [f"normgrad/{tag}" for tag in ("5_overview/0_order0", "3_probe/0_order0", *of_classes)]
    groups = ("normgrad_order0", "normgrad_probe_order0")
    tags = [*of_all, *(f"{group}/0{i}_net.stage{i + 1}" for group in groups for i in range(3))]
    assert files == {f"{tag}/step_0000000{step}.jpg" for tag in tags for step in (0, 5)}
    assert f"Pictures go to {folder}" in caplog.text
    assert same(plain.lightning_module.state_dict(), watched.lightning_module.state_dict())
    fit(lightning, tmp_path / "watched", **options)
    assert {path.name for path in (tmp_path / "watched" / "lightning_logs").iterdir()} == {"version_0", "version_1"}


@pytest.mark.parametrize("options", [{"logger": False}, {"logger": False, "max_steps": 0}])
def test_a_run_with_nothing_to_draw_leaves_nothing(options, tmp_path, monkeypatch, recwarn):
    monkeypatch.setenv("NORMGRAD", "1")
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pytorch_lightning.Trainer(default_root_dir=tmp_path, max_epochs=1, **quiet, **options)
    trainer.fit(BoringModel())  # of rows of numbers
    assert ours(trainer)
    assert not list(tmp_path.iterdir())


def test_a_trial_run_writes_no_files(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMGRAD", "1")
    trainer = fit(pytorch_lightning, tmp_path, fast_dev_run=True)
    assert list(ours(trainer)[0].maps)
    assert not list(tmp_path.rglob("*.jpg"))


# ---------------------------------------------------------------- whatever is broken, training goes on


def test_a_broken_package_that_the_script_does_not_use(tmp_path):
    """The other Lightning, for example: half of it uninstalled."""
    fake = tmp_path / "fake" / "lightning"
    fake.mkdir(parents=True)
    fake.joinpath("__init__.py").write_text("raise RuntimeError('half of me is gone')")
    flags = {"NORMGRAD": "1", "NORMGRAD_VIEWS": "panels"}
    run_python(tmp_path, SCRIPTS / "autoencoder.py", imported=("torch",), PYTHONPATH=str(fake.parent), **flags)
    assert len(shown(tmp_path)) == 2


def test_a_broken_package_that_we_need_ourselves(tmp_path):
    fake = tmp_path / "fake" / "cmap"
    fake.mkdir(parents=True)
    fake.joinpath("__init__.py").write_text("raise RuntimeError('no colours today')")
    flags = {"NORMGRAD": "1", "PYTHONPATH": str(fake.parent)}
    done = run_python(tmp_path, SCRIPTS / "autoencoder.py", imported=("torch",), **flags)
    assert done.stderr.count("NormGrad cannot be loaded; training continues without it. RuntimeError: no") == 1
    assert tmp_path.joinpath("last.ckpt").exists()


def test_a_stray_variable_where_warnings_are_errors(monkeypatch, caplog):
    monkeypatch.setenv("NORMGRAD_LAYERS", "net.stage2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert callbacks() == []
    assert "NORMGRAD_LAYERS: ignored" in caplog.text


def test_a_trainer_of_the_users_own_is_told_where_lightning_tells(tmp_path, monkeypatch, caplog):
    class MyTrainer(pytorch_lightning.Trainer):
        pass

    monkeypatch.setattr(pytorch_lightning, "Trainer", MyTrainer)
    with caplog.at_level(logging.INFO):
        fit(pytorch_lightning, tmp_path, NormGradCallback())
    assert [r.name for r in caplog.records if "NormGrad reads" in r.getMessage()] == ["pytorch_lightning.normgrad"]


# ---------------------------------------------------------------- scripts that know nothing of it


@pytest.mark.parametrize(
    ("script", "layers"),
    [
        ("classifier", ["features.2", "features.6"]),
        ("autoencoder", ["encoder.3", "decoder.1"]),
        ("gan", None),
    ],
)
def test_a_script_has_maps_and_the_same_weights(script, layers, tmp_path):
    path = SCRIPTS / f"{script}.py"
    assert "normgrad" not in path.read_text().replace("It knows nothing of NormGrad", "")
    flags = {"NORMGRAD": "1", "NORMGRAD_EVERY_N_STEPS": "4", "NORMGRAD_VIEWS": ",".join(ALL_VIEWS)}
    for way, variables in {"plain": {}, "watched": flags}.items():
        run_python(tmp_path / way, path, **variables)
    ends = {way: torch.load(tmp_path / way / "last.ckpt", weights_only=True) for way in ("plain", "watched")}
    for what in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step"):
        assert same(ends["plain"][what], ends["watched"][what]), what
    assert len(ends["plain"]["optimizer_states"][0]["state"]) > 4
    assert list(ends["plain"]["callbacks"]) == list(ends["watched"]["callbacks"])

    assert not shown(tmp_path / "plain")
    panels = shown(tmp_path / "watched")
    if layers is not None:
        assert sorted(panels) == [f"normgrad_order0/{i:02d}_{name}" for i, name in enumerate(layers)]
    assert len(panels) >= 2
    end, steps_of_a_batch = ends["plain"]["global_step"], len(ends["plain"]["optimizer_states"])
    assert all(steps == sorted({*range(0, end, 4), end - steps_of_a_batch}) for steps in panels.values())
