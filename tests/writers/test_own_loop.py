"""Maps of a loop of one's own, read back from where they were logged."""

import lightning.fabric.loggers as new_loggers
import lightning_fabric.loggers as old_loggers
import pytest
import torch
from networks import ResNet, batch
from pytorch_lightning.loggers import CSVLogger
from run_script import shown
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from normgrad_lightning import NormGrad, log_maps
from normgrad_lightning.views.panels import layer_panels
from normgrad_lightning.views.style import Style

PLAIN = {"mean": None, "std": None, "colormap": "inferno", "opacity": 0.6, "scale": "robust", "tile_size": 128}


@pytest.fixture(scope="module")
def recorder():
    torch.manual_seed(0)
    model, (images, labels) = ResNet(), batch(6)
    with NormGrad(model, num_images=4) as recorder:
        torch.nn.functional.cross_entropy(model(images), labels).backward()
    return recorder


def drawn(maps, images, signed=False, **style):
    """The panels as JPEGs, by layer."""
    tags = dict(zip(maps, maps, strict=True))
    panels = layer_panels(maps, dict.fromkeys(maps, images), tags, Style(**{**PLAIN, **style}), signed=signed)
    return {panel.tag: panel.jpeg for panel in panels}


def written(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.jpg")}


def test_a_folder(recorder, tmp_path):
    log_maps(tmp_path / "a", recorder.maps, recorder.images, 40)
    log_maps(str(tmp_path / "a"), recorder.maps, recorder.images, 80, tag="mine")
    expected = drawn(recorder.maps, recorder.images)
    assert list(expected) == ["stage1", "stage2", "stage3"]
    assert written(tmp_path / "a") == {
        f"{tag}/0{i}_{name}/step_000000{step}.jpg": jpeg
        for tag, step in (("normgrad_order0", 40), ("mine", 80))
        for i, (name, jpeg) in enumerate(expected.items())
    }


@pytest.mark.parametrize(
    "style",
    [
        {"signed": True},
        {"mean": 0.1, "std": [0.2, 0.3, 0.4]},
        {"colormap": "viridis", "opacity": 1.0, "scale": "shared", "tile_size": 64},
    ],
)
def test_the_look(recorder, tmp_path, style):
    maps = {name: m - m.mean() for name, m in recorder.maps.items()} if "signed" in style else recorder.maps
    log_maps(tmp_path, maps, recorder.images, 0, **style)
    assert sorted(written(tmp_path).values()) == sorted(drawn(maps, recorder.images, **style).values())
    assert sorted(written(tmp_path).values()) != sorted(drawn(maps, recorder.images).values())


def test_maps_without_images_and_of_fewer_images(recorder, tmp_path):
    log_maps(tmp_path / "none", recorder.maps, None, 0)
    assert sorted(written(tmp_path / "none").values()) == sorted(drawn(recorder.maps, None).values())
    first = {name: m[:2] for name, m in recorder.maps.items()}
    log_maps(tmp_path / "two", first, recorder.images, 0)
    assert sorted(written(tmp_path / "two").values()) == sorted(drawn(first, recorder.images[:2]).values())
    with pytest.raises(ValueError, match="expected 2, one for each image, but got 4"):
        log_maps(tmp_path, recorder.maps, recorder.images[:2], 0)


def in_events(folder):
    (file,) = folder.rglob("events*")
    events = EventAccumulator(str(file), size_guidance={"images": 0})
    events.Reload()
    return {tag: [event.encoded_image_string for event in events.Images(tag)] for tag in events.Tags()["images"]}


@pytest.mark.parametrize(
    "make",
    [
        SummaryWriter,
        lambda folder: old_loggers.TensorBoardLogger(folder),
        lambda folder: new_loggers.TensorBoardLogger(folder),
    ],
    ids=["SummaryWriter", "lightning_fabric", "lightning.fabric"],
)
def test_tensorboard(recorder, tmp_path, make):
    logger = make(tmp_path)
    log_maps(logger, recorder.maps, recorder.images, 3)
    log_maps(logger, recorder.maps, recorder.images, 6)
    expected = drawn(recorder.maps, recorder.images)
    tags = {f"normgrad_order0/0{i}_{name}": jpeg for i, (name, jpeg) in enumerate(expected.items())}
    assert shown(tmp_path) == {tag: [3, 6] for tag in tags}
    assert in_events(tmp_path) == {tag: [jpeg] * 2 for tag, jpeg in tags.items()}


def test_files_beside_a_csv_logger(recorder, tmp_path):
    logger = CSVLogger(tmp_path)
    log_maps(logger, recorder.maps, recorder.images, 0)
    assert all(
        f"/{path}".startswith("/lightning_logs/version_0/normgrad/normgrad_order0/") for path in written(tmp_path)
    )


def test_what_is_asked_in_a_wrong_way_is_told_before_anything_is_written(recorder, tmp_path):
    for wrong in ({"step": -1}, {"step": 1.5}, {"colormap": "no"}, {"signed": 1}, {"mean": "x"}, {"scale": "mine"}):
        with pytest.raises(ValueError, match=f"`{next(iter(wrong))}`: expected"):
            log_maps(tmp_path, recorder.maps, recorder.images, **{"step": 0, **wrong})
    assert not list(tmp_path.iterdir())


def test_maps_in_half_precision(recorder, tmp_path):
    log_maps(tmp_path / "half", {name: m.bfloat16() for name, m in recorder.maps.items()}, recorder.images, 0)
    rounded = {name: m.bfloat16().float() for name, m in recorder.maps.items()}
    assert sorted(written(tmp_path / "half").values()) == sorted(drawn(rounded, recorder.images).values())
