"""From map sets to a page, and from a page to the logger: views of the package, and one that a user brings."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from twice import Lit, train, watching

from normgrad_lightning.maps import KINDS, MapSet
from normgrad_lightning.page import Page, Picture
from normgrad_lightning.step.messages import Messenger
from normgrad_lightning.views.catalogue import ViewFlags
from normgrad_lightning.views.drawing import Sheet, input_tiles, jpeg
from normgrad_lightning.views.panels import panels
from normgrad_lightning.views.run_views import RunViews
from normgrad_lightning.views.style import Style


def map_set(kind="order0", layers=("a", "b"), **options):
    generator = torch.Generator().manual_seed(0)
    maps = {layer: torch.rand(2, 4 * (i + 1), 4 * (i + 1), generator=generator) for i, layer in enumerate(layers)}
    if KINDS[kind].signed:
        maps = {layer: m - m.mean() for layer, m in maps.items()}
    images = torch.rand(2, 3, 32, 32, generator=generator)
    return MapSet(KINDS[kind], 7, maps, images, dict.fromkeys(maps, images), ["z", *layers], **options)


def test_a_panel_for_each_layer_of_each_set_under_numbered_tags():
    page = panels([map_set(variant="_weight"), map_set("contrast", variant="_batch")], Style())
    assert page.step == 7
    assert [picture.tag for picture in page.pictures] == [
        "normgrad_order0_weight/01_a",
        "normgrad_order0_weight/02_b",
        "normgrad_contrast_batch/01_a",
        "normgrad_contrast_batch/02_b",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_its_pixels_are_those_of_the_drawing_in_the_kinds_own_colours(kind):
    one, style = map_set(kind), Style(opacity=0.8, tile_size=64, scale="shared", mean=0.1, std=0.5)
    tiles = input_tiles(one.images.numpy(), mean=0.1, std=0.5, tile_size=64)
    for picture, (layer, maps) in zip(panels([one], style).pictures, one.maps.items(), strict=True):
        expected = Sheet(tiles).panel(maps.numpy(), style, signed=KINDS[kind].signed)
        assert picture[1:] == (jpeg(expected), *expected.shape[:2]), layer


def test_layers_with_images_of_their_own_are_drawn_over_these():
    one = map_set()
    others = torch.zeros_like(one.images)
    shared = panels([one], Style()).pictures
    apart = panels([MapSet(**{**vars(one), "images_of": {"a": one.images, "b": others}})], Style()).pictures
    assert shared[0].jpeg == apart[0].jpeg
    assert shared[1].jpeg != apart[1].jpeg


def brightest(map_sets, style):
    """A view that a user brings."""
    scalars = {
        f"{one.group}/brightest/{one.kind.name}/{k}": float(m.max()) for one in map_sets for k, m in one.maps.items()
    }
    return Page(map_sets[0].step, scalars=scalars)


def broken(map_sets, style):
    return map_sets["order0"]


def pages_of(map_sets, style, *views, guard=nullcontext):
    return RunViews().pages(map_sets, style, ViewFlags(views=views), guard)


def test_all_views_share_one_page():
    one = map_set()
    page = Page.joined(pages_of([one], Style(), "overview", "panels", brightest))
    tags = ["normgrad/5_overview/0_order0", "normgrad_order0/01_a", "normgrad_order0/02_b"]
    assert [picture.tag for picture in page.pictures] == tags
    assert page.scalars == {f"normgrad/brightest/order0/{layer}": float(m.max()) for layer, m in one.maps.items()}


def test_a_view_that_fails_is_named_and_the_others_go_on(tmp_path):
    run = train(Lit, tmp_path, watching(on_error="warn", views=["panels", broken, brightest], probe=False))
    assert ["failed while drawing broken; training continues. TypeError" in told for told in run.warned] == [True]
    events = EventAccumulator(run.trainer.logger.log_dir)
    events.Reload()
    tag = "normgrad/brightest/order0/net.stage3"
    logged = {event.step: event.value for event in events.Scalars(tag)}
    assert logged == pytest.approx({step: float(m["net.stage3"].max()) for step, m in run.history.maps.items()})
    assert "normgrad_order0/02_net.stage3" in events.Tags()["images"]


@pytest.mark.parametrize(
    ("page", "told"),
    [
        (lambda at: Page(at, pictures=[Picture("a", np.zeros((8, 8, 3)), 8, 8)]), "`pictures`: expected encoded"),
        (lambda at: Page(at, films={"a": "film.webp"}), "`films`: expected encoded"),
        (lambda at: Page(at, scalars={"a": np.zeros(3)}), "drawing odd"),
        (lambda at: Page(at, scalars={"a": "high"}), "'high'"),
        (
            lambda at: Page(at, scalars={"normgrad_order0/02_b": 1.0}),
            "no other view has, but got 'normgrad_order0/02_b'",
        ),
        (lambda at: Page(None, scalars={"a": 1.0}), "'NoneType'"),
    ],
    ids=["pixels", "a path", "three numbers", "text", "a tag that is taken", "no step"],
)
def test_a_page_that_is_wrong_costs_no_other_view_its_page(page, told):
    def odd(map_sets, style):
        return page(map_sets[0].step)

    with pytest.warns(UserWarning, match="failed while drawing odd") as caught:
        pages = pages_of([map_set()], Style(), "panels", odd, brightest, guard=Messenger("warn").guard)
    assert [told in str(warning.message) for warning in caught] == [True]
    assert [len(one.tags) for one in pages] == [2, 2]


def test_a_page_takes_numbers_and_maps_of_torch():
    maps = torch.rand(2, 3, 4)
    page = Page(0, scalars={"a": maps[0, 0, 0]}, maps={"b": maps})
    assert type(page.scalars["a"]) is float
    assert page.scalars["a"] == float(maps[0, 0, 0])
    assert np.array_equal(page.maps["b"], maps.numpy())


class Counted:
    """A view with an argument, given as an object."""

    def __init__(self, tag):
        self.tag, self.images = tag, 0

    def add(self, batch, style, signal):
        self.images += len(batch.labels)

    def page(self, map_sets, style, shown):
        return Page(map_sets[0].step, scalars={self.tag: self.images}) if map_sets else None


def test_an_object_is_a_view():
    one, views = map_set(), RunViews()
    one = replace(one, labels=[0, 1], sums={layer: m.sum((1, 2)) for layer, m in one.maps.items()})
    flags = ViewFlags(views=["panels", Counted("images")])
    views.add(one, Style(), flags)
    (_, page) = views.pages([one], Style(), flags)
    assert page.scalars == {"images": 2}


def test_views_that_fail_for_one_reason_are_one_warning():
    messenger = Messenger("warn")
    with pytest.warns(UserWarning, match="while drawing overview; training continues. ValueError: `mean`") as caught:
        assert pages_of([map_set()], Style(mean=[0.5, 0.5]), "overview", "panels", guard=messenger.guard) == []
    assert len(caught) == 1


def test_a_tag_stands_on_a_page_once():
    with pytest.raises(ValueError, match="'normgrad_order0/01_a' 2 times"):
        panels([map_set(), map_set()], Style())
