"""The device that `on_device.py` runs on, named by NORMGRAD_TEST_DEVICE: the stand-in, or a real one."""

import os
import warnings
from collections import Counter
from contextlib import contextmanager

import torch
from device.counting import line_to_blame

NAME = os.environ.get("NORMGRAD_TEST_DEVICE", "standin")
IS_REAL = NAME != "standin"

if not IS_REAL:
    from device import stand_in


def trainer_options():
    """Arguments of a Trainer that trains on it."""
    if not IS_REAL:
        return stand_in.on_stand_in()
    return {"accelerator": {"cuda": "gpu", "mps": "mps"}.get(NAME, NAME), "devices": 1}


def module():
    return torch.get_device_module(NAME)


def random_state():
    """The state of the device's random numbers."""
    return module().get_rng_state() if NAME == "mps" else module().get_rng_state(NAME)


def counts_waits():
    """Whether the device can tell who waits for it."""
    return NAME in ("standin", "cuda")


@contextmanager
def waits():
    """Count inside how often each line of the package waits for the device."""
    lines = Counter()
    if not IS_REAL:
        stand_in.DEVICE.reset()
        yield lines
        lines.update(stand_in.DEVICE.waits)
        return

    def note(message, *_, **__):
        ours = line_to_blame()
        if ours is not None and "synchroniz" in str(message):
            lines[ours] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            torch.cuda.set_sync_debug_mode("default")
