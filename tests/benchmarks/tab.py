"""The NormGrad tab: bytes it stores, how soon a step is drawn, the memory of its page, the start of TensorBoard.

python tests/benchmarks/tab.py      takes about two minutes; needs chromium and chromedriver
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "tensorboard_tab")]

from browser import chromium  # noqa: E402
from tab_demo import write_run  # noqa: E402
from tab_server import running_tensorboard  # noqa: E402

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


def photograph(rng, side=224):
    """Something that a JPEG has as much work with as with a photograph."""
    coarse = rng.random((14, 14, 3)).repeat(16, 0).repeat(16, 1)
    fine = rng.normal(0, 0.03, (224, 224, 3))
    for _ in range(3):
        coarse = (coarse + np.roll(coarse, 5, 0) + np.roll(coarse, 5, 1)) / 3
    return (255 * np.clip(coarse + fine, 0, 1)).astype(np.uint8)[:side, :side]


def event(step, classes, patches, kinds, with_images, seed=0):
    """An event of eight images and five layers; images and crops are few, as only their decoding matters."""
    rng = np.random.default_rng([seed, step])
    wholes = [photograph(rng) for _ in range(patches)]
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
        shift = 8 * number
        row = [
            Patch(
                9.0,
                step,
                (0.1, 0.1, 0.3, 0.3),
                np.roll(w, shift, 0)[:67, :67],
                np.roll(w, shift, 0),
                rng.random((28, 28)),
            )
            for w in wholes
        ]
        atlas = Atlas(rng.random((28, 28)), rng.random((28, 28)) + 0.5, 1.5)
        views.append(ClassView(f"class {number}", 100, {"combined": row, "last": row}, {"combined": atlas}))
    return encode_event(step, [images], maps, views)


def report_bytes():
    """What a run stores at the default schedule."""
    for classes, kinds in ((0, ("order0",)), (2, ("order0",)), (12, ("order0", "order1", "grad_cam"))):
        size = len(event(1, classes, 24, kinds, False))
        thinning = Thinning()
        stored = [step for step in DEFAULT_STEPS if thinning.takes(size)]
        total = size * len(stored) / 1e6
        print(
            f"{classes:2} classes, {len(kinds)} kinds: {size / 1e3:6.0f} kB an event, {len(stored)} of "
            f"{len(DEFAULT_STEPS)} events of 100,000 steps, {total:.0f} MB"
        )


def report_steps(logdir, work):
    """How soon a step is drawn, and what the page takes."""
    with running_tensorboard(logdir, work) as url, chromium(1280, 1000) as browser:
        browser.execute_cdp_cmd("Performance.enable", {})
        for mode in ("classes", "images", "compare"):
            browser.get("about:blank")
            browser.get(f"{url}/data/plugin_entry.html?name=normgrad#mode={mode}&run=big")
            wait(browser)
            for name, moves in (("next step", [1] * 40), ("any step", [37, 91, 11, 150, 64, 28, 133, 5, 77, 170])):
                times = []
                for move in moves:
                    browser.set_script_timeout(60)
                    times.append(browser.execute_async_script(CHANGE, move if name == "any step" else None))
                    time.sleep(0.3)
                print(f"{mode}: {name}: median {statistics.median(times):.0f} ms, largest {max(times):.0f} ms")
            metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
            heap = next(one["value"] for one in metrics if one["name"] == "JSHeapUsedSize")
            print(f"{mode}: heap {heap / 1e6:.0f} MB")


CHANGE = """
const done = arguments[arguments.length - 1], page = document.querySelector('.page');
const range = document.querySelector('.track input');
delete page.dataset.drawn;
const began = performance.now();
range.value = arguments[0] === null ? Number(range.value) - 1 : arguments[0];
range.dispatchEvent(new Event('input'));
const end = () => done(performance.now() - began);
const look = () => page.dataset.drawn ? requestAnimationFrame(end) : setTimeout(look, 1);
look();
"""


def wait(browser):
    while not browser.execute_script("return document.querySelector('.page')?.dataset.drawn"):
        time.sleep(0.05)


def report_starts(logdir, work):
    """How long TensorBoard takes to import and make its plugins, with the tab and without."""
    import subprocess

    from tab_server import environment

    code = (
        "import time; began = time.perf_counter()\n"
        "from tensorboard import default, program\n"
        "plugins = default.get_plugins(){}\n"
        "board = program.TensorBoard(plugins=plugins); board.configure(argv=[None, '--logdir', {!r}, '--port', '0', "
        "'--load_fast', 'false']); board.launch(); print(time.perf_counter() - began)"
    )
    without = "; plugins = [p for p in plugins if 'normgrad' not in p.__module__]"
    times = {"": [], without: []}
    for _ in range(7):
        for change, found in times.items():
            command = [sys.executable, "-c", code.format(change, str(logdir))]
            answer = subprocess.run(command, env=environment(work), capture_output=True, text=True, check=True)
            found.append(float(answer.stdout.split()[-1]))
    with_tab, plain = (1000 * statistics.median(found) for found in times.values())
    print(f"TensorBoard's start: {with_tab:.0f} ms with the tab, {plain:.0f} ms without (medians of 7)")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        logdir = Path(work, "log")
        report_bytes()
        blobs = [event(step, 12, 24, ("order0", "order1", "grad_cam"), step == 0, seed=1) for step in range(4)]
        print(f"200 events of {len(blobs[1]) / 1e3:.0f} kB")
        pages = (Page(step, blobs={"normgrad/tab": blobs[min(step, 1 + step % 3)]}) for step in range(200))
        write_run(logdir / "big", pages)
        report_starts(logdir, work)
        report_steps(logdir, work)
