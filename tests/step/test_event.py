"""An event is over when its batch is: nothing of it stays alive, whatever happened in it."""

import gc
import weakref
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
from twice import Lit, loader

from normgrad_lightning import NormGradCallback
from normgrad_lightning.isolated.python_state import PythonState
from normgrad_lightning.step.messages import Messenger


def in_a_pass(module):
    return type(module._trainer).__name__ != "Trainer"


class Traced(Lit):
    """Keeps weak references to what each step and each pass works with.

    Args:
        in_passes: what a pass's loss becomes.
    """

    def __init__(self, in_passes=lambda loss: loss):
        super().__init__()
        self.in_passes = in_passes
        self.net.stage2.register_forward_hook(lambda _, args, output: self.trace(output))

    def trace(self, *tensors):
        if in_a_pass(self):
            PASSES.update(map(weakref.ref, tensors))
        else:
            STEPS.update(map(weakref.ref, tensors))

    def loss(self, batch):
        self.trace(*self.net.parameters(), batch[0])
        loss = super().loss(batch)
        return self.in_passes(loss) if in_a_pass(self) else loss

    def keep(self, loss):
        """Nothing: the module must not hold the step itself."""


STEPS, PASSES = set(), set()


class Watches(pl.Callback):
    """Looks, after our callback has ended its event, at what is still alive of the event."""

    def __init__(self):
        self.alive = []
        self.passes = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        gc.collect()
        parameters = set(map(id, pl_module.parameters()))
        left = [ref() for ref in PASSES if ref() is not None]
        self.alive += [tuple(t.shape) for t in left if id(t) not in parameters]
        self.passes += len(PASSES)
        PASSES.clear()


def broken(loss):
    raise RuntimeError("a pass of ours is broken")


def unfinished(loss):
    return loss * torch.inf


ENDINGS = {
    "as it should": lambda loss: loss,
    "without a loss": lambda loss: None,
    "with an error": broken,
    "not finite": unfinished,
    "not a scalar": lambda loss: loss.expand(3),
    "cut off": lambda loss: loss.detach(),
}


@pytest.fixture(autouse=True)
def _nothing_is_traced_yet():
    STEPS.clear()
    PASSES.clear()


def fitted(module, callbacks, **options):
    trainer = pl.Trainer(
        max_epochs=1,
        limit_train_batches=3,
        accelerator="cpu",
        devices=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, loader())
    return trainer


def forget_what_lightning_keeps(callback):
    """A Trainer sets `log` of each callback to the module's method."""
    for name in ("log", "log_dict"):
        vars(callback).pop(name, None)
    gc.collect()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("how", "per_image"), [*((how, True) for how in ENDINGS), ("as it should", False)])
def test_nothing_of_a_pass_outlives_its_event(how, per_image):
    callback = NormGradCallback(
        every_n_steps=1, order1_every_n_steps=1, num_images=2, per_image=per_image, layers="net.stage2"
    )
    watches = Watches()
    fitted(Traced(ENDINGS[how]), [callback, watches])
    assert watches.passes > 10
    assert watches.alive == []
    assert list(callback.maps) == ["net.stage2"]
    assert (callback.order1 != {}) is (how == "as it should")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ENDINGS)
def test_nothing_of_a_run_outlives_it(how):
    """The callback is still there; weights, batches and features of the run are not."""
    callback = NormGradCallback(every_n_steps=1, order1_every_n_steps=1, num_images=2)
    module = Traced(ENDINGS[how])
    trainer = fitted(module, [callback])
    gone = weakref.ref(module)
    assert len(STEPS) > 10
    del module, trainer
    forget_what_lightning_keeps(callback)
    assert gone() is None
    assert [ref().shape for ref in (*STEPS, *PASSES) if ref() is not None] == []
    assert len(callback.maps) == 3


class Stops(pl.Callback):
    """Ends an epoch or the run in the middle of an event."""

    def __init__(self, how):
        self.how = how

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        if self.how == "error":
            raise RuntimeError("training is broken")
        if self.how == "ctrl-c":
            raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["error", "ctrl-c"])
def test_an_event_that_is_broken_off_is_gone_too(how):
    callback, module = NormGradCallback(every_n_steps=1, order1_every_n_steps=1, num_images=2), Traced()
    with pytest.raises((RuntimeError, SystemExit)):
        fitted(module, [callback, Stops(how)])
    assert not any(m._forward_pre_hooks for m in module.modules())
    gone = weakref.ref(module)
    del module
    forget_what_lightning_keeps(callback)
    assert gone() is None
    assert [ref().shape for ref in (*STEPS, *PASSES) if ref() is not None] == []


def interrupted(loss):
    raise KeyboardInterrupt


@pytest.mark.parametrize("layers", ["net.stage2", "auto"])
@pytest.mark.parametrize("cleaning_up_fails", [False, True])
def test_ctrl_c_in_a_pass_ends_the_run_also_if_cleaning_up_after_it_fails(cleaning_up_fails, layers, monkeypatch):
    restore = PythonState.restore

    def fails_afterwards(state):
        restore(state)
        if cleaning_up_fails:
            raise RuntimeError("something cannot be put back")

    monkeypatch.setattr(PythonState, "restore", fails_afterwards)
    module = Traced(interrupted)
    with pytest.raises(SystemExit):
        fitted(module, [NormGradCallback(order1_every_n_steps=1, layers=layers)])
    assert not any(m._forward_pre_hooks for m in module.modules())


def test_ctrl_c_while_things_are_put_back_ends_the_run_also_if_some_cannot_be():
    state = PythonState(nn.Linear(1, 1))

    def raises(error):
        raise error

    state._restores += [partial(raises, RuntimeError()), partial(raises, KeyboardInterrupt())]
    with pytest.raises(KeyboardInterrupt):
        state.restore()


def fail_while_ctrl_c_is_handled():
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with Messenger("warn").guard("ending an event"):
            int("no number")


def test_an_error_of_ours_while_ctrl_c_is_handled_is_a_warning():
    """As when hooks are taken off in `on_exception`: Lightning's own handling goes on."""
    with pytest.warns(UserWarning, match="NormGrad failed while ending an event"):
        fail_while_ctrl_c_is_handled()


def test_the_batch_is_not_kept_between_events():
    batches = DataLoader([(torch.randn(4, 3, 32, 32), torch.arange(4) % 4) for _ in range(3)], batch_size=None)
    seen = []

    class Keeps(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(weakref.ref(batch[0]))

    callback = NormGradCallback(every_n_steps=2, layers="net.stage2")
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[callback, Keeps()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Lit(), batches)
    assert len(seen) == 3
    assert callback.inputs.data_ptr() not in [ref().data_ptr() for ref in seen if ref() is not None]
