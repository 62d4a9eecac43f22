"""The page in a real browser: from a real TensorBoard, and as a report that is opened from disk.

Pixels of canvases are compared with what `views.drawing` draws of the same maps.
"""

import base64
import io
import json
import random
import re
import shutil
import urllib.request
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from browser import CHROMIUM, DRIVER, chromium, until
from known_log import EVIL, RUNS, STEPS, TAG, class_view, coarse_map, event, image, page, ramp, write_known
from PIL import Image
from tab_demo import write_run
from tab_server import running_tensorboard
from test_stored import header_of, paths, with_header

from normgrad_lightning import show_report
from normgrad_lightning.page import Page
from normgrad_lightning.tensorboard_tab.event import Check, ClassCheck, Images, Layer, Maps, encode_event
from normgrad_lightning.tensorboard_tab.report import write_report
from normgrad_lightning.tensorboard_tab.stored import Content, decode
from normgrad_lightning.views.drawing import overlays
from normgrad_lightning.views.resampling import resized_axis
from normgrad_lightning.views.style import Style

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
]


class Shown:
    """The page, as a person uses it."""

    def __init__(self, browser, address):
        self.browser, self.address = browser, address

    def run(self, code, *arguments):
        return self.browser.execute_script(code, *arguments)

    def open(self, **chosen):
        """Open the page with these choices in its address."""
        self.browser.get("about:blank")
        self.browser.get(self.address + "#" + "&".join(f"{key}={value}" for key, value in chosen.items()))
        return self.drawn()

    def drawn(self, wanted=None):
        """Wait until something, or just this, is drawn."""
        found = "return document.querySelector('.page')?.dataset.drawn"
        return until(lambda: (now := self.run(found)) and (wanted is None or now == wanted) and now)

    def set(self, name, value):
        """Use a control, and wait until the page has drawn what it says."""
        self.run(
            """
            const control = document.querySelector(`[name="${arguments[0]}"]`);
            delete document.querySelector('.page').dataset.drawn;
            if (control.type === 'checkbox') control.click();
            else {
              control.value = arguments[1];
              control.dispatchEvent(new Event('input', {bubbles: true}));
              control.dispatchEvent(new Event('change', {bubbles: true}));
            }""",
            name,
            str(value),
        )
        self.drawn()

    def click(self, selector, number=0):
        self.run("document.querySelectorAll(arguments[0])[arguments[1]].click()", selector, number)

    def press(self, key):
        self.run(
            "delete document.querySelector('.page').dataset.drawn;"
            "document.body.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0], bubbles: true}))",
            key,
        )

    def text(self, selector="body"):
        return self.run("return document.querySelector(arguments[0])?.innerText", selector)

    def count(self, selector):
        return self.run("return document.querySelectorAll(arguments[0]).length", selector)

    def pixels(self, selector, number=0):
        """The pixels of a canvas, `(H, W, 3)`."""
        url = self.run("return document.querySelectorAll(arguments[0])[arguments[1]].toDataURL()", selector, number)
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB"))

    def address_has(self, piece, is_there=True):
        """Wait until the address says this, or does not: it is written a moment after the last change."""
        until(lambda: (piece in self.browser.current_url) is is_there)

    def errors(self):
        """What the console says, but for the icon and the fonts that TensorBoard's own page does not find."""
        log = self.browser.get_log("browser")
        return [entry for entry in log if not any(word in entry["message"] for word in ("favicon", "font-roboto"))]


LOADERS = [pytest.param("false", id="slow loader"), pytest.param("true", id="fast loader", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def boards(tmp_path_factory):
    """A TensorBoard with each of its data loaders. It has nothing to show at first."""
    running = {}
    with ExitStack() as stack:

        def board(loader):
            if loader not in running:
                log, work = tmp_path_factory.mktemp("log"), tmp_path_factory.mktemp("work")
                flags = "--load_fast", loader, "--path_prefix", "/pre/fix"
                url = stack.enter_context(running_tensorboard(log, work, *flags))
                running[loader] = SimpleNamespace(url=url, log=log, tab=f"{url}/data/plugin_entry.html?name=normgrad")
            return running[loader]

        yield board


@pytest.fixture(scope="module", params=LOADERS)
def board(request, boards):
    return boards(request.param)


@pytest.fixture(scope="module")
def filled(board):
    return fill(board)


def fill(board):
    """Write the known log, and wait until TensorBoard has read it."""
    if not (board.log / RUNS[0]).exists():
        write_known(board.log)
        until(lambda: read(board.url) == len(RUNS) * len(STEPS))
    return board


def read(url):
    """How many events of the known log TensorBoard has read. It may still list a run that was deleted."""
    return sum(len(one["events"]) for one in index_of(url)["runs"] if one["run"] in RUNS)


def index_of(url):
    with urllib.request.urlopen(f"{url}/data/plugin/normgrad/index") as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def browser():
    with chromium(1280, 1000) as found:
        yield found


@pytest.fixture(scope="module", params=[*LOADERS, "report"])
def shown(request, browser, boards, tmp_path_factory):
    """The tab, or a report: what is asked of one is asked of the other."""
    if request.param != "report":
        return Shown(browser, fill(boards(request.param)).tab)
    out = tmp_path_factory.mktemp("report") / "report.html"
    write_known(out.parent / "log")
    write_report([out.parent / "log"], out)
    return Shown(browser, out.as_uri())


@pytest.fixture(autouse=True)
def no_errors(request):
    yield
    if "shown" in request.fixturenames:
        assert request.getfixturevalue("shown").errors() == []


def test_without_data_the_page_helps_and_a_run_appears_without_a_reload(browser, board):
    shown = Shown(browser, board.tab)
    assert shown.open() == "empty"
    assert "NormGradCallback()" in shown.text(".message")
    write_run(board.log / "live", [page(0)])
    shown.drawn("classes live 0")
    write_run(board.log / "live", [page(10)])
    until(lambda: shown.run("window.dispatchEvent(new Event('focus'))") or "live 10" in shown.drawn())
    assert shown.errors() == []
    removed(browser, board.log, "live")


def test_a_new_run_is_listed_and_what_is_on_screen_stays(browser, board):
    shown = Shown(browser, board.tab)
    write_run(board.log / "triangle", [page(0), page(20)])
    until(lambda: [0, 20] in [[step for step, _ in one["events"]] for one in index_of(board.url)["runs"]])
    assert shown.open() == "classes triangle 20"
    write_run(board.log / "aaa", [page(0), page(30)])
    options = "return [...document.querySelector('[name=run]').options].map((one) => one.text)"
    until(lambda: shown.run("window.dispatchEvent(new Event('focus'))") or "aaa" in shown.run(options))
    shown.click("[data-value=images]")
    shown.drawn("images triangle 20")
    assert shown.open() == "classes aaa 30"  # the newest
    assert shown.errors() == []
    removed(browser, board.log, "triangle", "aaa")


def removed(browser, log, *runs):
    browser.get("about:blank")  # the page would ask for them
    for run in runs:
        shutil.rmtree(log / run)


IMAGES = {"mode": "images", "run": "first", "kind": "probe_order0", "tile": 64, "scale": "image"}


def cells(row, column):
    """The canvas of a cell, in rows of an image and its maps."""
    return ".grid .cell canvas", row * 4 + column


def expected(maps, number, **look):
    grey = np.full((1, 64, 64), 60 + 40 * number, np.uint8)
    return overlays(grey, maps[None].astype(np.float32), Style(**look))[0, ..., :3]


def test_the_colours_of_known_maps_are_exact(shown):
    shown.open(**IMAGES, opacity=1, step=10)
    for number in range(3):
        values = np.float16(ramp(10, number)).astype(np.float32)  # as it is stored
        drawn = shown.pixels(*cells(number, 2))
        np.testing.assert_array_equal(drawn, expected(values, number, opacity=1.0, scale="image"))


def test_images_are_under_the_maps_and_values_are_interpolated_before_they_are_coloured(shown):
    shown.open(**IMAGES, opacity=0.6)
    for number in range(3):
        assert abs(shown.pixels(*cells(number, 0)).astype(int) - image(number)).max() <= 1
        wanted = expected(coarse_map(100, number), number, opacity=0.6, scale="image").astype(int)
        # a level of a value or of a grey more or less: rounding of float32, of the stored float16, of JPEG
        assert np.quantile(abs(shown.pixels(*cells(number, 3)).astype(int) - wanted), 0.98) <= 4


def test_the_robust_scale_is_that_of_the_package(shown):
    shown.open(**{**IMAGES, "scale": "robust"}, opacity=1)
    wanted = expected(ramp(100, 1), 1, opacity=1.0, scale="robust").astype(int)
    assert np.quantile(abs(shown.pixels(*cells(1, 2)).astype(int) - wanted), 0.98) <= 6


def test_the_combined_map_is_that_of_the_package(shown):
    shown.open(**IMAGES, opacity=1)
    maps = [make(100, 2)[None] for make in (ramp, coarse_map)]
    at_size = [resized_axis(resized_axis(m / m.mean(), 2, 64), 1, 64)[0] for m in maps]
    together = np.exp(np.log(np.maximum(at_size, 1e-6)).mean(axis=0))
    wanted = expected(together, 2, opacity=1.0, scale="image").astype(int)
    assert np.quantile(abs(shown.pixels(*cells(2, 1)).astype(int) - wanted), 0.95) <= 8


CONTROLS = {"opacity": 0.2, "colors": "viridis", "scale": "robust", "typical": 1, "tile": 96, "kind": "probe_contrast"}


@pytest.mark.parametrize("name", CONTROLS)
def test_every_control_of_images_changes_the_maps_and_the_address(shown, name):
    shown.open(**IMAGES)
    last = cells(0, 3 if name == "typical" else 2)
    before = shown.pixels(*last) if name != "kind" else shown.count(".grid .cell")
    shown.set(name, CONTROLS[name])
    after = shown.pixels(*last) if name != "kind" else shown.count(".grid .cell")
    assert np.shape(before) != np.shape(after) or np.any(before != after)
    if name == "scale":  # now the default
        shown.address_has("scale=", False)
    else:
        shown.address_has(f"{name}={CONTROLS[name]}")
    chosen = shown.run("return document.querySelector(`[name=${arguments[0]}]`).value", name)
    shown.browser.refresh()
    shown.drawn()
    assert shown.run("return document.querySelector(`[name=${arguments[0]}]`).value", name) == chosen


def test_the_typical_map_is_divided_away(shown):
    """Of a layer whose typical map is itself a diagonal, the diagonal loses most."""
    shown.open(**IMAGES, opacity=1, colors="gray")
    before = shown.pixels(*cells(0, 3))[..., 0].astype(float)
    shown.set("typical", 1)
    after = shown.pixels(*cells(0, 3))[..., 0].astype(float)
    diagonal = np.eye(64, dtype=bool)
    change = after - before
    assert change[diagonal].mean() < change[~diagonal].mean() - 20


def test_the_step_slider_and_keys_choose_the_step(shown):
    shown.open(**IMAGES)
    assert shown.count(".marks i") == len(STEPS)
    assert shown.text(".step").startswith("step 100")
    shown.press("ArrowLeft")
    shown.drawn("images first 10")
    shown.address_has("step=10")
    shown.press("Home")
    shown.drawn("images first 0")
    shown.run(
        """
        const button = document.querySelector('[data-value=images]');
        button.focus();
        button.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}))"""
    )
    shown.drawn("images first 10")
    shown.run("const r = document.querySelector('.track input'); r.value = 1; r.dispatchEvent(new Event('input'))")
    shown.drawn("images first 10")
    shown.press("End")
    shown.drawn("images first 100")
    shown.address_has("step=", False)  # the last step, also when there are more


def test_play_goes_on_to_the_last_step(shown):
    shown.open(**IMAGES, step=10)
    shown.click(".play")
    assert shown.run("return document.querySelector('.play').getAttribute('aria-label')") == "Pause"
    shown.drawn("images first 100")
    until(lambda: shown.run("return document.querySelector('.play').getAttribute('aria-label')") == "Play")


def test_hovering_shows_the_same_place_in_all_columns_with_its_value(shown):
    shown.open(**IMAGES)
    shown.run("""
        const cell = document.querySelectorAll('.grid .cell')[2], box = cell.getBoundingClientRect();
        const [clientX, clientY] = [Math.ceil(box.left) + 16, Math.ceil(box.top) + 32];
        cell.dispatchEvent(new MouseEvent('mousemove', {clientX, clientY}));""")
    places = shown.run(
        "return [...document.querySelectorAll('.cross:not([hidden])')].map((c) => [c.style.left, c.style.top])"
    )
    assert len(places) == 4
    assert all(abs(float(x[:-1]) - 25) < 1.6 and abs(float(y[:-1]) - 50) < 1.6 for x, y in places)
    value = ramp(100, 0)[32, 16] / ramp(100, 0).mean()
    assert shown.run("return document.querySelectorAll('.cell .value')[2].innerText") == f"{value:.1f} × mean"


def test_a_click_enlarges_and_keys_go_to_neighbours(shown):
    shown.open(**IMAGES)
    shown.click(".grid .cell")
    assert shown.text("dialog h2") == "Image 1: cat"
    assert shown.count("dialog .views canvas") == 2
    names = shown.run("return [...document.querySelectorAll('dialog .others button')].map((b) => b.innerText.trim())")
    assert names == ["all layers combined", "early", EVIL]
    shown.click("dialog .others button", 1)
    assert shown.text("dialog .views figure:last-child") == "early"
    shown.run("document.querySelector('dialog').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}))")
    assert shown.text("dialog h2") == f"Image 2: {EVIL}"
    shown.click("dialog [aria-label=Close]")
    assert shown.count("dialog[open]") == 0


def test_classes_have_patches_the_check_and_the_atlas(shown):
    shown.open(run="first")
    assert shown.text(".badge") == "rests on one small place"
    assert shown.text(".verdict") == f"{EVIL} rests on one small place."
    names = shown.run("return [...document.querySelectorAll('.class h2')].map((h) => h.innerText)")
    assert names == [EVIL, "cat"]  # what the check found comes first
    assert shown.count(".class:first-child .patches .patch") == 3
    assert shown.count(".class:first-child .proof canvas") == 2
    assert shown.count(".class:first-child .atlas canvas") == 2
    bars = shown.run("return [...document.querySelectorAll('.class:first-child .bars .value')].map((b) => b.innerText)")
    assert bars == ["0.10", "6.00", "0.20"]
    numbers = "return [...document.querySelectorAll('.class:last-child .bars .value')].map((b) => b.innerText)"
    assert shown.run(numbers) == ["0.00", "0.15", "0.10"]
    heights = "return [...document.querySelectorAll('.bars .value')].map((b) => b.getBoundingClientRect().height)"
    assert len(set(shown.run(heights))) == 1
    assert "84 %" in shown.text(".class:first-child .share")
    widths = shown.run(
        "return [...document.querySelectorAll('.class:first-child .bars i:not(.error)')].map((b) => b.style.width)"
    )
    assert [float(w[:-1]) for w in widths] == pytest.approx([100 * loss / 6.5 for loss in (0.1, 6.0, 0.2)], abs=0.01)


def check_of_two(is_sure=True):
    """Of two classes: dog may rest on a place; cat was checked, and does not."""
    dog = ClassCheck(
        "dog", 24, 100, plain=(0.1, 0.0), covered=(4.0, 0.5), covered_control=(0.2, 0.0), pasted=(3.0, 0.2),
        pasted_control=(0.4, 0.0), share=0.9, share_control=0.0, sure=is_sure, verdict="rests on one small place",
        asked=1.2, area=0.04,
    )  # fmt: skip
    cat = ClassCheck(
        "cat", 8, 100, plain=(0.1, 0.0), covered=(0.3, 0.0), covered_control=(0.2, 0.0), share=1.0, share_control=0.9,
        verdict="not found to rest on one small place", asked=2.0, area=0.1,
    )  # fmt: skip
    return encode_event(100, classes=[class_view("cat", 100), class_view("dog", 100)], check=Check(100, [cat, dog]))


def test_bars_have_one_scale_and_the_mark_of_the_rule_and_what_was_not_found_is_said(browser, tmp_path):
    pages = [Page(100, scalars={"normgrad/cost": 0.1}, blobs={TAG: check_of_two()})]
    write_run(tmp_path / "run", pages)
    write_report([tmp_path], tmp_path / "report.html")
    shown = Shown(browser, (tmp_path / "report.html").as_uri())
    shown.open()
    badges = shown.run("return [...document.querySelectorAll('.badge')].map((one) => one.innerText)")
    assert badges == ["rests on one small place", "not found to rest on one small place"]
    lefts = "return [...document.querySelectorAll('.bars .asked')].map((one) => parseFloat(one.style.left))"
    assert shown.run(lefts) == pytest.approx([100 * loss / 4.5 for loss in (1.4, 1.6, 2.2)], abs=0.01)
    widths = shown.run(
        "return [...document.querySelectorAll('.bars .measured')].map((one) => parseFloat(one.style.width))"
    )
    assert widths == pytest.approx([100 * loss / 4.5 for loss in (4.0, 3.0, 0.3)], abs=0.01)
    assert shown.count(".share strong") == 1
    assert "absence of what dog rests on" in shown.text(".class:last-child .check")
    assert "absence" not in shown.text(".class:first-child .check")
    assert "3 patches of 50 images, steps 50 to 100" in shown.text(".class header")
    assert shown.count(".chart circle") == 1  # a curve of one point
    shown.click(".help summary")
    assert "Typical map removed" in shown.text(".help")
    assert shown.errors() == []
    write_run(tmp_path / "other", [Page(100, blobs={TAG: check_of_two(is_sure=False)})])
    write_report([tmp_path / "other"], tmp_path / "report.html")
    shown.open()
    assert "absence" not in shown.text("main")


def test_controls_of_classes(shown):
    shown.open(run="first")
    shown.set("beside", 1)
    heads = shown.run("return [...document.querySelectorAll('.class:first-child h3')].map((h) => h.innerText)")
    assert heads == ["step 0", "step 100"]
    assert shown.count(".class:first-child .row .atlas canvas") == 4  # the atlas of each step
    assert shown.count(".class:first-child .facts .atlas") == 0
    shown.set("map", "01_last")
    assert shown.count(".class:first-child .patches .patch") == 2
    shown.set("order", "name")
    assert shown.text(".class h2") == "cat"
    width = "return document.querySelector('.patches canvas').width"
    before = shown.run(width)
    shown.set("patch", 48)
    assert shown.run(width) == 48 < before
    for name in ("beside=1", "map=01_last", "order=name", "patch=48"):
        shown.address_has(name)


def test_a_click_on_a_patch_shows_its_whole_image(shown):
    shown.open(run="first")
    shown.click(".class:first-child .patches .patch", 1)
    until(lambda: shown.count("dialog[open]"))
    assert shown.text("dialog h2") == f"{EVIL}: patch 2 of 3"
    assert "8.0 times the mean" in shown.text("dialog dl")
    drawn = shown.pixels("dialog .views canvas")
    middle = drawn[len(drawn) // 8, drawn.shape[1] // 8].astype(int)
    assert abs(middle - 100).max() <= 2  # the grey of its image, outside of the box
    edge = drawn[round(0.25 * len(drawn)), round(0.65 * drawn.shape[1])]
    assert edge.min() > 150  # the outline of the box
    maps = []
    for number, name in enumerate(("all layers combined", f"net.{EVIL}", "last")):
        shown.click("dialog .others button", number)
        assert shown.text("dialog .views figure:last-child") == name
        assert shown.run("return document.activeElement.innerText.trim()") == name
        maps.append(shown.pixels("dialog .views canvas", 1).astype(int))
    alike = [np.corrcoef(maps[1].ravel(), one.ravel())[0, 1] for one in (maps[0].swapaxes(0, 1), maps[0], maps[2])]
    assert alike[0] > max(alike[1:]) + 0.3  # one map is the other, transposed, on a coarser grid


def test_compare_two_steps(shown):
    shown.open(**{**IMAGES, "mode": "compare"}, by="step", layer="net.early", opacity=1, step2=0)
    heads = shown.run("return [...document.querySelectorAll('.grid .head')].map((h) => h.innerText)")
    assert heads == ["", "image", "step 0", "step 100", "difference"]  # time goes from left to right
    for column, step in ((1, 0), (2, 100)):
        values = np.float16(ramp(step, 1)).astype(np.float32)
        np.testing.assert_array_equal(shown.pixels(*cells(1, column)), expected(values, 1, opacity=1.0, scale="image"))
    before = shown.pixels(*cells(1, 3)).astype(int)
    grew = ramp(100, 1) / ramp(100, 1).mean() - ramp(0, 1) / ramp(0, 1).mean()
    is_red = before[..., 0] > before[..., 2] + 40
    assert is_red[grew > 1].all()
    assert not is_red[grew < 0].any()
    shown.set("step2", "last")
    assert np.any(shown.pixels(*cells(1, 3)) != before)


def test_compare_two_runs_and_two_kinds(shown):
    shown.open(mode="compare", by="run", run="first", tile=64)
    assert "The same images" in shown.text(".note")
    assert EVIL in shown.run("return [...document.querySelectorAll('.grid .head')].map((h) => h.innerText)")
    shown.run("document.querySelector('[data-value=kind]').click()")
    until(lambda: "probe_contrast" in shown.text(".grid"))


def test_of_two_runs_images_that_are_the_same_have_a_difference(browser, tmp_path):
    for run, second in (("a", 1), ("b", 4)):
        images = Images("probe", "true", run, [image(0), image(second)])
        layer = Layer("net", np.stack([ramp(5, n) for n in range(2)]))
        sets = [Maps("probe_order0", "order0", "", False, "probe", [layer])]
        write_run(tmp_path / run, [Page(0, blobs={TAG: encode_event(0, [images], sets)})])
    write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "report.html")
    shown = Shown(browser, (tmp_path / "report.html").as_uri())
    shown.open(mode="compare", by="run", tile=64)
    heads = shown.run("return [...document.querySelectorAll('.grid .head')].map((h) => h.innerText)")
    assert heads == ["", "image", "a", "image", "b", "difference"]
    same, other = (shown.pixels(".grid .cell canvas", 5 * row + 4).astype(int) for row in (0, 1))
    assert (abs(same - 60) < 3).all()  # the same maps: nothing but the image
    assert (abs(other - 64) > 3).any()  # stripes
    assert shown.errors() == []


def test_of_two_runs_curves_are_solid_and_dashed_with_both_values(shown):
    shown.open(mode="compare", by="run", run="first")
    assert shown.text(".curves h2").endswith(f"solid: first, dashed: {EVIL}")
    assert shown.count(".chart:first-child polyline.second") == 2
    assert "cat 2.00 2.00" in shown.text(".chart .legend")
    assert shown.text(".metrics").replace("\n", " ") == f"first: val_acc 0.78 {EVIL}: val_acc 0.78"


def test_an_event_without_the_probe_has_the_last_maps_of_it(browser, tmp_path):
    def blob(step, source):
        images = Images(source, "true", source, [image(0)])
        maps = Maps("probe_order0" if source == "probe" else "order0", "order0", "", False, source, [layer(step)])
        return encode_event(step, [images], [maps])

    def layer(step):
        return Layer("net", ramp(step, 0)[None])

    sources = {0: "probe", 5: "probe", 6: "batch", 7: "batch", 9: "probe"}
    write_run(tmp_path / "run", (Page(step, blobs={TAG: blob(step, of)}) for step, of in sources.items()))
    write_report([tmp_path / "run"], tmp_path / "report.html")
    shown = Shown(browser, (tmp_path / "report.html").as_uri())
    for step, of in ((9, 9), (7, 5), (5, 5)):
        shown.open(mode="images", step=step, tile=64, scale="image", opacity=1)
        assert ("maps of step 5 (step 7 has none of this kind)" in shown.text(".note")) is (of < step)
        maps = np.float16(ramp(of, 0)).astype(np.float32)
        np.testing.assert_array_equal(
            shown.pixels(".grid .cell canvas", 1), expected(maps, 0, opacity=1.0, scale="image")
        )
    shown.open(mode="images", step=7, kind="order0")
    assert "Images of the training batch of this step" in shown.text(".note")
    shown.open(mode="compare", step=7, step2="first")
    assert shown.run("return [...document.querySelectorAll('.grid .head')].map((h) => h.innerText)")[2:4] == [
        "step 0",
        "step 5",
    ]
    assert shown.errors() == []


def test_curves_show_their_values_and_a_click_goes_to_a_step(shown):
    shown.open(run="first", mode="images")
    assert shown.text(".chart figcaption").startswith("Strength")
    assert shown.text(".chart .legend").split() == ["early", "1.00", *EVIL.split(), "0.50"]
    shown.open(run="first")
    assert shown.count(".chart") == 3
    assert shown.text(".chart figcaption").startswith("Lift")
    legend = shown.text(".chart .legend")
    assert "cat 2.00" in legend
    assert f"{EVIL} 101" in legend
    shown.run("""
        const chart = document.querySelector('.chart svg'), box = chart.getBoundingClientRect();
        chart.dispatchEvent(new MouseEvent('click', {clientX: box.left + 0.55 * box.width, clientY: box.top + 5}));""")
    shown.drawn("classes first 10")


def test_curves_of_the_run_before_are_gone_at_once(shown):
    shown.open(run="first")
    assert "Lift" in shown.text(".curves")
    seen = shown.run(
        """
        const control = document.querySelector('[name=run]');
        delete document.querySelector('.page').dataset.drawn;
        control.value = [...control.options].find((one) => one.text === arguments[0]).value;
        control.dispatchEvent(new Event('change'));
        return document.querySelector('.curves').innerText;""",
        EVIL,
    )
    assert seen == ""
    shown.drawn(f"classes {EVIL} 100")
    assert "Lift" in shown.text(".curves")


def test_a_class_has_one_colour_in_all_charts(browser, tmp_path):
    for run, steps in (("a", (0, 10)), ("b", (0,))):
        curves = {f"normgrad/hot_spot/{name}": 1.0 for name in ("dog", "cat", "ant")}
        curves |= {"normgrad/check/covered/dog": 1.0, "normgrad/part_of_signal/cat": 1.0, "normgrad/cost": 1.0}
        write_run(tmp_path / run, [Page(step, scalars=curves, blobs={TAG: event(step)}) for step in steps])
    write_report([tmp_path], tmp_path / "report.html")
    shown = Shown(browser, (tmp_path / "report.html").as_uri())
    assert shown.open() == "classes a 10"  # the newest run
    colours = {"ant": set(), "cat": set(), "dog": set()}
    keys = shown.run("""
        const colour = (key) => getComputedStyle(key.firstChild).backgroundColor;
        return [...document.querySelectorAll('.key')].map((key) => [key.innerText, colour(key)])""")
    for text, colour in keys:
        colours.get(text.split()[0], set()).add(colour)
    assert [len(of) for of in colours.values()] == [1, 1, 1]
    assert len(set.union(*colours.values())) == 3
    assert shown.errors() == []


def test_runs_are_chosen_by_name(shown):
    shown.open()
    names = shown.run("return [...document.querySelector('[name=run]').options].map((o) => o.text)")
    assert set(RUNS) <= set(names)
    shown.set(
        "run",
        shown.run("return [...document.querySelector('[name=run]').options].find((o) => o.text === 'first').value"),
    )
    assert shown.drawn() == "classes first 100"
    assert "val_acc 0.78" in shown.text(".metrics")


WILD = [
    {"mode": EVIL, "run": EVIL, "step": "-1", "patch": "1e12", "map": "../..", "order": "[]"},
    {"mode": "images", "step": "NaN", "kind": "none", "tile": "1e12", "opacity": "-7", "scale": "x", "colors": EVIL},
    {
        "mode": "compare",
        "by": "run",
        "run2": "none",
        "tile": "-1e12",
        "opacity": "Infinity",
        "layer": EVIL,
        "typical": "2",
    },
    {"mode": "compare", "by": "step", "step2": "1e400", "step": "%", "__proto__": "1", "constructor": "2"},
]


@pytest.mark.parametrize("chosen", WILD, ids=range(len(WILD)))
def test_any_address_shows_the_page(shown, chosen):
    shown.open(**chosen)
    assert shown.text(".message") == ""
    assert shown.run("return Math.max(...[...document.querySelectorAll('canvas')].map((c) => c.width))") < 1000


def test_nothing_from_a_log_is_markup(shown):
    for mode in ("classes", "images", "compare"):
        shown.open(mode=mode)
        assert EVIL in shown.text(".page")
        assert shown.count("img") == 0
    shown.run("document.querySelector('.curves').scrollIntoView()")


def test_every_control_has_a_name_for_screen_readers(shown):
    for mode in ("classes", "images", "compare"):
        shown.open(mode=mode)
        nameless = shown.run("""
            return [...document.querySelectorAll('button, input, select, svg')]
              .filter((e) => !(e.getAttribute('aria-label') || e.labels?.[0]?.innerText || e.innerText))
              .map((e) => e.outerHTML);""")
        assert nameless == []


def test_a_step_that_cannot_be_shown_says_why_and_the_others_go_on(browser, filled):
    write_run(filled.log / "broken", [page(0), Page(5, blobs={TAG: b"not ours"})])
    try:
        shown = Shown(browser, filled.tab)
        until(
            lambda: (
                shown.open(run="broken")
                and shown.run("return document.querySelector('.page').dataset.drawn") == "classes broken 5"
            )
        )
        assert "it is too short" in shown.text(".message")
        shown.run("document.querySelector('[aria-label=\"Step before\"]').click()")
        shown.drawn("classes broken 0")
        assert shown.text(".message") == ""
    finally:
        shutil.rmtree(filled.log / "broken")
        browser.get_log("browser")


def test_inside_of_tensorboard_the_address_keeps_what_is_chosen(browser, filled):
    browser.get("about:blank")
    browser.get(f"{filled.url}/#normgrad&p.normgrad.mode=images&p.normgrad.run=first&p.normgrad.tile=64")
    frame = until(lambda: browser.execute_script("return document.querySelector('iframe')"))
    browser.switch_to.frame(frame)
    shown = Shown(browser, filled.url)
    shown.drawn("images first 100")
    shown.click("[data-value=compare]")
    shown.drawn("compare first 100")
    browser.switch_to.default_content()
    shown.address_has("p.normgrad.mode=compare")
    ground = "return getComputedStyle(document.querySelector('iframe').contentDocument.body).backgroundColor"
    for is_dark, colour in ((True, "rgb(21, 24, 29)"), (False, "rgb(255, 255, 255)")):
        browser.execute_script("document.body.classList.toggle('dark-mode', arguments[0])", is_dark)
        until(lambda colour=colour: browser.execute_script(ground) == colour)
    hash_ = browser.execute_script("return location.hash")
    assert hash_.startswith("#normgrad&")
    assert "p.normgrad.tile=64" in hash_
    assert [error for error in shown.errors() if "plugin/normgrad" in error["message"]] == []


def test_a_notebook_shows_the_page(browser, tmp_path):
    write_known(tmp_path / "log")
    (tmp_path / "cell.html").write_text(f"<!DOCTYPE html>{show_report(tmp_path / 'log', height=500)._repr_html_()}")
    shown = Shown(browser, (tmp_path / "cell.html").as_uri())
    browser.get(shown.address)
    browser.switch_to.frame(0)
    assert shown.drawn().startswith("classes")
    shown.set("patch", 48)
    assert shown.run("return document.querySelector('.patches canvas').width") == 48
    assert shown.errors() == []
    browser.switch_to.default_content()


def replaced(header, place, value):
    for key in place[:-1]:
        header = header[key]
    header[place[-1]] = value


@pytest.mark.parametrize(("seed", "count"), [(3, 6), *[pytest.param(s, 60, marks=pytest.mark.slow) for s in range(3)]])
def test_events_with_anything_in_their_header_are_shown_or_refused_in_words(browser, tmp_path, seed, count):
    """Headers that pass the server's checks, but say what cannot be."""
    chance, blobs = random.Random(seed), {}
    places = [place for place in paths(header_of(event(0))) if place]
    values = [0, 1, 2**40, -1.5, 1e299, "", "x", EVIL, None, [], [0], [0, 0], [1, 9999], [[0.5, 0.5]], {}, True]
    while len(blobs) < count:
        blob = with_header(event(0), partial(replaced, place=chance.choice(places), value=chance.choice(values)))
        if isinstance(decode(blob), Content):
            blobs[len(blobs)] = blob
    write_run(tmp_path / "run", (Page(step, blobs={TAG: blob}) for step, blob in blobs.items()))
    write_report([tmp_path / "run"], tmp_path / "report.html")
    shown = Shown(browser, (tmp_path / "report.html").as_uri())
    for mode in ("classes", "images", "compare"):
        shown.open(mode=mode, step=0)
        for _ in range(count - 1):
            shown.press("ArrowRight")
            shown.drawn()
            assert not re.search("undefined|null|not a function", shown.text(".message")), shown.text(".message")
    assert shown.errors() == []
