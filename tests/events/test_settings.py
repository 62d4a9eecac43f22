"""Flags: one place for each, checked where they are kept."""

import copy
import inspect
from dataclasses import fields
from typing import get_type_hints
from unittest import mock

import pytest
import pytorch_lightning as pl
from twice import Lit, train, watching

from normgrad_lightning import NormGradCallback
from normgrad_lightning.events.settings import FLAGS, Settings

SIGNATURE = {name: p for name, p in inspect.signature(NormGradCallback.__init__).parameters.items() if name != "self"}


def test_every_flag_is_a_field_of_one_group_with_the_same_default_and_type():
    groups = list(get_type_hints(Settings).values())
    names = [flag.name for group in groups for flag in fields(group)]
    assert sorted(names) == sorted(FLAGS) == sorted(SIGNATURE)
    defaults = {flag.name: flag.default for group in groups for flag in fields(group)}
    assert defaults == {name: p.default for name, p in SIGNATURE.items()}
    types = {name: kind for group in groups for name, kind in get_type_hints(group).items()}
    in_signature = get_type_hints(NormGradCallback.__init__)
    assert {name: types[name] for name in SIGNATURE} == {name: in_signature[name] for name in SIGNATURE}


def test_every_flag_can_be_read_and_is_described():
    callback = NormGradCallback()
    for name, parameter in SIGNATURE.items():
        assert getattr(callback, name) == parameter.default
        assert f"        {name}: " in NormGradCallback.__doc__


def test_a_flag_that_is_set_later_is_checked_too():
    callback = NormGradCallback()
    callback.every_n_steps = 5
    assert callback.every_n_steps == 5
    with pytest.raises(ValueError, match="`every_n_steps`: expected a whole number of at least 1, but got 0"):
        callback.every_n_steps = 0
    assert callback.every_n_steps == 5
    callback.order1_maps = "contrast"
    assert callback.order1_maps == ("contrast",)


def test_flags_are_attributes_like_others():
    callback = NormGradCallback(tile_size=64)
    assert vars(callback)["tile_size"] == 64
    with mock.patch.object(callback, "every_n_steps", 5):
        assert callback._settings.when.every_n_steps == 5
    assert callback.every_n_steps == callback._settings.when.every_n_steps == 100

    class Early(NormGradCallback):
        every_n_steps = 5

        def __init__(self):
            self.num_images = 3
            super().__init__(num_images=2)

    assert (Early().num_images, Early().every_n_steps) == (2, 100)
    twin = copy.deepcopy(callback)
    twin.tile_size = 32
    assert (callback.tile_size, twin.tile_size) == (64, 32)


def test_a_flag_that_is_set_during_training_counts_from_the_next_event_on(tmp_path):
    callback = watching(num_images=2, order1_every_n_steps=None)

    class Changes(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            shown.append(None if callback.inputs is None else len(callback.inputs))
            callback.num_images = 1

    shown = []
    train(Lit, tmp_path, callback, callbacks=lambda: [Changes()])
    assert shown == [None, 1, 1, 1, 1, 1]  # it hears of each batch before the callback that it changes


def test_an_attribute_that_is_no_flag_is_just_an_attribute():
    callback = NormGradCallback()
    callback.note = 1
    assert callback.note == 1
    assert not hasattr(callback, "every_m_steps")
