"""The NormGrad tab: bytes it stores, how soon a step is drawn, the memory of its page, the start of TensorBoard.

    python tests/benchmarks/tab.py

The page is drawn in a headless Chromium, from a log of 200 events with eight images, five layers and three kinds, and
twelve classes of 24 patches each: more than the callback stores. Takes about two minutes. `--sizes` only counts bytes,
and needs no browser.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harness import Figures, judged, parser, quartiles, run, spread, table

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "tensorboard_tab")]

from browser import CHROMIUM, DRIVER, chromium  # noqa: E402
from tab_demo import write_run  # noqa: E402
from tab_server import environment, running_tensorboard  # noqa: E402

from normgrad_lightning.page import Page  # noqa: E402
from normgrad_lightning.tensorboard_tab.event import (  # noqa: E402
    Atlas,
    ClassView,
    Images,
    Layer,
    Maps,
    Patch,
    encode_event,
)
from normgrad_lightning.tensorboard_tab.thinning import Thinning  # noqa: E402

GRIDS = (112, 56, 28, 14, 7)
DEFAULT_STEPS = [0, 10, 20, 50, 100, 200, 500, *range(1000, 100_001, 1000)]
MODES = ("classes", "images", "compare")
DRAWN, STARTED = 300.0, 100.0
"""Milliseconds: for a step, and more than TensorBoard takes to start without the tab."""


def photograph(rng, side=224):
    """Something that a JPEG has as much work with as with a photograph."""
    coarse = rng.random((14, 14, 3)).repeat(16, 0).repeat(16, 1)
    fine = rng.normal(0, 0.03, (224, 224, 3))
    for _ in range(3):
        coarse = (coarse + np.roll(coarse, 5, 0) + np.roll(coarse, 5, 1)) / 3
    return (255 * np.clip(coarse + fine, 0, 1)).astype(np.uint8)[:side, :side]


def event(step, classes, patches, kinds, with_images, seed=0):
    """An event of eight images and five layers, with patches by two maps of whole images as large as they are kept."""
    rng = np.random.default_rng([seed, step])
    wholes = [photograph(rng, 160) for _ in range(patches)]
    maps = [
        Maps(
            f"probe_{kind}",
            kind,
            "",
            False,
            "probe",
            [Layer(f"layer{i}", rng.random((8, g, g))) for i, g in enumerate(GRIDS)],
        )
        for kind in kinds
    ]
    images = Images(
        "probe", "true", "a", [photograph(rng) for _ in range(8)] if with_images else None, None if with_images else 0
    )
    views = []
    for number in range(classes):
        rows = {}
        for shift, name in enumerate(("combined", "last")):
            shifted = [np.roll(whole, (8 * number, 8 * shift), (0, 1)) for whole in wholes]
            rows[name] = [
                Patch(9.0, step, (0.1, 0.1, 0.4, 0.4), whole[:67, :67], whole, rng.random((28, 28)), coarse_layers(rng))
                for whole in shifted
            ]
        atlas = {name: Atlas(rng.random((28, 28)), rng.random((28, 28)) + 0.5, 1.5) for name in rows}
        views.append(ClassView(f"class {number}", 100, rows, atlas))
    return encode_event(step, [images], maps, views)


def coarse_layers(rng):
    """Maps of five layers, as a patch keeps them."""
    return {f"layer{i}": rng.random((min(side, 28),) * 2) for i, side in enumerate(GRIDS)}


def patches_of(classes: int) -> int:
    """How many patches the callback keeps of each class, at most."""
    return min(24, max(96 // max(classes, 1), 6))


def measure(args: argparse.Namespace) -> Figures:
    """What is stored; with a browser, the page, too."""
    figures: Figures = {"stored": list(stored())}
    if args.sizes or not (CHROMIUM and DRIVER):
        return figures
    with tempfile.TemporaryDirectory() as work:
        logdir = Path(work, "log")
        kinds = ("order0", "order1", "grad_cam")
        blobs = [event(step, args.classes, 24, kinds, step == 0, seed=1) for step in range(min(args.events, 4))]
        pages = (Page(step, blobs={"normgrad/tab": blobs[min(step, 1 + step % 3)]}) for step in range(args.events))
        write_run(logdir / "big", pages)
        return {
            **figures,
            "event": len(blobs[1]),
            "pages": dict(drawn(logdir, work, args)),
            "start": started(logdir, work, args.starts),
        }


def stored() -> Iterator[dict[str, Any]]:
    """Bytes of a run with the default schedule: maps of the batch and of the probe, and patches by two maps."""
    for classes in (1, 2, 12):
        size = len(event(1, classes, patches_of(classes), ("order0",), True)) + len(event(1, 0, 0, ("order0",), False))
        thinning = Thinning()
        taken = sum(thinning.takes(size) for _ in DEFAULT_STEPS)
        yield {"classes": classes, "bytes": size, "events": len(DEFAULT_STEPS), "stored": taken}


def drawn(logdir: Path, work: str, args: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    """How soon a step is drawn, and what the page takes, by mode."""
    chance = random.Random(0)
    with running_tensorboard(logdir, work) as url, chromium(1280, 1000) as browser:
        browser.execute_cdp_cmd("Performance.enable", {})
        browser.set_script_timeout(60)
        for mode in MODES:
            browser.get("about:blank")
            browser.get(f"{url}/data/plugin_entry.html?name=normgrad#mode={mode}&run=big")
            while not browser.execute_script("return document.querySelector('.page')?.dataset.drawn"):
                time.sleep(0.05)
            times: dict[str, list[float]] = {"next": [], "any": []}
            for name, found in times.items():
                for _ in range(args.rounds):
                    step = None if name == "next" else chance.randrange(args.events)
                    found.append(browser.execute_async_script(CHANGE, step))
                    time.sleep(0.3)
            metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
            heap = next(one["value"] for one in metrics if one["name"] == "JSHeapUsedSize")
            of = {name: {**quartiles(found), "largest": max(found)} for name, found in times.items()}
            yield mode, {**of, "heap": heap}


CHANGE = """
const done = arguments[arguments.length - 1], page = document.querySelector('.page');
const range = document.querySelector('.track input');
delete page.dataset.drawn;
const began = performance.now();
range.value = arguments[0] === null ? (Number(range.value) || Number(range.max) + 1) - 1 : arguments[0];
range.dispatchEvent(new Event('input'));
const end = () => done(performance.now() - began);
const look = () => page.dataset.drawn ? requestAnimationFrame(end) : setTimeout(look, 1);
look();
"""


def started(logdir: Path, work: str, count: int) -> Figures:
    """Milliseconds that TensorBoard takes to import and make its plugins, with the tab and without, in turns."""
    code = (
        "import time; began = time.perf_counter()\n"
        "from tensorboard import default, program\n"
        "plugins = default.get_plugins(){}\n"
        "board = program.TensorBoard(plugins=plugins); board.configure(argv=[None, '--logdir', {!r}, '--port', '0', "
        "'--load_fast', 'false']); board.launch(); print(time.perf_counter() - began)"
    )
    changes = {"with": "", "without": "; plugins = [p for p in plugins if 'normgrad' not in p.__module__]"}
    times: dict[str, list[float]] = {name: [] for name in changes}
    for _ in range(count):
        for name, change in changes.items():
            command = [sys.executable, "-c", code.format(change, str(logdir))]
            answer = subprocess.run(command, env=environment(work), capture_output=True, text=True, check=True)
            times[name].append(1e3 * float(answer.stdout.split()[-1]))
    more = statistics.median(times["with"]) - statistics.median(times["without"])
    return {**{name: quartiles(found) for name, found in times.items()}, "more": more}


def show(figures: Figures) -> str:
    """Tables of what is stored and, if there was a browser, of the page."""
    rows = [
        [
            "1, or no labels" if of["classes"] == 1 else str(of["classes"]),
            f"{of['bytes'] / 1e3:.0f} kB",
            f"{of['stored']} of {of['events']}",
            f"{of['stored'] * of['bytes'] / 1e6:.0f} MB",
        ]
        for of in figures["stored"]
    ]
    text = table(["classes", "per event", "events stored of 100,000 steps", "in all"], rows)
    if "pages" not in figures:
        return text
    rows = [
        [
            mode,
            *(
                judged(
                    f"{spread(of[name], 0, ' ms')}, largest {of[name]['largest']:.0f} ms", of[name]["largest"], DRAWN
                )
                for name in ("next", "any")
            ),
            f"{of['heap'] / 1e6:.0f} MB",
        ]
        for mode, of in figures["pages"].items()
    ]
    settings, start = figures["settings"], figures["start"]
    size = (
        f"{settings['events']} events of {figures['event'] / 1e6:.1f} MB, {settings['classes']} classes of 24 patches"
    )
    more = judged(f"{start['more']:.0f} ms more", start["more"], STARTED)
    return (
        f"{text}\n\nA changed step is drawn, all that a screen of 1280 × 1000 pixels shows:\n\n"
        f"{table(['mode', 'the step beside', 'any step', 'heap of the page'], rows)}\n\n"
        f"{size}; {settings['rounds']} changes each, at most {DRAWN:.0f} ms. TensorBoard starts in "
        f"{spread(start['with'], 0, ' ms')}: {more} than without the tab, at most {STARTED:.0f} ms."
    )


def main() -> None:
    """Measure, and print the tables."""
    options = parser(__doc__ or "", rounds=20, events=200, classes=12, starts=7)
    options.add_argument("--sizes", action="store_true", help="only what is stored")
    run(__file__, options, measure, show, events=5, classes=2, starts=1)


if __name__ == "__main__":
    main()
