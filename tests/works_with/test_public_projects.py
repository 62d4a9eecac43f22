"""Public projects, trained as their users do, with nothing set but `NORMGRAD=1`: the same bits, maps, true warnings.

The scripts are in `scripts/public`. Each runs three times, in processes of their own: without the switch, with it, and
with maps of order 1 at every second step. All is offline: random weights, random or drawn images.
"""

import io
import json
import os
import re
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
from PIL import Image, ImageStat
from run_forked import Forks
from run_script import PANEL, SCRIPTS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from twice import same

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the scripts run in forks of one process"),
]

ORDER0 = {"NORMGRAD": "1", "NORMGRAD_EVERY_N_STEPS": "1"}
ORDER1 = {**ORDER0, "NORMGRAD_ORDER1_EVERY_N_STEPS": "2"}
KINDS_OF_ORDER1 = ("order1", "adversarial", "contrast")

TIMM_RESNET = ("act1", "layer1.1", "layer2.1", "layer3.1", "layer4.1")
TORCHVISION_RESNET = ("relu", *TIMM_RESNET[1:])
RESNET_IN_A_SEQUENCE = ("backbone.2", *(f"backbone.{i}.1" for i in range(4, 8)))

NO_IMAGES, NO_GRID, NO_GRID_IN_TRAINING = "(N, C, H, W)", "grid", '"auto"'
NEEDS_BATCH, FROZEN, MANUAL = "`per_image`", "gets a gradient", "NORMGRAD_ORDER1_EVERY_N_STEPS"
"""What warnings name."""


@dataclass
class Project:
    """A script, and what its user sees with `NORMGRAD=1`.

    Args:
        script: its name, without `.py`.
        layers: those that auto takes, in the network's order; None: some, but not yet those that a person would name.
        steps: those with order-0 panels.
        order1: those with panels of order 1.
        warned: what each of the warnings names.
        warned_by_order1: the same for those that come with order 1 only.
        is_logged: in TensorBoard's store; else as files beside the run.
    """

    script: str
    layers: tuple[str, ...] | None = ()
    steps: tuple[int, ...] = (0, 1, 2)
    order1: tuple[int, ...] = (0, 2)
    warned: tuple[str, ...] = ()
    warned_by_order1: tuple[str, ...] = ()
    is_logged: bool = True


def projects(*rows):
    return pytest.mark.parametrize("project", rows, ids=lambda project: project.script)


@pytest.fixture(scope="class")
def forks(request):
    """A process that has imported what the scripts of this class need."""
    for library in {module.partition(".")[0] for module in request.cls.imports}:
        if find_spec(library) is None:
            pytest.skip(f"could not find {library}: it comes with the extra `projects`")
    forks = Forks(request.cls.imports, keeps=True)
    yield forks
    forks.close()


def check(project, forks, folder):
    """Run a project in three ways, and compare."""
    script = SCRIPTS / "public" / f"{project.script}.py"
    assert script.read_text().lower().count("normgrad") == 1  # it says that it knows nothing of it
    ends = {}
    for way, variables in {"plain": {}, "order0": ORDER0, "order1": ORDER1}.items():
        ends[way] = forks.run(folder / way, script, **variables)
        assert ends[way].returncode == 0, ends[way].stderr
    assert pictures(folder / "plain") == ({}, {})
    assert not warnings_of(ends["plain"])
    for way in ("order0", "order1"):
        assert_same(folder / "plain", folder / way)

    assert_name(warnings_of(ends["order0"]), project.warned)
    assert_name(warnings_of(ends["order1"]), (*project.warned_by_order1, *project.warned))
    layers = layers_of(folder / "order0")
    if project.layers is None:
        assert layers
    else:
        assert layers == list(project.layers)
    of_order0 = panels(("order0",), layers, project.steps)
    of_order1 = panels(KINDS_OF_ORDER1, layers, project.order1)
    assert_shown(folder / "order0", project, of_order0)
    assert_shown(folder / "order1", project, {**of_order0, **of_order1})
    assert_maps(folder / "order1", ["order0", *(KINDS_OF_ORDER1 if of_order1 else ())], layers)


def layers_of(folder):
    return list(torch.load(folder / "maps.pt")["maps"]["order0"])


def panels(kinds, layers, steps):
    """The panels of these kinds: the tag of each layer, and its steps."""
    names = [f"{i:02d}_{layer}" for i, layer in enumerate(layers)]
    return {f"normgrad_{kind}/{name}": list(steps) for kind in kinds for name in names if steps}


def warnings_of(ended):
    """The warnings that NormGrad gave, as they were printed."""
    printed = re.findall(r"^(\S+\.py):\d+: (?:\w+Warning: )?(.*)$", ended.stderr, re.MULTILINE)
    return [text for file, text in printed if "normgrad_lightning" in file or "normgrad" in text.lower()]


def assert_name(texts, names):
    assert len(texts) == len(names), texts
    for text, name in zip(texts, names, strict=True):
        assert name in text


def assert_same(plain, watched):
    """Raise if a run with the switch ended in another state than the one without."""
    ends = [torch.load(folder / "last.ckpt", weights_only=False) for folder in (plain, watched)]
    for what in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step"):
        assert same(ends[0][what], ends[1][what]), f"{what} differ with {watched.name}"
    assert list(ends[0]["callbacks"]) == list(ends[1]["callbacks"])
    numbers = [json.loads((folder / "random.json").read_text()) for folder in (plain, watched)]
    assert numbers[0] == numbers[1]


def pictures(folder):
    """The panels of a run by tag and step: those in TensorBoard's store, and those in files."""
    logged, files = {}, {}
    for file in sorted(folder.rglob("events*")):
        events = EventAccumulator(str(file), size_guidance={"images": 0})
        events.Reload()
        for tag in (tag for tag in events.Tags()["images"] if PANEL.match(tag)):
            for event in events.Images(tag):
                logged.setdefault(tag, {})[event.step] = event.encoded_image_string
    for file in sorted(folder.rglob("normgrad_*/*/step_*.jpg")):
        tag = f"{file.parent.parent.name}/{file.parent.name}"
        files.setdefault(tag, {})[int(file.stem.removeprefix("step_"))] = file.read_bytes()
    return logged, files


def assert_shown(folder, project, expected):
    """Raise if there are other panels than expected, or if one of them is empty."""
    logged, files = pictures(folder)
    shown, none = (logged, files) if project.is_logged else (files, logged)
    assert {tag: sorted(of_steps) for tag, of_steps in sorted(shown.items())} == dict(sorted(expected.items()))
    assert not none
    for of_steps in shown.values():
        for encoded in of_steps.values():
            assert max(ImageStat.Stat(Image.open(io.BytesIO(encoded))).stddev) > 5


def assert_maps(folder, kinds, layers):
    """Raise if the last maps of a layer are empty, or have not the images' aspect."""
    kept = torch.load(folder / "maps.pt")
    assert sorted(kept["maps"]) == sorted(kinds)
    for kind, of_layers in kept["maps"].items():
        assert list(of_layers) == layers
        for layer, maps in of_layers.items():
            assert maps.isfinite().all(), (kind, layer)
            assert maps.flatten(1).abs().amax(1).gt(0).all(), (kind, layer)
            scales = [image / cells for image, cells in zip(kept["images"].shape[2:], maps.shape[1:], strict=True)]
            assert max(scales) < 1.5 * min(scales), (layer, scales)


class TestLightly:
    imports = ("pytorch_lightning", "lightly.loss", "lightly.models.modules", "lightly.transforms", "timm")

    @projects(
        Project("lightly_simclr", RESNET_IN_A_SEQUENCE, order1=(), warned_by_order1=(NEEDS_BATCH,)),
        Project("lightly_byol", RESNET_IN_A_SEQUENCE),
        Project("lightly_dino", tuple(f"student_backbone.vit.blocks.{i}" for i in range(2))),
        Project("lightly_mae", None, warned=("'backbone.vit.",)),  # the encoder sees some patches only
    )
    def test_it_trains_as_before_and_is_shown(self, project, forks, tmp_path):
        check(project, forks, tmp_path)

    def test_a_loss_of_the_batch_has_order_1_maps_of_the_batch(self, forks, tmp_path):
        """The remedy that SimCLR's warning names."""
        script = SCRIPTS / "public" / "lightly_simclr.py"
        done = forks.run(tmp_path / "batch", script, **ORDER1, NORMGRAD_PER_IMAGE="0")
        assert done.returncode == 0, done.stderr
        assert not warnings_of(done)
        assert_maps(tmp_path / "batch", ["order0", *KINDS_OF_ORDER1], list(RESNET_IN_A_SEQUENCE))


class TestTorchGeo:
    imports = ("lightning.pytorch", "torchgeo.datamodules", "torchgeo.trainers", "pycocotools")

    @projects(
        Project("torchgeo_classification", tuple(f"model.{name}" for name in TIMM_RESNET)),
        Project("torchgeo_segmentation", ("model.encoder.layer4.1", *(f"model.decoder.blocks.{i}" for i in range(4)))),
        Project("torchgeo_detection", None),
    )
    def test_it_trains_as_before_and_is_shown(self, project, forks, tmp_path):
        check(project, forks, tmp_path)


class TestAnomalib:
    imports = ("lightning.pytorch", "anomalib.data", "anomalib.engine", "anomalib.loggers", "anomalib.models")

    @projects(
        Project(
            "anomalib_stfpm",
            tuple(f"model.student_model.feature_extractor.{name}" for name in TIMM_RESNET[:4]),
            is_logged=False,
        ),
        Project("anomalib_ganomaly", None, steps=(0, 2, 4), order1=(), warned_by_order1=(MANUAL,)),
    )
    def test_it_trains_as_before_and_is_shown(self, project, forks, tmp_path):
        check(project, forks, tmp_path)


class TestMonai:
    imports = (
        "lightning.pytorch",
        "monai.data",
        "monai.inferers",
        "monai.losses",
        "monai.metrics",
        "monai.networks.nets",
    )

    @projects(Project("monai_unet3d", None))
    def test_it_trains_as_before_and_is_shown(self, project, forks, tmp_path):
        check(project, forks, tmp_path)


class TestLightning:
    """Lightning's own examples."""

    imports = ("lightning.pytorch.cli", "torchvision")

    @projects(
        Project("lightning_imagenet", tuple(f"model.{name}" for name in TORCHVISION_RESNET), is_logged=False),
        Project("lightning_segmentation", None),
        Project(
            "lightning_fine_tuning",
            ("feature_extractor.6.1", "feature_extractor.7.1"),
            (2, 3, 4, 5),
            (2, 4, 5),
            (FROZEN,),
        ),
        Project("lightning_backbone_classifier", warned=(NO_GRID,)),
        Project("lightning_gan", warned=(NO_GRID_IN_TRAINING,), warned_by_order1=(MANUAL,)),
        Project("lightning_autoencoder", warned=(NO_IMAGES,)),
        Project("lightning_language_model", warned=(NO_IMAGES,)),
        Project("lightning_bug_report", warned=(NO_IMAGES,)),
    )
    def test_it_trains_as_before_and_is_shown(self, project, forks, tmp_path):
        check(project, forks, tmp_path)
