"""Flags in YAML files, on command lines and in Hydra's configs, as users type them."""

import inspect
import re
from pathlib import Path

import pytest
import yaml
from hydra.utils import instantiate
from jsonargparse import ArgumentParser
from omegaconf import OmegaConf
from run_script import LIGHTNINGS, SCRIPTS, forks, run_python, shown

from normgrad_lightning import NormGradCallback

EXAMPLES = Path(__file__).parents[2] / "examples"
CLI = SCRIPTS / "with_cli.py"
QUIET = ["--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"]
TAGS = ["normgrad_order0/00_features.2", "normgrad_order0/01_features.6"]


def parser():
    made = ArgumentParser(exit_on_error=False)
    made.add_class_arguments(NormGradCallback, "normgrad")
    return made


def parsed(*arguments):
    made = parser()
    return made.instantiate(made.parse_args(list(arguments))).normgrad


# ---------------------------------------------------------------- LightningCLI


def test_in_the_callbacks_of_a_config_file(tmp_path):
    config = {
        "trainer": {
            "max_epochs": 1,
            "callbacks": [
                {
                    "class_path": "normgrad_lightning.NormGradCallback",
                    "init_args": {
                        "layers": ["features.6", "features.2"],
                        "every_n_steps": 3,
                        "views": ["overview", "panels"],
                    },
                }
            ],
        }
    }
    tmp_path.joinpath("config.yaml").write_text(yaml.safe_dump(config))
    run_python(tmp_path, CLI, "fit", "--config=config.yaml", *QUIET)
    assert shown(tmp_path) == {tag: [0, 3, 6, 7] for tag in TAGS}

    (written,) = tmp_path.glob("lightning_logs/version_0/config.yaml")  # and the run's own config goes round
    run_python(tmp_path, CLI, "fit", f"--config={written}", "--trainer.default_root_dir=again")
    assert shown(tmp_path / "again") == {tag: [0, 3, 6, 7] for tag in TAGS}


def test_on_the_command_line(tmp_path):
    flags = ["--trainer.callbacks.layers=features.*", "--trainer.callbacks.every_n_steps=4"]
    flags += ["--trainer.callbacks.views=panels"]
    run_python(tmp_path, CLI, "fit", "--trainer.callbacks+=normgrad_lightning.NormGradCallback", *flags, *QUIET)
    assert set(shown(tmp_path)) > {"normgrad_order0/00_features.0"}
    assert {tuple(steps) for steps in shown(tmp_path).values()} == {(0, 4, 7)}


def test_by_its_short_name_where_the_script_imports_it(tmp_path):
    script = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\nfrom normgrad_lightning import NormGradCallback\n"
    tmp_path.joinpath("train.py").write_text(CLI.read_text().replace("from classifier", f"{script}from classifier", 1))
    flags = ["--trainer.callbacks.layers=[features.2,features.6]", "--trainer.callbacks.order1_every_n_steps=5"]
    flags += ["--trainer.callbacks.order1_maps=contrast", "--trainer.callbacks.views=panels"]
    run_python(tmp_path, "train.py", "fit", "--trainer.callbacks+=NormGradCallback", *flags, *QUIET)
    contrast = [tag.replace("order0", "contrast") for tag in TAGS]
    assert shown(tmp_path) == {tag: [0, 5, 7] for tag in [*TAGS, *contrast]}


EXAMPLE = [EXAMPLES / "03_command_line.py", "fit", f"--config={EXAMPLES / '03_command_line.yaml'}"]
SHORT = ["--data.images=160", "--trainer.limit_val_batches=1", "--trainer.max_epochs=1", "--normgrad.every_n_steps=2"]


def test_as_a_group_of_its_own(tmp_path):
    flags = ["--normgrad.order1_every_n_steps=4", "--normgrad.views=panels"]
    run_python(tmp_path, *EXAMPLE, *SHORT, *flags, "--trainer.enable_progress_bar=false")
    panels = shown(tmp_path / "normgrad_demo")
    stages = [f"{number:02d}_stage{number + 1}" for number in range(3)]
    kinds = {"order0": [0, 2, 4], "order1": [0, 4], "adversarial": [0, 4], "contrast": [0, 4]}
    assert panels == {f"normgrad_{kind}/{stage}": steps for kind, steps in kinds.items() for stage in stages}


@pytest.mark.parametrize(
    ("flags", "variables", "said"),
    [(["--normgrad.enabled=false"], {}, 0), ([], {"NORMGRAD": "0"}, 1)],
    ids=["by its flag", "by the environment"],
)
def test_a_group_switched_off(tmp_path, flags, variables, said):
    done = run_python(tmp_path, *EXAMPLE, *SHORT, *flags, "--trainer.enable_progress_bar=false", **variables)
    assert list(tmp_path.rglob("events*"))
    assert shown(tmp_path) == {}
    assert done.stderr.count("NORMGRAD=0 in the environment switches NormGradCallback off.") == said


def test_print_config_goes_round(tmp_path):
    first = run_python(tmp_path, *EXAMPLE, "--normgrad.target=input", "--print_config").stdout
    tmp_path.joinpath("first.yaml").write_text(first)
    again = run_python(tmp_path, EXAMPLE[0], "fit", "--config=first.yaml", "--print_config").stdout
    assert again == first
    assert yaml.safe_load(first)["normgrad"]["target"] == "input"


def test_a_probe_is_named_or_none():
    assert parsed("--normgrad.probe=val").probe == "val"
    assert parsed("--normgrad.probe=null").probe is None
    assert parsed().probe is None


def test_every_flag_is_typed_and_told_of_in_help():
    text = re.sub(r"\s+", " ", parser().format_help()).partition("--normgrad CONFIG Path")[2]
    described = re.findall(
        r"--normgrad\.(\w+) (?:\{[\w,]+\}|\S+)(?:, --\S+ \S+)? ([^-]\S.*?) \(type: (.*?), default", text
    )
    kinds = {name: kind for name, words, kind in described if len(words) > 10}
    assert list(kinds) == list(inspect.signature(NormGradCallback.__init__).parameters)[1:]
    choices = {"target", "images", "probe", "scale", "on_error", "order1_maps", "views"}
    assert {name for name, kind in kinds.items() if "Literal" in kind} == choices
    assert "Any" not in "".join(kinds.values())


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("every_n_steps=0", "`every_n_steps`: expected a whole number of at least 1, but got 0."),
        ("colormap=infernoo", "Did you mean 'inferno'?"),
        ("mean=[0.1,0.2]", "`std`: expected as many numbers as `mean` has, 2, but got 3."),
    ],
)
def test_a_value_of_the_right_type_that_is_wrong(argument, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parsed("--normgrad.std=[0.1,0.2,0.3]", f"--normgrad.{argument}")


@pytest.mark.parametrize(
    "argument", ["every_n_steps=x", "target=out", "probe=test", "order1_maps=foo", "mean=[0.5,a]", "enabled=2"]
)
def test_a_value_of_the_wrong_type_ends_the_command_with_a_sentence(argument, tmp_path):
    flag, _, value = argument.partition("=")
    with pytest.raises(Exception, match=re.escape(flag)) as raised:
        parsed(f"--normgrad.{argument}")
    assert value.strip("[]").split(",")[-1] in str(raised.value)


def test_a_wrong_value_ends_a_run_before_training(tmp_path):
    result = forks(LIGHTNINGS).run(tmp_path, *EXAMPLE, "--normgrad.layers=[stage9]")
    assert result.returncode == 1
    assert "ValueError: `layers`: expected names or globs of the model's layers, but 'stage9' matches" in result.stderr
    assert "Epoch" not in result.stdout + result.stderr


# ---------------------------------------------------------------- Hydra


def test_hydra(tmp_path):
    config = """
    trainer:
      _target_: lightning.Trainer
      max_epochs: 1
      accelerator: cpu
      enable_progress_bar: false
    callbacks:
      normgrad:
        _target_: normgrad_lightning.NormGradCallback
        layers: [features.2, features.6]
        every_n_steps: 1
        mean: [0.5]
        views: [panels]
    """
    tmp_path.joinpath("config.yaml").write_text(config)
    run_python(tmp_path, SCRIPTS / "with_hydra.py", f"--config-dir={tmp_path}", "callbacks.normgrad.every_n_steps=4")
    assert shown(tmp_path) == {tag: [0, 4, 7] for tag in TAGS}


WRITTEN = {
    "layers": ["net.stage1", "net.stage2"],
    "order1_every_n_steps": 5,
    "order1_maps": ["contrast"],
    "probe": "val",
    "mean": [0.1, 0.2, 0.3],
    "std": [0.4, 0.5, 0.6],
    "token_grid": [7, 7],
    "channels_last": None,
    "opacity": 1,
}


@pytest.mark.parametrize("convert", ["none", "partial", "object", "all"])
def test_what_omegaconf_gives_is_taken_for_what_it_is(convert):
    config = {"_target_": "normgrad_lightning.NormGradCallback", "_convert_": convert, **WRITTEN}
    callback = instantiate(OmegaConf.create(config))
    in_code = NormGradCallback(**WRITTEN)
    for flag in WRITTEN:
        assert repr(getattr(callback, flag)) == repr(getattr(in_code, flag))
    assert callback.state_key == in_code.state_key


def test_what_omegaconf_gives_is_checked(tmp_path):
    config = OmegaConf.create({"_target_": "normgrad_lightning.NormGradCallback", "order1_maps": ["foo"]})
    with pytest.raises(Exception, match="`order1_maps`: expected some of 'order1', 'adversarial', 'contrast'"):
        instantiate(config)


def test_lists_and_tuples_make_the_same_callback():
    lists, tuples = (
        {name: kind(v) if isinstance(v, list) else v for name, v in WRITTEN.items()} for kind in (list, tuple)
    )
    assert NormGradCallback(**lists).state_key == NormGradCallback(**tuples).state_key
