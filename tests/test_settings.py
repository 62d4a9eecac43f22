"""Flags: one place for each, checked where they are kept."""

import copy
import inspect
import re
from dataclasses import fields
from typing import get_type_hints
from unittest import mock

import pytest
import pytorch_lightning as pl
from twice import LAYERS, Lit, assert_close, assert_same, order1, panels, train, watching

from normgrad_lightning import NormGradCallback, environment
from normgrad_lightning.environment import REMOVED
from normgrad_lightning.settings import FLAGS, Settings

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
        if name != "check":  # read, it says what was measured
            assert getattr(callback, name) == parameter.default
        assert f"        {name}: " in NormGradCallback.__doc__


def test_a_flag_that_is_set_later_is_checked_too():
    callback = NormGradCallback()
    callback.every_n_steps = 5
    assert callback.every_n_steps == 5
    with pytest.raises(ValueError, match=r"^`every_n_steps`"):
        callback.every_n_steps = 0
    assert callback.every_n_steps == 5
    callback.order1_maps = "contrast"
    assert callback.order1_maps == ("contrast",)


def test_flags_are_attributes_like_others():
    callback = NormGradCallback(tile_size=64)
    assert vars(callback)["tile_size"] == 64
    with mock.patch.object(callback, "every_n_steps", 5):
        assert callback._settings.schedule.every_n_steps == 5
    assert callback.every_n_steps is callback._settings.schedule.every_n_steps is None

    class Early(NormGradCallback):
        every_n_steps = 5

        def __init__(self):
            self.num_images = 3
            super().__init__(num_images=2)

    assert (Early().num_images, Early().every_n_steps) == (2, None)
    twin = copy.deepcopy(callback)
    twin.tile_size = 32
    assert (callback.tile_size, twin.tile_size) == (64, 32)


def test_a_flag_that_is_set_during_training_counts_from_the_next_step_on(tmp_path):
    callback = watching(num_images=2, order1_every_n_steps=None)

    class Changes(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            shown.append(None if callback.inputs is None else len(callback.inputs))
            callback.num_images = 1

    shown = []
    train(Lit, tmp_path, callback, callbacks=lambda: [Changes()])
    assert shown == [None, 2, 1, 1, 1, 1]  # it hears of each batch before the callback that it changes


def test_an_event_that_is_running_keeps_its_flags(tmp_path):
    """Its order-1 maps were made for each image, whatever comes next."""

    class Changes(pl.Callback):
        def on_after_backward(self, *_):
            callback.per_image = False
            callback.epsilon = 1.0

    plain = train(Lit, tmp_path / "plain")
    callback = watching(order1_every_n_steps=1)
    run = train(Lit, tmp_path, callback, callbacks=lambda: [Changes()])
    assert_same(plain, run)
    for kind in ("order1", "adversarial"):
        wanted = order1(plain.moments[0], Lit, LAYERS, tuple, adversarial=kind == "adversarial")
        assert_close(run.history.order1[0][kind], wanted, 1e-4)
    shown = panels(run.trainer)
    assert shown["normgrad_order1/00_net.stage1"] == [0]
    assert shown["normgrad_order1_batch/00_net.stage1"] == [1, 2, 3, 4, 5]


def test_an_attribute_that_is_no_flag_is_an_error_that_names_the_nearest():
    callback = NormGradCallback()
    with pytest.raises(AttributeError, match=r"`every_n_step`: .* Did you mean `every_n_steps`\?"):
        callback.every_n_step = 5
    with pytest.raises(AttributeError, match=r"`note`: .* The flags are .*budget, channels_last"):
        callback.note = 1

    class Own(NormGradCallback):
        def __init__(self):
            super().__init__()
            self.note = 1

    assert Own().note == 1
    with pytest.raises(TypeError, match=r"`every_n_step`: .* Did you mean `every_n_steps`\?"):
        NormGradCallback(every_n_step=50)
    with pytest.raises(AttributeError, match=r"Did you mean `num_images`\?"):
        Own().num_image = 5


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("every_n_step", "Did you mean `NORMGRAD_EVERY_N_STEPS`?"),
        ("every", "Did you mean `NORMGRAD_EVERY_N_STEPS`?"),
        ("grid", "Did you mean `NORMGRAD_TOKEN_GRID`?"),
        ("xyz", "The flags are NORMGRAD_BUDGET, "),
    ],
)
def test_a_variable_that_is_no_flag_names_the_nearest(typed, told, monkeypatch):
    monkeypatch.setenv(f"NORMGRAD_{typed.upper()}", "1")
    with pytest.raises(ValueError, match=re.escape(f"`NORMGRAD_{typed.upper()}`: there is no such flag. {told}")):
        environment.flags({"token_grid": int, "read_every_n_steps": int, "every_n_steps": int, "budget": float})


@pytest.mark.parametrize("name", REMOVED)
def test_a_flag_of_an_earlier_version_says_what_to_do(name, monkeypatch):
    with pytest.raises(ValueError, match=f"`{name}`: .*[Ll]eave (it|this) out"):
        NormGradCallback(**{name: True})
    monkeypatch.setenv(f"NORMGRAD_{name.upper()}", "1")
    with pytest.raises(ValueError, match=f"`NORMGRAD_{name.upper()}`: .*[Ll]eave (it|this) out"):
        environment.flags(get_type_hints(NormGradCallback.__init__))
