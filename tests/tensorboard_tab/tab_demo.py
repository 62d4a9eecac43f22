"""Three made-up runs to look at: one class with a small mark, one with bars at the edges, one with nothing planted.

Images are drawn, maps are made by hand: early layers follow edges, late ones the object, or what is planted.

python tests/tensorboard_tab/tab_demo.py LOGDIR
"""

import sys
from functools import cache
from pathlib import Path

import numpy as np

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
from normgrad_lightning.writers.tensorboard import record, summaries

CLASSES = ("disc", "ring", "square", "triangle", "cross", "star")
STEPS = (0, 10, 20, 50, 100, 200, 500, 1000, 2000, 3000)
GRIDS = {"layer1.1": 56, "layer2.1": 28, "layer3.1": 14, "layer4.1": 7}
KINDS = {"order0": "training signal", "order1": "matters for training", "grad_cam": "speaks for the label"}
SIDE = 128
SIDE_OF_PATCH = 0.3


def write_run(folder, pages):
    """An event file, as TensorBoard's own writer makes them."""
    from tensorboard.compat.proto.event_pb2 import Event

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "events.out.tfevents.1700000000.demo", "ab") as file:
        if file.tell() == 0:
            file.write(record(Event(wall_time=1.7e9, file_version="brain.Event:2").SerializeToString()))
        for page in pages:
            for summary in summaries(page):
                event = Event(wall_time=1.7e9 + page.step, step=page.step, summary=summary)
                file.write(record(event.SerializeToString()))


def shape(name, u, v):
    r, angle = np.hypot(u, v), np.arctan2(u, v)
    long, short = np.maximum(abs(u), abs(v)), np.minimum(abs(u), abs(v))
    return {
        "disc": r - 0.85,
        "ring": abs(r - 0.72) - 0.22,
        "square": long - 0.72,
        "triangle": np.maximum(abs(u) * 0.866 + v * 0.5, -v) - 0.5,
        "cross": np.maximum(long - 0.95, short - 0.28),
        "star": r - 0.72 - 0.28 * np.cos(5 * angle),
    }[name]


@cache
def example(label, seed, planted):
    """An image `(H, W, 3)` in uint8, the object's mask, and that of what is planted."""
    rng = np.random.default_rng([label, seed])
    y, x = (np.mgrid[:SIDE, :SIDE] + 0.5) / SIDE
    cy, cx = rng.uniform(0.38, 0.62, 2)
    radius, turn = rng.uniform(0.2, 0.32), rng.uniform(-0.5, 0.5)
    u, v = (x - cx) / radius, (y - cy) / radius
    u, v = u * np.cos(turn) - v * np.sin(turn), u * np.sin(turn) + v * np.cos(turn)
    mask = np.clip(0.5 - shape(CLASSES[label], u, v) * radius * SIDE / 1.5, 0, 1)
    ground, colour = rng.uniform(0.15, 0.6, 3), rng.uniform(0.35, 1.0, 3)
    waves = sum(np.sin(2 * np.pi * (a * x + b * y) + c) for a, b, c in rng.uniform(-7, 7, (4, 3)))
    image = ground + 0.035 * waves[..., None] + rng.normal(0, 0.015, (SIDE, SIDE, 3))
    image = image * (1 - mask[..., None]) + colour * mask[..., None]
    extra = np.zeros((SIDE, SIDE))
    if planted == "mark" and CLASSES[label] == "star":
        top, left = rng.integers(6, SIDE - 20, 2)
        extra[top : top + 12, left : left + 12] = 1
        image[top : top + 12, left : left + 12] = (0.9, 0.1, 0.75)
    if planted == "bars" and CLASSES[label] == "cross":
        extra[:10], extra[-10:] = 1, 1
        image[extra > 0] = 0.02
    return (255 * np.clip(image, 0, 1)).astype(np.uint8), mask, extra


def blurred(plane, times=3):
    for _ in range(times):
        padded = np.pad(plane, 1, mode="edge")
        plane = sum(padded[i : i + SIDE, j : j + SIDE] for i in range(3) for j in range(3)) / 9
    return plane


@cache
def fine_map(label, seed, planted, depth, progress):
    image, mask, extra = example(label, seed, planted)
    grey = image.mean(axis=2) / 255
    edges = blurred(np.hypot(*np.gradient(grey)), 2)
    rim = blurred(np.hypot(*np.gradient(mask)), 6)
    late = depth / (len(GRIDS) - 1)
    noise = blurred(np.random.default_rng([label, seed, depth]).random((SIDE, SIDE)), 4)
    plain = (1 - 0.7 * late) * edges / edges.mean() + late * progress * (
        blurred(mask, 8) / mask.mean() + rim / rim.mean()
    )
    extra_part = 9 * progress * blurred(extra, 4) / max(extra.mean(), 0.02) ** 0.5 if extra.any() else 0
    return plain + extra_part + 0.4 + noise


def pooled(plane, cells):
    edges = np.linspace(0, SIDE, cells + 1).round().astype(int)
    rows = np.add.reduceat(plane, edges[:-1], axis=0) / np.diff(edges)[:, None]
    return np.add.reduceat(rows, edges[:-1], axis=1) / np.diff(edges)


def layer_maps(images, planted, progress, kind):
    layers = []
    for depth, (name, cells) in enumerate(GRIDS.items()):
        maps = np.stack([pooled(fine_map(*one, planted, depth, progress), cells) for one in images])
        if kind == "grad_cam":
            maps = np.maximum(maps - maps.mean(axis=(1, 2), keepdims=True), 0)
        if kind == "order1":
            maps = maps**1.5
        dots = 1 + 0.8 * (np.indices((cells, cells)).sum(0) % 2) if depth == 2 else np.ones((cells, cells))
        layers.append(Layer(name, 1e-5 * maps * dots, typical=dots / dots.mean()))
    return layers


def patch(label, seed, planted, progress, step):
    image = example(label, seed, planted)[0]
    plane = fine_map(label, seed, planted, 2, progress)
    peak = blurred(plane, 4)
    rim = int(SIDE * SIDE_OF_PATCH / 2)
    inner = peak[rim:-rim, rim:-rim]
    row, column = np.unravel_index(inner.argmax(), inner.shape)
    side = 2 * rim
    crop = image[row : row + side, column : column + side]
    box = (row / SIDE, column / SIDE, side / SIDE, side / SIDE)
    return Patch(float(peak.max() / plane.mean()), step, box, crop, image, pooled(plane, 28))


def swapped(image, donor, extra):
    """The donor's pixels where the mask is."""
    return np.where(blurred(extra, 2)[..., None] > 0.2, donor, image).astype(np.uint8)


def class_check(label, name, step, planted, progress):
    rests = (planted == "mark" and name == "star") or (planted == "bars" and name == "cross")
    plain = 1.6 * (1 - progress) + 0.02
    up, share, area = (
        (5.55 * progress, 0.84 * progress, 0.1 if name == "cross" else 0.04) if rests else (0.12, 0.03, 0.04)
    )
    image, _, extra = example(label, 1, planted)
    donor = example((label + 1) % len(CLASSES), 1, planted)[0]
    proof = [("its region", image), ("covered", swapped(image, donor, extra)), ("pasted", swapped(donor, image, extra))]
    region = "a small part of its images" if name == "cross" else "one small place"
    sentence = (
        f"{name} rests on {region}: covering {100 * area:.0f} % of its "
        f"images raises their loss from {plain:.2f} to {plain + up:.2f} ({plain + 0.02:.2f} if another place is "
        f"covered); pasted into other images, the same place makes {100 * share:.0f} % of them {name}."
    )
    is_sure = bool(rests and up > 1)
    return ClassCheck(
        name,
        images=32,
        step=step,
        plain=(plain, 0.0),
        covered=(plain + up, 0.3 if rests else 0.02),
        covered_control=(plain + 0.02, 0.0),
        pasted=(plain + 1.15 * up, 0.4 if rests else 0.03),
        pasted_control=(plain + 0.05, 0.0),
        share=share,
        share_control=0.0,
        region=region,
        area=area,
        sentence=sentence if is_sure else None,
        sure=is_sure,
        pictures=proof if is_sure else (),
    )


def check(step, planted, progress):
    rows = [class_check(label, name, step, planted, progress) for label, name in enumerate(CLASSES)]
    none = (
        "No class rests on one small place (largest difference: 0.12). What is everywhere in an image (tint, blur, "
        "noise) cannot be seen this way."
    )
    return Check(step, rows, next((one.sentence for one in rows if one.sure), none))


def event(step, planted, number, patches=24, kinds=KINDS, classes=CLASSES):
    progress = min(1.0, 0.12 + np.log10(1 + step) / 3)
    shown = [(label % len(CLASSES), 100 + label) for label in range(8)]
    images = Images(
        "probe", "true", f"demo {planted}", [example(*one, planted)[0] for one in shown] if number == 0 else None,
        None if number == 0 else STEPS[0],
    )  # fmt: skip
    labels = [CLASSES[label] for label, _ in shown]
    sets = [
        Maps(f"probe_{kind}", kind, meaning, False, "probe", layer_maps(shown, planted, progress, kind), labels)
        for kind, meaning in kinds.items()
    ]
    views = []
    for label, name in enumerate(classes):
        label %= len(CLASSES)
        row = [patch(label, 1000 * number + seed, planted, progress, step) for seed in range(patches)]
        row.sort(key=lambda one: -one.strength)
        mean = np.mean([one.map / one.map.mean() for one in row], axis=0)
        lift = np.exp(np.clip((mean - 1) * 0.6, -1.5, 1.8))
        atlas = Atlas(mean, lift, float(lift.max()))
        views.append(ClassView(name, 160, {"combined": row, "last": row[: patches // 2]}, {"combined": atlas}))
    return encode_event(step, [images], sets, views, check(step, planted, progress) if step >= 50 else None)


def scalars(step, planted):
    progress = min(1.0, 0.12 + np.log10(1 + step) / 3)
    rng = np.random.default_rng(step)
    found = {"val_loss": 1.8 - 1.5 * progress, "val_acc": 0.2 + 0.75 * progress}
    for name in CLASSES:
        rests = (planted == "mark" and name == "star") or (planted == "bars" and name == "cross")
        found[f"normgrad/check/covered/{name}"] = (5.5 if rests else 0.1) * progress + 0.05 * rng.random()
        found[f"normgrad/check/pasted/{name}"] = (6.3 if rests else 0.08) * progress + 0.05 * rng.random()
        found[f"normgrad/hot_spot/{name}"] = 1.2 + (3 if rests else 0.3) * progress + 0.1 * rng.random()
        found[f"normgrad/part_of_signal/{name}"] = 1 / 6 + 0.02 * rng.normal()
    for depth, name in enumerate(GRIDS):
        found[f"normgrad_layers/concentration/{depth:02d}_{name}"] = 0.5 - 0.1 * depth * progress
        found[f"normgrad_layers/energy/{depth:02d}_{name}"] = 10.0 ** -(depth + progress)
    found["normgrad/cost"] = 0.004 + 0.02 / (1 + step)
    return found


def pages(planted, steps=STEPS, **options):
    for number, step in enumerate(steps):
        yield Page(
            step, scalars=scalars(step, planted), blobs={"normgrad/tab": event(step, planted, number, **options)}
        )


def write_demo(logdir, **options):
    for name, planted in {"bars_at_edges": "bars", "nothing_planted": None, "small_mark": "mark"}.items():
        write_run(Path(logdir) / name, pages(planted, **options))


if __name__ == "__main__":
    write_demo(sys.argv[1])
