"""A small log whose every number is known, with names that would be markup if they were ever parsed."""

from pathlib import Path

import numpy as np
from tab_demo import write_run

from normgrad_lightning.page import Page
from normgrad_lightning.tensorboard_tab.event import (
    Atlas,
    Check,
    ClassCheck,
    ClassView,
    Images,
    Layer,
    Maps,
    Patch,
    encode_event,
)

EVIL = "<img src=x onerror=alert(1)>"
TAG = "normgrad/tab"
SIDE = 64
STEPS = (0, 10, 100)
RUNS = ("first", EVIL)


def ramp(step, number):
    """A map whose values are multiples of 1/255: at its own size its colours are known exactly."""
    row, column = np.indices((SIDE, SIDE))
    values = (row * SIDE + column + 37 * number + step) % 256
    values[0, :2] = 0, 255
    return values / 255


def coarse_map(step, number):
    return np.random.default_rng([step, number]).random((8, 8)) + 0.1


def image(number):
    return np.full((SIDE, SIDE, 3), 60 + 40 * number, np.uint8)


def kinds(step):
    layers = [Layer("net.early", np.stack([ramp(step, n) for n in range(3)]))]
    layers.append(Layer(f"net.{EVIL}", np.stack([coarse_map(step, n) for n in range(3)]), np.eye(8) + 1))
    signed = [Layer("net.early", np.stack([ramp(step, n) - 0.5 for n in range(3)]))]
    return [
        Maps("probe_order0", "order0", "training signal", False, "probe", layers, ["cat", EVIL, "cat"]),
        Maps(
            "probe_contrast", "contrast", "red: order1, blue: adversarial", True, "probe", signed, ["cat", EVIL, "cat"]
        ),
    ]


def class_view(name, step):
    rng = np.random.default_rng(step)
    crops = rng.integers(0, 255, (3, 20, 20, 3), dtype=np.uint8)
    box = (0.25, 0.5, 0.3125, 0.3125)
    patches = [
        Patch(
            9.0 - n,
            step,
            box,
            crop,
            image(n),
            ramp(step, n),
            {f"00_net.{EVIL}": ramp(step, n).T, "01_last": coarse_map(step, n)},
        )
        for n, crop in enumerate(crops)
    ]
    atlas = Atlas(np.full((7, 7), 2.0), np.full((7, 7), 1.0), 1.0)
    return ClassView(name, 50, {"combined": patches, "01_last": patches[:1]}, {"combined": atlas}, (step // 2, step))


def check(step):
    loss = {"plain": (0.1, 0.0), "covered": (5.0 + step / 100, 0.5), "covered_control": (0.2, 0.0)}
    sentence = f"{EVIL} rests on one small place."
    sure = ClassCheck(
        EVIL,
        32,
        step,
        **loss,
        share=0.84,
        region="one small place",
        sure=True,
        sentence=sentence,
        pictures=[("covered", image(0)), ("pasted", image(1))],
    )
    other = ClassCheck("cat", 32, step, plain=(2.1e-4, 0.0), covered=(0.15, 0.02), covered_control=(0.1, 0.0))
    return Check(step, [other, sure], sentence)


def event(step):
    first = step == STEPS[0]
    images = Images(
        "probe", "true", "abc", [image(n) for n in range(3)] if first else None, None if first else STEPS[0]
    )
    return encode_event(
        step, [images], kinds(step), [class_view("cat", step), class_view(EVIL, step)], check(step) if step else None
    )


def page(step, tag=TAG):
    curves = {f"normgrad/hot_spot/{EVIL}": 1.0 + step, "normgrad/hot_spot/cat": 2.0, "val_acc": step / 128}
    curves |= {f"normgrad_layers/energy/0{n}_net.{name}": 2.0**-n for n, name in enumerate(("early", EVIL))}
    return Page(step, scalars=curves if tag == TAG else {}, blobs={tag: event(step)})


def write_known(logdir):
    for run in RUNS:
        write_run(Path(logdir, run), map(page, STEPS))
