"""The overview: what stands where, over which images, and that a real run logs it."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_drawing import is_hatched
from twice import Lit, train, watching

from normgrad_lightning import functional as NF
from normgrad_lightning.maps import KINDS, MapSet
from normgrad_lightning.views import lettering, overview, table
from normgrad_lightning.views.drawing import greys_of, input_tiles, overlays
from normgrad_lightning.views.style import Style

LAYERS = ["net.stem", "net.body.1", "net.body.2"]
TILE = 96


def map_set(kind="order0", count=3, layers=LAYERS, grid=(8, 8), **options):
    generator = torch.Generator().manual_seed(0)
    maps = {}
    for i, layer in enumerate(layers):
        maps[layer] = torch.rand(count, *(max(side // 2**i, 1) for side in grid), generator=generator) ** 3
    images = torch.rand(count, 3, *(2 * side for side in grid), generator=generator)
    return MapSet(KINDS[kind], 7, maps, images, dict.fromkeys(maps, images), list(layers), **options)


def drawn(one, **style):
    (picture,) = overview.overview([one], Style(**style)).pictures
    pixels = np.asarray(Image.open(io.BytesIO(picture.jpeg)).convert("RGB"))
    assert pixels.shape[:2] == (picture.height, picture.width)
    return pixels


def rows_and_columns(monkeypatch, one, **style):
    """The picture before it is encoded, cut into its tiles, `(rows, columns, H, W, 3)`, and what is written on it."""
    tables, words = [], []
    original_put, original_write = table.Table.put, lettering.write

    def put(self, row, column, tile):
        tables.append((self, column))
        original_put(self, row, column, tile)

    def write(picture, text, *rest):
        words.append(text)
        original_write(picture, text, *rest)

    monkeypatch.setattr(table.Table, "put", put)
    monkeypatch.setattr(table, "write", write)
    overview.overview([one], Style(**style))
    drawn, columns = tables[0][0], 1 + max(column for _, column in tables)
    return [[tile_at(drawn, row, column) for column in range(columns)] for row in range(rows_of(drawn))], words


def tile_at(table, row, column):
    top, left = table._top + row * table._down, table._left(0, column)
    return table.picture[top : top + table._height, left : left + table._width, :3]


def rows_of(table):
    return 1 + (table.picture.shape[0] - table._top - table._height) // table._down


def test_each_row_has_its_image_the_combined_map_and_the_depths(monkeypatch):
    one = map_set()
    tiles = input_tiles(one.images.numpy(), tile_size=TILE)
    greys = greys_of(tiles)
    combined = NF.combine(one.maps, (64, 64)).numpy()
    columns = [tiles, overlays(greys, combined), *(overlays(greys, m.numpy()) for m in one.maps.values())]
    rows, words = rows_and_columns(monkeypatch, one)
    for i, row in enumerate(rows):
        for tile, column in zip(row, columns, strict=True):
            np.testing.assert_array_equal(tile, column[i][..., :3])
    assert len(rows) == 3
    assert words[2:7] == ["input", "combined", "stem", "body.1", "body.2"]


def test_it_follows_the_look(monkeypatch):
    one, style = map_set(), {"colormap": "viridis", "opacity": 0.9, "scale": "shared", "mean": 0.1, "std": 0.5}
    tiles = input_tiles(one.images.numpy(), tile_size=TILE, mean=0.1, std=0.5)
    expected = overlays(greys_of(tiles), one.maps["net.stem"].numpy(), Style(**style))
    rows, _ = rows_and_columns(monkeypatch, one, **style)
    np.testing.assert_array_equal(rows[2][0], tiles[2][..., :3])
    np.testing.assert_array_equal(rows[2][2], expected[2][..., :3])


def test_it_says_what_is_bright_which_images_and_which_colours_and_each_class(monkeypatch):
    one = map_set(labels=[1, 0, -1], classes=["cat", "golden retriever"])
    _, words = rows_and_columns(monkeypatch, one)
    assert words[:2] == ["order0, bright: training signal", "images of the training batch, stretched colours"]
    assert words[-3:] == ["golden retriever", "cat", ""]
    _, words = rows_and_columns(monkeypatch, map_set("contrast", source="probe"), mean=0.5, std=0.5)
    assert words[:2] == [
        "contrast, red: order1, blue: adversarial",
        "probe: the same images at every event, true colours",
    ]


@pytest.mark.parametrize(
    ("known", "captions"),
    [({}, []), ({"labels": [2, 0, 1]}, ["2", "0", "1"]), ({"labels": [2]}, []), ({"labels": [0] * 9}, [])],
)
def test_what_is_not_known_of_each_image_takes_no_room(monkeypatch, known, captions):
    _, words = rows_and_columns(monkeypatch, map_set(**known))
    assert [word for word in words[7:] if word] == captions
    bare, told = drawn(map_set()), drawn(map_set(labels=[0, 0, 0]))
    assert bare.shape[0] < told.shape[0]


@pytest.mark.parametrize(("count", "layers"), [(8, 5), (8, 3), (4, 2), (1, 1)])
def test_letters_can_be_read_in_a_card_of_350_pixels(monkeypatch, count, layers):
    sizes = []
    original = lettering.write
    monkeypatch.setattr(table, "write", lambda *args: (sizes.append(args[2]), original(*args)))
    one = map_set(count=count, layers=[f"layer{i}" for i in range(layers)], labels=[0] * count)
    width = drawn(one).shape[1]
    assert min(sizes) * min(350 / width, 1) >= 9


def test_layers_and_images_beyond_what_fits_are_left_out_and_it_says_so(monkeypatch):
    one = map_set(count=20, layers=[f"layer{i}" for i in range(12)], grid=(16, 16))
    rows, words = rows_and_columns(monkeypatch, one)
    assert len(rows) == 8
    assert words[2:8] == ["input", "combined", "layer0", "layer4", "layer7", "layer11"]
    assert "8 of 20 images" in words[0]


def test_each_kind_and_source_has_its_card():
    sets = [
        map_set("contrast"),
        map_set("order1", variant="_batch"),
        map_set("order0"),
        map_set("order1", source="probe", group="second"),
        map_set("adversarial", source="probe", group="second"),
    ]
    page = overview.overview(sets, Style())
    assert page.step == 7
    assert [picture.tag for picture in page.pictures] == [
        "normgrad/5_overview/3_contrast",
        "normgrad/5_overview/1_order1_batch",
        "normgrad/5_overview/0_order0",
        "second/3_probe/1_order1",
        "second/3_probe/2_adversarial",
    ]
    for one, picture in zip(sets, page.pictures, strict=True):
        assert picture.jpeg == overview.overview([one], Style()).pictures[0].jpeg


def test_signed_maps_and_a_single_layer_have_no_combined_map(monkeypatch):
    for one in (map_set("contrast"), map_set(layers=LAYERS[:1])):
        with monkeypatch.context() as patch:
            rows, words = rows_and_columns(patch, one)
        assert "combined" not in words
        assert len(rows[0]) == 1 + len(one.maps)


def test_layers_of_other_images_are_not_put_into_one_row(monkeypatch):
    one = map_set(layers=["g.a", "g.b", "g.c", "d.a", "d.b"], grid=(16, 16))
    others = torch.zeros_like(one.images)
    none = dict.fromkeys(["g.a", "g.b", "g.c"])
    for images_of, layers, images in [
        ({**none, "d.a": one.images, "d.b": one.images}, ["a", "b"], one.images),
        ({**dict.fromkeys(none, one.images), "d.a": others, "d.b": others}, ["a", "b", "c"], one.images),
        (dict.fromkeys(one.maps), ["g.a", "g.b", "d.a", "d.b"], torch.zeros_like(one.images)),
    ]:
        with monkeypatch.context() as patch:
            rows, words = rows_and_columns(patch, MapSet(**{**vars(one), "images_of": images_of}))
        assert words[4 : 4 + len(layers)] == layers
        tiles = input_tiles(images.numpy(), tile_size=TILE)
        np.testing.assert_array_equal(rows[1][0], tiles[1][..., :3])


@pytest.mark.parametrize("grid", [(40,), (20, 30), (6, 12, 12)])
def test_strips_and_slices_are_drawn_as_in_panels(monkeypatch, grid):
    one = map_set(grid=grid)
    tiles = input_tiles(one.images.numpy(), tile_size=TILE)
    rows, _ = rows_and_columns(monkeypatch, one)
    expected = overlays(greys_of(tiles), one.maps["net.stem"].numpy())
    np.testing.assert_array_equal(rows[1][0], tiles[1][..., :3])
    np.testing.assert_array_equal(rows[1][2], expected[1][..., :3])


def test_a_zero_map_is_hatched_and_left_out_of_the_combined_one(monkeypatch):
    one = map_set()
    one.maps["net.body.2"][0] = 0
    for m in one.maps.values():
        m[1] = 0
    rows, _ = rows_and_columns(monkeypatch, one)
    assert [is_hatched(tile) for tile in rows[0]] == [False, False, False, False, True]
    assert [is_hatched(tile) for tile in rows[1]] == [False, True, True, True, True]
    assert not any(map(is_hatched, rows[2]))


def test_half_precision_images_and_maps_of_one_cell():
    one = map_set(grid=(1, 1))
    halves = one.images.half()
    drawn(MapSet(**{**vars(one), "images": halves, "images_of": dict.fromkeys(one.maps, halves)}))


def test_a_run_logs_it_at_every_event(tmp_path):
    run = train(Lit, tmp_path, watching())
    events = EventAccumulator(run.trainer.logger.log_dir, size_guidance={"images": 0})
    events.Reload()
    steps = {tag: [event.step for event in events.Images(tag)] for tag in events.Tags()["images"]}
    assert steps["normgrad/5_overview/0_order0"] == list(run.history.maps)
    picture = Image.open(io.BytesIO(events.Images("normgrad/5_overview/0_order0")[0].encoded_image_string))
    assert picture.width > 350
