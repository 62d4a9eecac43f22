"""What TensorBoard serves for the tab: a real one in a process of its own, with its slow and its fast data loader."""

import json
import random
import shutil
import subprocess
import sys
import tarfile
import urllib.error
import urllib.parse
import urllib.request
import venv
import zipfile

import pytest
import tomllib
from browser import CHROMIUM, DRIVER, chromium, until
from known_log import EVIL, RUNS, STEPS, TAG, event, write_known
from tab_demo import write_run
from tab_server import ENTRY, ROOT, running_tensorboard

from normgrad_lightning.page import Page
from normgrad_lightning.tensorboard_tab.loader import SAMPLES, Loader
from normgrad_lightning.tensorboard_tab.page_files import PAGE, PAGE_FILES, SCRIPTS

FLAGS = {"slow": ["--load_fast", "false"], "fast": ["--load_fast", "true", "--path_prefix", "/some/where"]}


@pytest.fixture(scope="module", params=FLAGS)
def address(request, tmp_path_factory):
    logdir = tmp_path_factory.mktemp("log")
    write_known(logdir)
    write_run(logdir / "broken", [Page(3, blobs={TAG: event(0)[:500]}), Page(4, blobs={TAG: b"\0" * 100})])
    write_run(logdir / "many", [Page(step, blobs={TAG: b"of another"}) for step in range(40)])
    cut = logdir / "cut" / "events.out.tfevents.1.cut"
    cut.parent.mkdir()
    whole = next((logdir / "first").iterdir()).read_bytes()
    cut.write_bytes(whole[: 2 * len(whole) // 3])
    with running_tensorboard(logdir, tmp_path_factory.mktemp("work"), *FLAGS[request.param]) as found:
        yield found


def ask(address, route, method="GET", **query):
    url = f"{address}/data/plugin/normgrad/{route}?{urllib.parse.urlencode(query)}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_the_tab_is_listed(address):
    listed = json.loads(urllib.request.urlopen(f"{address}/data/plugins_listing").read())
    assert listed["normgrad"]["enabled"]
    assert listed["normgrad"]["tab_name"] == "NormGrad"
    entry = urllib.request.urlopen(f"{address}/data/plugin_entry.html?name=normgrad").read().decode()
    assert "./entry.js" in entry


def test_all_runs_and_steps_are_listed(address):
    index = json.loads(ask(address, "index")[1])
    steps = {one["run"]: [step for step, _ in one["events"]] for one in index["runs"]}
    assert {run: steps[run] for run in RUNS} == {run: list(STEPS) for run in RUNS}
    assert steps["many"] == list(range(40))  # TensorBoard would keep ten
    assert index["metrics"]["first"] == {"val_acc": 100 / 128}
    assert steps["cut"] == [step for step in STEPS if step in steps["cut"]]


@pytest.mark.parametrize("run", RUNS)
def test_an_event_is_served_as_it_was_stored(address, run):
    assert ask(address, "event", run=run, tag=TAG, step=10) == (200, event(10))


def test_curves_are_ours_and_those_of_validation(address):
    curves = json.loads(ask(address, "curves", run="first", tag=TAG)[1])
    layers = {"normgrad_layers/energy/00_net.early", f"normgrad_layers/energy/01_net.{EVIL}"}
    assert set(curves) == {f"normgrad/hot_spot/{EVIL}", "normgrad/hot_spot/cat", "val_acc", *layers}
    assert curves["normgrad/hot_spot/cat"] == [[step, 2.0] for step in STEPS]


REFUSED = {
    "no arguments": ("event", {}, 400),
    "no step": ("event", {"run": "first", "tag": TAG}, 400),
    "a step in words": ("event", {"run": "first", "tag": TAG, "step": "ten"}, 400),
    "a negative step": ("event", {"run": "first", "tag": TAG, "step": "-1"}, 400),
    "a huge step": ("event", {"run": "first", "tag": TAG, "step": "9" * 400}, 400),
    "digits that are not ASCII": ("event", {"run": "first", "tag": TAG, "step": "٣"}, 400),
    "a step without an event": ("event", {"run": "first", "tag": TAG, "step": 11}, 404),
    "an unknown run": ("event", {"run": "../first", "tag": TAG, "step": 10}, 404),
    "an unknown tag": ("event", {"run": "first", "tag": "../../etc/passwd", "step": 10}, 404),
    "a tag that is a scalar": ("event", {"run": "first", "tag": "val_acc", "step": 10}, 404),
    "a long run": ("event", {"run": "a" * 5000, "tag": TAG, "step": 10}, 400),
    "cut off": ("event", {"run": "broken", "tag": TAG, "step": 3}, 422),
    "not ours": ("event", {"run": "broken", "tag": TAG, "step": 4}, 422),
    "curves of nothing": ("curves", {}, 400),
    "a file beside the page": ("../plugin.py", {}, 404),
    "a file far away": ("..%2f..%2f..%2f..%2fetc%2fpasswd", {}, 404),
    "a file with dots": ("/../../stored.py", {}, 404),
    "a folder": ("", {}, 404),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_cannot_be_answered_has_a_clear_status(address, name):
    route, query, status = REFUSED[name]
    found, text = ask(address, route, **query)
    assert found == status
    assert b"Traceback" not in text


def test_other_methods_are_refused(address):
    assert ask(address, "index", method="POST")[0] == 405


def test_any_arguments_have_a_status(address):
    chance = random.Random(0)
    values = [None, "", "first", TAG, "0", "10", "-0", "1e3", "%00", "\0", "../..", "ü" * 50, EVIL, "a/b", "[]", "0x10"]
    for _ in range(60):
        query = {name: chance.choice(values) for name in ("run", "tag", "step", "experiment")}
        query = {name: value for name, value in query.items() if value is not None}
        status, text = ask(address, chance.choice(["event", "curves", "index"]), **query)
        assert status in (200, 400, 404), query
        assert b"Traceback" not in text


def test_the_page_is_served_with_its_types(address):
    for name, kind in PAGE_FILES.items():
        with urllib.request.urlopen(f"{address}/data/plugin/normgrad/{name}") as answer:
            assert answer.headers.get_content_type() == kind
            assert answer.read() == (PAGE / name).read_bytes()


def test_the_table_of_files_is_all_there_is():
    assert {path.name for path in PAGE.iterdir()} == set(PAGE_FILES)


def test_no_file_of_the_page_writes_markup_or_loads_from_elsewhere():
    for name in SCRIPTS:
        code = (PAGE / name).read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
            assert word not in code, (name, word)
        assert "https:" not in code, name


class Flags:
    def __init__(self, samples):
        self.samples_per_plugin = samples


@pytest.mark.parametrize(
    ("given", "kept"), [(None, SAMPLES), ({}, SAMPLES), ({"images": 3}, SAMPLES), ({"normgrad": 5}, 5)]
)
def test_all_events_are_kept_unless_a_number_is_given(given, kept):
    flags = Flags(given)
    Loader().fix_flags(flags)
    assert flags.samples_per_plugin["normgrad"] == kept
    assert {**flags.samples_per_plugin, **(given or {})} == flags.samples_per_plugin


def test_the_plugin_is_light():
    """TensorBoard imports it at its start: neither torch nor Lightning, nor what only training needs."""
    code = (
        "import sys; from normgrad_lightning.tensorboard_tab.loader import Loader\n"
        "from tensorboard.plugins.base_plugin import TBContext\n"
        "Loader().load(TBContext()).get_plugin_apps()\n"
        "print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert {"torch", "pytorch_lightning", "lightning", "PIL", "cmap", "pandas"}.isdisjoint(loaded.split())


def test_the_entry_point_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [(name, target)] = project["entry-points"]["tensorboard_plugins"].items()
    assert f"[tensorboard_plugins]\n{name} = {target}\n" == ENTRY


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with a wheel and an sdist."""
    out = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT / "normgrad_lightning", out / "tree" / "normgrad_lightning")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, out / "tree")
    code = f"from setuptools import build_meta as b; b.build_sdist({str(out)!r}); b.build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=out / "tree", check=True, capture_output=True)
    return out


def test_the_wheel_and_the_sdist_hold_the_page(built):
    names = zipfile.ZipFile(*built.glob("*.whl")).namelist()
    assert {f"normgrad_lightning/tensorboard_tab/page/{name}" for name in PAGE_FILES} <= set(names)
    with tarfile.open(*built.glob("*.tar.gz")) as sdist:
        names = [name.partition("/")[2] for name in sdist.getnames()]
    assert {f"normgrad_lightning/tensorboard_tab/page/{name}" for name in PAGE_FILES} <= set(names)


@pytest.mark.nightly
@pytest.mark.browser
@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")
def test_the_tab_is_there_where_only_tensorboard_and_the_wheel_are_installed(built, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    for what in (["tensorboard", "setuptools<81"], ["--no-deps", *map(str, built.glob("*.whl"))]):
        subprocess.run([python, "-m", "pip", "install", "-q", *what], check=True, cwd=tmp_path)
    write_known(tmp_path / "log")
    with running_tensorboard(tmp_path / "log", tmp_path, python=python) as url, chromium(1280, 900) as browser:
        browser.get(f"{url}/#normgrad")
        browser.switch_to.frame(until(lambda: browser.execute_script("return document.querySelector('iframe')")))
        drawn = "return document.querySelector('.page')?.dataset.drawn"
        assert until(lambda: browser.execute_script(drawn)) == f"classes {min(RUNS)} 100"
