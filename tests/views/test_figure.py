"""Figures of maps, and `Maps`, the dict that shows itself."""

import copy
import gc
import io
import pickle
from collections import OrderedDict
from weakref import ref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning_utilities.core.apply_func import apply_to_collection
from networks import ResNet, batch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import default_collate

from normgrad_lightning import NormGrad, NormGradCallback, grad_cam_maps, order0_maps, order1_maps
from normgrad_lightning.maps import KINDS, MapSet
from normgrad_lightning.views import figure
from normgrad_lightning.views.drawing import input_tiles, overlay
from normgrad_lightning.views.figure import figure_of, jpeg_of, with_heading
from normgrad_lightning.views.map_dict import Maps
from normgrad_lightning.views.scales import scale_maps
from normgrad_lightning.views.style import Style

LAYERS = ["stage1", "stage3"]
TILE = 96


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return ResNet()


def recorded(model, images_labels, **options):
    with NormGrad(model, LAYERS, **options) as recorder:
        loss_fn(model, images_labels).backward()
    return recorder


# ---------------------------------------------------------------- where things are in a picture


def places_of(tile, picture, tolerance=0.5):
    """Rows and columns where in a picture the tile is, to this mean difference; the best first."""
    pixels, tile = np.asarray(picture.convert("RGB")).astype(int), tile[..., :3].astype(int)
    height, width = tile.shape[:2]
    windows = np.lib.stride_tricks.sliding_window_view(pixels, (height, width), (0, 1))
    probes = [(0, 0), (-1, 9), (height // 2, width // 2), (7, -1)]
    far = sum(np.abs(windows[..., y, x] - tile[y, x]).sum(-1) for y, x in probes)
    nearest = np.stack(np.unravel_index(np.argsort(far, axis=None)[:100], far.shape), 1).tolist()
    likely = [(y, x) for y, x in nearest if far[y, x] <= 12 * (1 + 8 * tolerance)]
    errors = {at: np.abs(windows[at] - tile.transpose(2, 0, 1)).mean() for at in likely}
    return sorted((at for at, error in errors.items() if error < tolerance), key=errors.get)


def place_of(tile, picture, tolerance=0.5):
    """The one place; of a picture that went through JPEG, the best one."""
    found = places_of(tile, picture, tolerance)
    assert found, "it is nowhere"
    assert tolerance > 1 or len(found) == 1, found
    return found[0]


def check_picture(picture, images, maps, *, signed=False, tolerance=0.5, **normalised):
    """Each image has a row of its own: the image, then each map that is not zero, in colour over it."""
    style = Style(**normalised)
    tiles = input_tiles(images.numpy(), mean=style.mean, std=style.std, tile_size=TILE)
    tops = []
    for i, tile in enumerate(tiles):
        row = [place_of(tile, picture, tolerance)]
        for m in (m for m in maps.values() if m[i].any()):
            scaled = scale_maps(m[i : i + 1].numpy(), style.scale, signed=signed)[0]
            covered = overlay(tile, scaled, colormap=style.colormap_of(signed=signed), signed=signed)
            row.append(place_of(covered, picture, tolerance))
        assert len({top for top, _ in row}) == 1
        lefts = [left for _, left in row]
        assert lefts == sorted(lefts)
        tops.append(row[0][0])
    assert tops == sorted(tops)


def opened(encoded):
    return Image.open(io.BytesIO(encoded))


# ---------------------------------------------------------------- what is returned shows itself


def test_every_function_shows_its_maps_over_the_images(model):
    images, labels = batch(3, (16, 24))
    recorder = recorded(model, (images, labels), kinds=["order0", "grad_cam"])
    for name, made in {
        "order0": recorder.maps,
        "grad_cam": recorder.maps_of("grad_cam"),
        "order0 ": order0_maps(model, loss_fn, (images, labels), LAYERS),
        "grad_cam ": grad_cam_maps(model, (images, labels), LAYERS, loss_fn=loss_fn),
        "order1": order1_maps(model, loss_fn, (images, labels), LAYERS),
        "adversarial": order1_maps(model, loss_fn, (images, labels), LAYERS, adversarial=True, per_image=False),
    }.items():
        assert type(made) is Maps
        assert made.kind == name.strip()
        picture = opened(made._repr_jpeg_())
        assert picture.format == "JPEG"
        check_picture(picture, images, made, tolerance=6)


def test_at_most_eight_images_are_shown(model):
    images, labels = batch(11, (16, 16))
    made = order0_maps(model, loss_fn, (images, labels), ["stage3"])
    assert len(made["stage3"]) == 11
    picture = opened(made._repr_jpeg_())
    check_picture(picture, images[:8], {"stage3": made["stage3"][:8]}, tolerance=6)
    assert not places_of(input_tiles(images[8:9].numpy(), tile_size=TILE)[0], picture, 6)


def test_the_images_are_what_the_network_saw(model):
    """Not what the caller gave, nor what the caller makes of it later."""
    images, labels = batch(2, (16, 16))

    class Flips(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x):
            return self.net(x.flip(3))

    made = order0_maps(Flips(), loss_fn, (images, labels), ["net.stage3"])
    seen = images.flip(3)
    images.zero_()
    check_picture(opened(made._repr_jpeg_()), seen, made, tolerance=6)


def test_signals_and_volumes_and_maps_without_images_are_shown():
    torch.manual_seed(0)
    for convolution, size in ((nn.Conv1d, (40,)), (nn.Conv3d, (6, 12, 12))):
        net = nn.Sequential(convolution(2, 3, 3, padding=1), nn.ReLU())
        with NormGrad(net, "0") as recorder:
            net(torch.randn(2, 2, *size)).square().sum().backward()
        assert opened(recorder.maps._repr_jpeg_()).height > 50
    without = Maps({"a": torch.rand(2, 5, 5)})
    grey = overlay(input_tiles(np.zeros((1, 1, 5, 5)), tile_size=TILE)[0], scale_maps(without["a"][:1].numpy())[0])
    place_of(grey, figure_of(without.as_map_set(), Style()))


def test_what_cannot_be_drawn_is_a_dict_as_before(monkeypatch):
    for odd in (Maps(), Maps({"a": 3}), Maps({"a": torch.rand(3)}), Maps({"a": torch.rand(2, 4, 4)}, kind="none")):
        assert odd._repr_jpeg_() is None
        assert repr(odd) == repr(dict(odd))

    def fail(*_):
        raise RuntimeError("we are broken")

    monkeypatch.setattr(figure, "figure_of", fail)
    assert Maps({"a": torch.rand(2, 4, 4)})._repr_jpeg_() is None


# ---------------------------------------------------------------- it is a dict


def test_it_is_a_dict_to_everyone(model):
    made = order0_maps(model, loss_fn, batch(2, (16, 16)), LAYERS)
    plain = dict(made)
    assert isinstance(made, dict)
    assert list(made) == LAYERS
    assert made | {} == plain
    assert {**made} == plain
    doubled = {name: 2 * m for name, m in plain.items()}
    two = apply_to_collection(made, Tensor, lambda m: 2 * m)
    assert list(two) == LAYERS
    assert all(torch.equal(two[name], doubled[name]) for name in LAYERS)
    collated = default_collate([made, made])
    assert all(torch.equal(collated[name], torch.stack([plain[name]] * 2)) for name in LAYERS)


def test_copies_are_plain_dicts(model):
    made = order0_maps(model, loss_fn, batch(2, (16, 16)), LAYERS)
    for other in (copy.copy(made), copy.deepcopy(made)):
        assert list(other) == LAYERS
        assert all(torch.equal(other[name], made[name]) for name in LAYERS)
    other["stage1"].zero_()
    assert made["stage1"].any()


def test_saved_it_is_a_plain_dict_that_loads_anywhere(model, tmp_path):
    made = order0_maps(model, loss_fn, batch(2, (16, 16)), LAYERS)
    pickled = pickle.dumps(made)
    torch.save({"maps": made}, tmp_path / "maps.pt")
    assert b"normgrad" not in pickled
    for loaded in (pickle.loads(pickled), torch.load(tmp_path / "maps.pt", weights_only=True)["maps"]):
        assert type(loaded) is OrderedDict
        assert list(loaded) == LAYERS
        assert all(torch.equal(loaded[name], made[name]) for name in LAYERS)


# ---------------------------------------------------------------- what it keeps


def test_it_keeps_copies_of_the_images_that_are_shown_and_not_the_batch(model):
    images, labels = batch(12, (16, 16))
    recorder = recorded(model, (images, labels))
    weak, made = ref(recorder.images), recorder.maps
    recorder.clear()
    gc.collect()
    assert weak() is None
    (kept,) = {id(images): images for images in made.images_of.values()}.values()
    assert torch.equal(kept, images[:8])
    assert kept.untyped_storage().nbytes() == kept.nbytes
    assert not kept.requires_grad
    images.zero_()
    assert kept.any()


def test_no_graph_hangs_on_it(model):
    images, labels = batch(2, (16, 16))
    images.requires_grad_()
    recorder = recorded(model, (images, labels))
    for made in (recorder.maps, order0_maps(model, loss_fn, (images, labels), LAYERS)):
        assert not any(m.requires_grad for m in made.values())
        assert opened(made._repr_jpeg_())


# ---------------------------------------------------------------- figures


def map_set(kind="order0", n=2, **more):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(n, 3, 16, 24, generator=generator)
    values = {name: torch.rand(n, *size, generator=generator) for name, size in (("a", (8, 12)), ("b", (2, 3)))}
    if KINDS[kind].signed:
        values = {name: m - 0.5 for name, m in values.items()}
    return MapSet(KINDS[kind], 3, values, images, dict.fromkeys(values, images), list(values), **more)


@pytest.mark.parametrize("kind", KINDS)
def test_a_figure_of_each_kind(kind):
    one = map_set(kind)
    check_picture(figure_of(one, Style()), one.images, one.maps, signed=KINDS[kind].signed)


def test_layers_of_other_images_have_rows_of_their_own():
    one = map_set()
    others = torch.rand(3, 3, 16, 24, generator=torch.Generator().manual_seed(1))
    two = MapSet(one.kind, 3, {**one.maps, "c": torch.rand(3, 4, 6)}, one.images, {**one.images_of, "c": others}, "abc")
    picture = figure_of(two, Style())
    check_picture(picture, one.images, one.maps)
    check_picture(picture, others, {"c": two.maps["c"]})


def test_the_figure_of_a_callback_is_that_of_its_latest_maps():
    callback = NormGradCallback(mean=0.5, std=0.25)
    callback.latest.update(order0=map_set(), contrast=map_set("contrast"))
    for kind in ("order0", "contrast"):
        plain = figure_of(callback.latest[kind], Style(mean=0.5, std=0.25))
        shown = callback.figure(kind) if kind != "order0" else callback.figure()
        assert shown.tobytes() == with_heading(plain, "step 3", left=2).tobytes()


def test_a_heading_stands_above_the_picture():
    picture = Image.new("RGB", (30, 20), (10, 200, 30))
    whole = with_heading(picture, "a sentence that is wider than the picture")
    assert whole.width > 200
    top = whole.height - 20
    assert whole.crop((0, top, 30, whole.height)).tobytes() == picture.tobytes()
    band = np.asarray(whole)[:top]
    assert band.min() < 60
    assert (band == 255).mean() > 0.8
    assert abs(np.asarray(opened(jpeg_of(whole))).astype(int) - np.asarray(whole)).mean() < 2
