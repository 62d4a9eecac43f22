"""From map sets to a page, and from a page to the logger: views as a newcomer would add them."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from twice import Lit, train, twice, watching

from normgrad_lightning.events.messages import Messenger
from normgrad_lightning.kinds import KINDS, MapSet
from normgrad_lightning.page import Page
from normgrad_lightning.views import pages
from normgrad_lightning.views.drawing import Sheet, input_tiles, jpeg
from normgrad_lightning.views.look import Look
from normgrad_lightning.views.pages import pages_of
from normgrad_lightning.views.panels import panels

TESTS = Path(__file__).parents[1]


def map_set(kind="order0", layers=("a", "b"), **options):
    generator = torch.Generator().manual_seed(0)
    maps = {layer: torch.rand(2, 4 * (i + 1), 4 * (i + 1), generator=generator) for i, layer in enumerate(layers)}
    if KINDS[kind].signed:
        maps = {layer: m - m.mean() for layer, m in maps.items()}
    images = torch.rand(2, 3, 32, 32, generator=generator)
    return MapSet(KINDS[kind], 7, maps, images, dict.fromkeys(maps, images), ["z", *layers], **options)


def test_a_panel_for_each_layer_of_each_set_under_numbered_tags():
    page = panels([map_set(variant="_weight"), map_set("contrast", variant="_batch")], Look())
    assert page.step == 7
    assert [picture.tag for picture in page.pictures] == [
        "normgrad_order0_weight/01_a",
        "normgrad_order0_weight/02_b",
        "normgrad_contrast_batch/01_a",
        "normgrad_contrast_batch/02_b",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_its_pixels_are_those_of_the_drawing_in_the_kinds_own_colours(kind):
    one, look = map_set(kind), Look(opacity=0.8, tile_size=64, scale="shared", mean=0.1, std=0.5)
    tiles = input_tiles(one.images.numpy(), mean=0.1, std=0.5, tile_size=64)
    signed = KINDS[kind].signed
    colormap = "matplotlib:coolwarm" if signed else "inferno"
    for picture, (layer, maps) in zip(panels([one], look).pictures, one.maps.items(), strict=True):
        expected = Sheet(tiles).panel(maps.numpy(), colormap=colormap, opacity=0.8, scale="shared", signed=signed)
        assert picture[1:] == (jpeg(expected), *expected.shape[:2]), layer


def test_layers_with_images_of_their_own_are_drawn_over_these():
    one = map_set()
    others = torch.zeros_like(one.images)
    shared = panels([one], Look()).pictures
    apart = panels([MapSet(**{**vars(one), "images_of": {"a": one.images, "b": others}})], Look()).pictures
    assert shared[0].jpeg == apart[0].jpeg
    assert shared[1].jpeg != apart[1].jpeg


def view_of_the_readme():
    """The view that `tests/README.md` shows to newcomers."""
    (code,) = re.findall(r"```python\n(def brightest.*?)```", (TESTS / "README.md").read_text(), flags=re.DOTALL)
    world = {"Sequence": Sequence, "MapSet": MapSet, "Look": Look, "Page": Page}
    exec(code, world)
    return world["brightest"]


def test_all_views_of_the_table_share_one_page(monkeypatch):
    monkeypatch.setitem(pages.VIEWS, "brightest", view_of_the_readme())
    one = map_set()
    page = Page.joined(pages_of([one], Look()))
    tags = ["normgrad/0_overview", "normgrad_order0/01_a", "normgrad_order0/02_b"]
    assert [picture.tag for picture in page.pictures] == tags
    assert page.scalars == {f"normgrad/brightest/order0/{layer}": float(m.max()) for layer, m in one.maps.items()}


def test_a_new_view_reaches_tensorboard_without_another_change(tmp_path, monkeypatch):
    monkeypatch.setitem(pages.VIEWS, "brightest", view_of_the_readme())
    _, run = twice(tmp_path)
    events = EventAccumulator(run.trainer.logger.log_dir)
    events.Reload()
    tag = "normgrad/brightest/order0/net.stage3"
    logged = {event.step: event.value for event in events.Scalars(tag)}
    assert logged == pytest.approx({step: float(m["net.stage3"].max()) for step, m in run.history.maps.items()})


def test_a_view_that_fails_is_named_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setitem(pages.VIEWS, "broken", lambda map_sets, look: map_sets["order0"])
    monkeypatch.setitem(pages.VIEWS, "brightest", view_of_the_readme())
    run = train(Lit, tmp_path, watching(on_error="warn"))
    assert ["failed at drawing broken, and training goes on: TypeError" in told for told in run.warned] == [True]
    events = EventAccumulator(run.trainer.logger.log_dir)
    events.Reload()
    assert "normgrad/brightest/order0/net.stage3" in events.Tags()["scalars"]
    assert "normgrad_order0/02_net.stage3" in events.Tags()["images"]


def test_views_that_fail_for_one_reason_are_one_warning():
    messenger = Messenger("warn")
    with pytest.warns(UserWarning, match="drawing overview, and training goes on: ValueError: `mean`") as caught:
        assert pages_of([map_set()], Look(mean=[0.5, 0.5]), guard=messenger.guard) == []
    assert len(caught) == 1


def test_a_tag_stands_on_a_page_once():
    with pytest.raises(ValueError, match="'normgrad_order0/01_a' 2 times"):
        panels([map_set(), map_set()], Look())
