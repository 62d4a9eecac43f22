"""A run from its set-up to its end: flags that change on the way, a second fit, what is left when something fails."""

import logging

import pytest
import pytorch_lightning as pl
import torch
from twice import LAYERS, Lit, assert_close, assert_same, hooks_on, loader, order0, panels, train, watching

from normgrad_lightning import NormGradCallback
from normgrad_lightning.views import run_views
from normgrad_lightning.views.curves import Drift
from normgrad_lightning.views.film import Film

PLAIN = {"order1_every_n_steps": None, "every_n_steps": 1}


class Sets(pl.Callback):
    """Sets flags of another callback at the start of a step, as a user might."""

    def __init__(self, callback, at, **flags):
        self.callback, self.at, self.flags = callback, at, flags

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.at:
            for name, value in self.flags.items():
                setattr(self.callback, name, value)


@pytest.mark.parametrize(
    ("flags", "group"),
    [({"grad_cam": True}, "normgrad_grad_cam"), ({"target": "input"}, "normgrad_order0_input")],
)
def test_other_maps_may_be_asked_for_in_the_middle_of_a_run(tmp_path, flags, group):
    plain = train(Lit, tmp_path / "plain")
    callback = watching(**PLAIN)
    watched = train(Lit, tmp_path / "watched", callback, callbacks=lambda: [Sets(callback, 3, **flags)])
    assert_same(plain, watched)
    assert not watched.warned
    shown = {tag.partition("/")[0]: steps for tag, steps in panels(watched.trainer).items()}
    assert shown[group] == [3, 4, 5]
    assert shown["normgrad_order0"][:3] == [0, 1, 2]
    from_the_start = train(Lit, tmp_path / "start", watching(**PLAIN, **flags))
    assert_close(callback.maps, from_the_start.callback.maps, 1e-6)


def test_other_layers_too(tmp_path):
    callback = watching(**PLAIN, layers=LAYERS[:1])
    watched = train(Lit, tmp_path, callback, callbacks=lambda: [Sets(callback, 3, layers=LAYERS[1:])])
    assert [list(maps) for maps in watched.history.maps.values()] == [LAYERS[:1]] * 3 + [LAYERS[1:]] * 3
    wanted = train(Lit, tmp_path / "plain").moments[5]
    assert_close(callback.maps, order0(wanted, Lit, LAYERS[1:]), 1e-5)


def fit(callback, folder, module=Lit, **options):
    trainer = pl.Trainer(
        **{
            "max_epochs": 1,
            "accelerator": "cpu",
            "default_root_dir": folder,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [callback],
            **options,
        }
    )
    trainer.fit(module(), loader())
    return trainer


def test_a_second_fit_begins_anew_and_says_where_its_pictures_go(tmp_path, caplog):
    callback = NormGradCallback(every_n_steps=3, num_images=1, layers="net.stage1", on_error="raise")
    with caplog.at_level(logging.INFO, "pytorch_lightning"):
        folders = [fit(callback, tmp_path).logger.log_dir for _ in range(2)]
    said = [record.message for record in caplog.records if "NormGrad reads" in record.message]
    assert [folder in sentence for folder, sentence in zip(folders, said, strict=True)] == [True, True]
    first = callback.maps["net.stage1"]
    callback.layers = "net.stage2"
    fit(callback, tmp_path, limit_train_batches=0)
    assert not callback.maps
    assert callback.inputs is None
    assert first.any()


def test_a_film_alone_is_announced_with_the_first_event(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "pytorch_lightning"):
        fit(NormGradCallback(views="film", probe="train", num_images=2, on_error="raise"), tmp_path)
    said = [record.message for record in caplog.records if "NormGrad" in record.message]
    assert "NormGrad reads" in said[0]
    assert "film" in said[-2]


@pytest.mark.parametrize("views", [None, "panels", ["curves"]])
def test_the_last_line_says_where_to_look(tmp_path, caplog, views):
    with caplog.at_level(logging.INFO, "pytorch_lightning"):
        folder = fit(NormGradCallback(views=views, num_images=1, on_error="raise"), tmp_path).logger.log_dir
    (*_, last) = [record.message for record in caplog.records if "NormGrad" in record.message]
    assert f"`tensorboard --logdir {folder}`" in last
    assert last.startswith(f"NormGrad: {'open' if views is None else 'pictures are in'} ")


class Breaks(Lit):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and len(batch[0]) == 4:  # not in the probe's pass
            raise KeyError("the user's own")
        return super().training_step(batch, batch_idx)


def test_an_error_of_ours_does_not_take_the_place_of_the_users(tmp_path, monkeypatch):
    def fail(self, style):
        raise ValueError("no film")

    monkeypatch.setattr(Film, "last_page", fail)
    callback = NormGradCallback(every_n_steps=1, num_images=2, probe="train", on_error="raise")
    with pytest.raises(KeyError, match="the user's own"), pytest.warns(UserWarning, match="no film"):
        fit(callback, tmp_path, Breaks)
    assert callback._session is None


def test_what_fails_in_collecting_does_not_take_the_maps_away(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("not today")

    monkeypatch.setattr(run_views, "pooled_batch", fail)
    run = train(Lit, tmp_path, watching(**PLAIN, on_error="warn"))
    assert list(run.history.maps) == [0, 1, 2, 3, 4, 5]
    assert panels(run.trainer)[f"normgrad_order0/00_{LAYERS[0]}"] == [0, 1, 2, 3, 4, 5]
    assert ["not today" in str(warned) for warned in run.warned] == [True]


def test_a_drift_that_fails_does_not_take_the_page_away(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("not today")

    monkeypatch.setattr(Drift, "page", fail)
    run = train(Lit, tmp_path, watching(**PLAIN, on_error="warn"))
    assert panels(run.trainer)[f"normgrad_order0/00_{LAYERS[0]}"] == [0, 1, 2, 3, 4, 5]


def test_a_part_of_a_checkpoint_that_cannot_be_read_does_not_stop_the_others(tmp_path):
    first = fit(NormGradCallback(probe="train", num_images=2, on_error="raise"), tmp_path)
    state = first.callbacks[0].state_dict()
    callback = NormGradCallback(probe="train", num_images=2)
    with pytest.warns(UserWarning, match=r"schedule or images of a checkpoint .* KeyError|ValueError"):
        callback.load_state_dict({**state, "random": "nonsense"})
    assert callback._state.schedule.last_event == 5
    torch.testing.assert_close(callback._state.probe_images.batch[0], state["probe"]["batch"][0], rtol=0, atol=0)


def test_a_number_in_the_tags_is_nobody_elses_name(tmp_path):
    quiet = {**PLAIN, "layers": ["net.stage1"]}
    others = [watching(**quiet, name="2"), watching(**quiet, num_images=1)]
    run = train(Lit, tmp_path, watching(**quiet), callbacks=lambda: others)
    tags = [tag for tag in panels(run.trainer) if tag.endswith("00_net.stage1")]
    assert sorted(tags) == [
        "normgrad_2_order0/00_net.stage1",
        "normgrad_3_order0/00_net.stage1",
        "normgrad_order0/00_net.stage1",
    ]


class Inside(pl.LightningModule):
    """Another model, which a run trains on the way."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.LazyLinear(2))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1] % 2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def nested(where, callback):
    """A module that runs another `fit`, with this callback, in its fourth step; and the models of these."""
    inside = []

    def train_another():
        with torch.random.fork_rng():
            module = Inside()
            trainer = pl.Trainer(
                max_epochs=1,
                accelerator="cpu",
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[] if callback is None else [callback],
            )
            with torch.inference_mode(False), torch.enable_grad():
                trainer.fit(module, loader(8))
        inside.append(module)

    class Outer(Lit):
        def training_step(self, batch, batch_idx):
            if where == "training_step" and batch_idx == 3:
                train_another()
            return super().training_step(batch, batch_idx)

        def on_train_batch_start(self, batch, batch_idx):
            if where == "on_train_batch_start" and batch_idx == 3:
                train_another()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if where == "on_train_batch_end" and batch_idx == 3:
                train_another()

    return Outer, inside


@pytest.mark.parametrize("where", ["training_step", "on_train_batch_start", "on_train_batch_end"])
def test_of_two_nested_fits_the_outer_one_is_read(tmp_path, where):
    plain = train(nested(where, None)[0], tmp_path / "plain")
    callback = watching(**PLAIN, layers=LAYERS, on_error="warn")
    outer, inside = nested(where, callback)
    watched = train(outer, tmp_path / "watched", callback)
    assert_same(plain, watched)
    assert ["outer of two nested `fit`s" in told for told in watched.warned] == [True]
    assert list(watched.history.maps) == [0, 1, 2, 3, 4, 5]
    assert panels(watched.trainer)[f"normgrad_order0/00_{LAYERS[0]}"] == [0, 1, 2, 3, 4, 5]
    assert_close(callback.maps, order0(plain.moments[5], Lit, LAYERS), 1e-5)
    modules = [m for one in (watched.module, *inside) for m in one.modules()]
    assert not any(any(hooks_on(m)) for m in modules)
