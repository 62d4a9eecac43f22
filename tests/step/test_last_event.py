"""The last step of training is an event if it is known to be the last; no other end has a pass of its own."""

import gc
import weakref

import pytest
import pytorch_lightning as pl
from networks import batch
from pytorch_lightning.callbacks import EarlyStopping
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from twice import LAYERS, Lit, assert_same, panels, pictures, train, watching

from normgrad_lightning import NormGradCallback

RARELY = {"every_n_steps": 100, "order1_every_n_steps": None}


class Stream(IterableDataset):
    def __iter__(self):
        return zip(*batch(24), strict=True)


class Stops(pl.Callback):
    """Ends training after a batch, as users do."""

    def __init__(self, after=3):
        self.after = after

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.after:
            trainer.should_stop = True


class WhenTimeIsUp(pl.Callback):
    """The clock of `max_time` runs out after some steps."""

    def on_train_batch_start(self, trainer, *_):
        (timer,) = [c for c in trainer.callbacks if isinstance(c, pl.callbacks.Timer)]
        if trainer.global_step == 3:
            timer._duration = 0.0


def test_every_foreseeable_end_is_read_in_its_own_step(tmp_path):
    cases = {
        "max_epochs": (6, {}),
        "max_steps": (4, {"max_epochs": -1, "max_steps": 4}),
        "two epochs": (12, {"max_epochs": 2}),
        "limit": (3, {"limit_train_batches": 3}),
    }
    for name, (steps, options) in cases.items():
        plain = train(Lit, tmp_path / name / "plain", **options)
        watched = train(Lit, tmp_path / name, watching(**RARELY), **options)
        assert_same(plain, watched)
        assert list(watched.history.maps) == [0, steps - 1], name
        assert panels(watched.trainer)[f"normgrad_order0/00_{LAYERS[0]}"] == [0, steps - 1]


def test_accumulated_gradients_and_streams(tmp_path):
    accumulated = train(Lit, tmp_path / "a", watching(**RARELY), accumulate_grad_batches=4)
    assert list(accumulated.history.maps) == [0, 1]
    stream = train(Lit, tmp_path / "b", watching(**RARELY), data=lambda: DataLoader(Stream(), batch_size=4))
    assert list(stream.history.maps) == [0, 5]


def test_order_1_has_a_last_event_too(tmp_path):
    watched = train(Lit, tmp_path, watching(order1_every_n_steps=100))
    assert list(watched.history.order1) == [0, 5]


def stops_early():
    return [EarlyStopping("loss", patience=1, stopping_threshold=1e9, check_on_train_epoch_end=True)]


ENDS = pytest.mark.parametrize(
    ("callbacks", "options", "steps"),
    [
        (stops_early, {"max_epochs": 5}, 6),
        (lambda: [Stops()], {"max_epochs": 5}, 3),
        (lambda: [WhenTimeIsUp()], {"max_epochs": 5, "max_time": "00:01:00:00"}, 4),
    ],
    ids=["early stopping", "should_stop", "max_time"],
)


class CountsCalls(Lit):
    """Counts the calls of its `training_step`, where no pass that puts things back can hide one."""

    calls = 0

    def training_step(self, batch, batch_idx):
        type(self).calls += 1
        return super().training_step(batch, batch_idx)


@ENDS
def test_an_end_without_notice_runs_no_step_again_and_shows_what_was_collected(tmp_path, callbacks, options, steps):
    plain = train(Lit, tmp_path / "plain", callbacks=callbacks, **options)
    CountsCalls.calls = 0
    callback = watching(**RARELY, read_every_n_steps=1)
    watched = train(CountsCalls, tmp_path / "watched", callback, callbacks=callbacks, **options)
    assert_same(plain, watched)
    assert watched.trainer.global_step == CountsCalls.calls == steps
    assert list(watched.history.maps) == [0]
    shown = pictures(watched.trainer)
    assert shown[f"normgrad_order0/00_{LAYERS[0]}"] == [0]
    assert shown["normgrad/1_patches/0_combined"] == shown["normgrad/4_atlas/0_combined"] == [0, steps - 1]
    assert watched.callback.patches["combined"]


def test_with_default_flags_an_end_without_notice_runs_no_step_again(tmp_path):
    CountsCalls.calls = 0
    callbacks = {"callbacks": lambda: [Stops(6)], "max_epochs": 3}
    watched = train(CountsCalls, tmp_path, NormGradCallback(on_error="raise"), **callbacks)
    assert watched.trainer.global_step == CountsCalls.calls == 6


def test_what_nobody_collects_has_no_last_page(tmp_path):
    callback = watching(**RARELY, read_every_n_steps=1, views=["overview", "panels"])
    watched = train(Lit, tmp_path, callback, callbacks=lambda: [Stops()])
    assert set(map(tuple, pictures(watched.trainer).values())) == {(0,)}


def test_a_run_that_ends_at_an_event_has_no_other(tmp_path):
    watched = train(Lit, tmp_path, watching(every_n_steps=2, order1_every_n_steps=None), callbacks=lambda: [Stops()])
    assert list(watched.history.maps) == [0, 2]
    assert panels(watched.trainer)[f"normgrad_order0/00_{LAYERS[0]}"] == [0, 2]


def test_manual_optimisation_without_a_loss_goes_without_it(tmp_path):
    class Manual(Lit):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    watched = train(Manual, tmp_path / "a", watching(**RARELY), callbacks=lambda: [Stops()])
    assert list(watched.history.maps) == [0]
    assert watched.warned == []
    foreseen = train(Manual, tmp_path / "b", watching(**RARELY))
    assert list(foreseen.history.maps) == [0, 5]


def test_no_batch_outlives_the_next_one_or_the_fit(tmp_path):
    alive, batches = [], []

    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            gc.collect()
            alive.append(sum(one() is not None for one in batches))
            batches.append(weakref.ref(batch[0]))

        def on_before_backward(self, *_):
            alive.append(sum(one() is not None for one in batches[:-1]))

    data = DataLoader(TensorDataset(*batch(24)), batch_size=4)
    train(Lit, tmp_path, watching(**RARELY), callbacks=lambda: [Looks()], data=lambda: data)
    gc.collect()
    assert max(alive[1::2]) == 0
    assert [one() for one in batches] == [None] * 6


def test_the_loader_is_asked_for_nothing_more(tmp_path):
    drawn = []

    class Counts(TensorDataset):
        def __getitem__(self, i):
            drawn.append(i)
            return super().__getitem__(i)

    counts = []
    for folder, callback in (("plain", None), ("watched", watching(**RARELY))):
        drawn.clear()
        data = DataLoader(Counts(*batch(24)), batch_size=4)
        train(Lit, tmp_path / folder, callback, callbacks=lambda: [Stops()], data=lambda data=data: data)
        counts.append(len(drawn))
    assert counts[0] == counts[1] < 24
