"""The models that people train: what `layers="auto"` takes of each, where its features are, and the same bits.

`table.md` has a line for each model, which a person has read; `table.py` writes it. The quick tests look at a few of
torchvision's, at the layers alone.
"""

import re
from importlib import metadata

import pytest
import torch
from torch import nn
from twice import row
from zoo import of_torchvision
from zoo.location import MARGIN, REVERSE_MARGIN
from zoo.look import look
from zoo.models import LIBRARIES, member, members
from zoo.notes import NOTES
from zoo.of_timm import LEFT_OUT
from zoo.table import DISTRIBUTIONS, HEADER, TABLE, line, rows

LINES = rows(TABLE.read_text())
LAYER = re.compile(
    r"`(?P<name>[^`]+)` (?P<grid>[\d×]+)(?: \((?P<ratio>[^)]+)\))?(?: (?P<verdict>unclear|elsewhere|shifted))?"
)
NEAR = 0.1
"""So close to a margin, another processor's rounding may change the verdict."""


def of(*libraries):
    return [name for name in LINES if name.partition("/")[0] in libraries]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """One thread: with several, sums have no order, and the bits of two runs differ without us."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(name):
    """Compare a model's line with the committed one."""
    library = name.partition("/")[0]
    pytest.importorskip(LIBRARIES[library])
    seen = look(member(name))
    if seen.error and version(library) != committed_version(library):
        pytest.skip(
            f"{library} {version(library)} cannot build or run it ({committed_version(library)} can): {seen.error}"
        )
    new = line(seen)
    print(new)
    assert essence(new) == essence(LINES[name])
    for (layer, verdict, ratio), (_, expected, _) in zip(verdicts(new), verdicts(LINES[name]), strict=True):
        is_near = any(abs(ratio - margin) < NEAR for margin in (MARGIN, REVERSE_MARGIN))
        assert verdict == expected or is_near, f"{layer}: {verdict} at {ratio}, but the table says {expected}"
    assert seen.same_bits or seen.error


def cells(text):
    return [cell.strip() for cell in text.strip().removeprefix("|").removesuffix("|").split("|")]


def essence(text):
    """A line without figures and verdicts: the model, its images, layers and grids, zero maps."""
    name, size, layers, zero, *_ = cells(text)
    found = [(match["name"], match["grid"]) for match in LAYER.finditer(layers)]
    return name, size, found or layers, zero


def verdicts(text):
    for match in LAYER.finditer(cells(text)[2]):
        ratio = (match["ratio"] or "1").replace(">", "").replace("∞", "inf")
        yield match["name"], match["verdict"], float(ratio)


def version(library):
    return metadata.version(DISTRIBUTIONS.get(library, library)).partition("+")[0]


def committed_version(library):
    return re.search(rf"\b{DISTRIBUTIONS.get(library, library)} ([\d.]+\d)", TABLE.read_text())[1]


QUICK = ("resnet18", "mobilenet_v3_small", "densenet121", "swin_t", "vit_b_16", "fasterrcnn_mobilenet_v3_large_fpn")
"""Models of torchvision that every run of the tests looks at."""


@pytest.mark.parametrize("name", [f"torchvision/{name}" for name in QUICK])
def test_auto_takes_the_layers_of_the_table(name, monkeypatch):
    pytest.importorskip("torchvision")
    normal = lambda t, mean=0.0, std=1.0, *_, **__: nn.init.normal_(t, mean, std)  # noqa: E731
    monkeypatch.setattr(nn.init, "trunc_normal_", normal)  # which takes longer than a step
    seen = look(member(name), bits=False, location=False)
    assert essence(line(seen)) == essence(LINES[name])


@pytest.mark.nightly
class TestTimm:
    @pytest.mark.parametrize("name", of("timm"))
    def test_line(self, name):
        check(name)

    def test_every_family_is_there(self):
        timm = pytest.importorskip("timm")
        if version("timm") != committed_version("timm"):
            pytest.skip(f"timm {version('timm')} may have other families than {committed_version('timm')}")
        names = {name.partition("/")[2] for name in of("timm")}
        missing = [family for family in timm.list_modules() if not names & set(timm.list_models(module=family))]
        assert sorted(missing) == sorted(LEFT_OUT)


@pytest.mark.nightly
class TestTransformers:
    @pytest.mark.parametrize("name", of("transformers"))
    def test_line(self, name):
        check(name)


@pytest.mark.nightly
class TestOthers:
    @pytest.mark.parametrize("name", of("torchvision", "smp", "monai", "diffusers"))
    def test_line(self, name):
        check(name)


@row(
    "Models",
    "every classification model of torchvision under 100 M parameters",
    "all have maps, at up to five depths; one of each family has a line in [the zoo](zoo/table.md)",
)
@pytest.mark.nightly
@pytest.mark.parametrize("name", of_torchvision.others())
def test_all_other_classifiers_of_torchvision_have_maps(name):
    seen = look(of_torchvision.other(name), location=False)
    assert not seen.error
    assert seen.same_bits
    assert 3 <= len(seen.layers) <= 5, seen.problems
    assert not any(layer.is_zero for layer in seen.layers)


@pytest.mark.nightly
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_table_has_every_model(library):
    pytest.importorskip(LIBRARIES[library])
    assert of(library) == [one.name for one in members([library])]


def test_notes_are_about_models_of_the_table_and_are_in_it():
    assert NOTES.keys() <= LINES.keys()
    assert {name: cells(text)[-1] for name, text in LINES.items() if cells(text)[-1]} == NOTES


def test_the_table_is_the_programs():
    assert TABLE.read_text().startswith(HEADER)


def test_no_line_is_known_to_be_wrong():
    assert not [name for name, note in NOTES.items() if note.startswith("Wrong")]


def test_nothing_is_wrong_in_silence():
    for name, text in LINES.items():
        _, _, layers, zero, _, bits, note = cells(text)
        is_wrong = zero or "elsewhere" in layers or "shifted" in layers or not LAYER.search(layers)
        assert note or not is_wrong, f"{name}: a line that is wrong needs a sentence in notes.py"
        assert bits == "yes", name
