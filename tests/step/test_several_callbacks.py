"""Several callbacks in one run: tags and states of their own."""

import pytest
import pytorch_lightning as pl
from twice import Lit, loader, panels, train, watching

from normgrad_lightning import NormGradCallback
from normgrad_lightning.maps import ORDER1_KINDS

QUIET = {"order1_every_n_steps": None, "layers": ["net.stage1"]}
TAG = "normgrad_order0/00_net.stage1"


def test_each_has_tags_of_its_own(tmp_path):
    others = [
        watching(**QUIET, num_images=1),
        watching(**QUIET, name="fine"),
        watching(**QUIET, name="fine", every_n_steps=2),
    ]
    run = train(Lit, tmp_path, watching(**QUIET), callbacks=lambda: others)
    shown = panels(run.trainer)
    tags = [tag for tag in shown if tag.endswith("00_net.stage1")]
    assert sorted(tags) == [
        "normgrad_2_order0/00_net.stage1",
        "normgrad_fine_2_order0/00_net.stage1",
        "normgrad_fine_order0/00_net.stage1",
        TAG,
    ]
    assert shown["normgrad_fine_2_order0/00_net.stage1"] == [0, 2, 4, 5]
    assert all(len(set(steps)) == len(steps) for steps in shown.values())


def test_a_name_is_in_all_tags(tmp_path):
    run = train(Lit, tmp_path, watching(name="late", layers=["net.stage3"]))
    groups = {tag.partition("/")[0] for tag in panels(run.trainer)}
    assert groups >= {f"normgrad_late_{kind}" for kind in ("order0", *ORDER1_KINDS)}
    assert all(group.startswith("normgrad_late") for group in groups)


@pytest.mark.parametrize(
    "flags",
    [{"every_n_steps": 7}, {"num_images": 3}, {"scale": "shared"}, {"name": "b"}, {"mean": [0.5], "std": [1.0]}],
)
def test_callbacks_that_differ_in_anything_are_not_refused(flags):
    first, second = NormGradCallback(), NormGradCallback(**flags)
    assert first.state_key != second.state_key
    pl.Trainer(logger=False, callbacks=[first, second])


def trainer(folder, *callbacks, **options):
    return pl.Trainer(
        **{
            "max_epochs": 1,
            "accelerator": "cpu",
            "default_root_dir": folder,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": list(callbacks),
            **options,
        }
    )


def test_a_resumed_run_with_other_flags_goes_on_with_its_schedule(tmp_path):
    first = trainer(tmp_path, NormGradCallback(every_n_steps=4, on_error="raise"))
    first.fit(Lit(), loader())
    first.save_checkpoint(tmp_path / "some.ckpt")
    callback = NormGradCallback(every_n_steps=5, num_images=1, on_error="raise")
    second = trainer(tmp_path, callback, max_epochs=2)
    second.fit(Lit(), loader(), ckpt_path=tmp_path / "some.ckpt", weights_only=True)
    assert callback.latest["order0"].step == 11
    assert callback._state.schedule.last_event == 11
    alone = NormGradCallback(every_n_steps=100, on_error="raise")
    seen = []

    class Notes(pl.Callback):
        def on_train_batch_end(self, *_):
            seen.append(alone._state.schedule.last_event)

    third = trainer(tmp_path, alone, Notes(), max_epochs=2)
    third.fit(Lit(), loader(), ckpt_path=tmp_path / "some.ckpt", weights_only=True)
    assert seen == [5, 5, 5, 5, 5, 11]


def test_a_state_is_not_given_to_one_of_several(tmp_path):
    first = trainer(tmp_path, NormGradCallback(every_n_steps=4))
    first.fit(Lit(), loader())
    first.save_checkpoint(tmp_path / "some.ckpt")
    ours = [NormGradCallback(every_n_steps=5), NormGradCallback(every_n_steps=6)]
    second = trainer(tmp_path, *ours, max_epochs=2, limit_train_batches=0)
    second.fit(Lit(), loader(), ckpt_path=tmp_path / "some.ckpt", weights_only=True)
    assert [callback._state.schedule.last_event for callback in ours] == [None, None]


@pytest.mark.parametrize("name", ["", "a/b", "two words", 3, "ü/"])
def test_what_is_no_name_is_an_error(name):
    with pytest.raises(ValueError, match=r"`name`: expected letters, digits, dots, hyphens and underscores, or None"):
        NormGradCallback(name=name)
