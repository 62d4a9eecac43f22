"""The view that stores what the tab shows: what training has is what the blob says."""

import io

import numpy as np
import pytest
import torch
from known_log import check
from networks import ResNet
from PIL import Image
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset

from normgrad_lightning import NormGradCallback
from normgrad_lightning.functional import combine
from normgrad_lightning.maps import KINDS, MapSet
from normgrad_lightning.tensorboard_tab.logs import runs_in
from normgrad_lightning.tensorboard_tab.stored import decode
from normgrad_lightning.tensorboard_tab.thinning import Thinning
from normgrad_lightning.views.atlas import Atlas
from normgrad_lightning.views.patches import Patches
from normgrad_lightning.views.pooled_batch import pooled_batch
from normgrad_lightning.views.style import Style
from normgrad_lightning.views.tab import Tab

STYLE = Style(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
SIGNAL = {0: 1.0, 1: 1.0}
CLASSES = ["cat", "dog"]


def map_set(step, images, maps, kind="order0", source="batch", labels=None):
    labels = [0, 1] * (len(images) // 2) if labels is None else labels
    layers = list(maps)
    of = dict.fromkeys(layers, images)
    sums = {layer: m.flatten(1).sum(1) for layer, m in maps.items()}
    about = {"source": source, "labels": labels, "classes": CLASSES, "sums": sums}
    return MapSet(KINDS[kind], step, maps, images, of, layers, **about)


def batch_of(step, size=(64, 48)):
    """Images with a bright spot each, and maps that are strongest there."""
    generator = torch.Generator().manual_seed(step)
    images = 0.2 * torch.randn(8, 3, *size, generator=generator)
    fine = torch.rand(8, *size, generator=generator) * 0.1 + 0.05
    places = []
    for i in range(8):
        row, column = 16 + 4 * (i % 4), 14 + 5 * (i % 4)
        images[i, :, row : row + 6, column : column + 6] = 2.0
        fine[i, row : row + 6, column : column + 6] = 4.0
        places.append((row + 3, column + 3))
    last = torch.nn.functional.avg_pool2d(fine[:, None], 8)[:, 0]
    return images, {"net.early": fine, "net.late": last}, places


def collected(step=5):
    """The view after one batch, and its blob."""
    tab, patches, atlas = Tab(), Patches(), Atlas()
    tab.patches, tab.atlas = patches, atlas
    images, maps, places = batch_of(step)
    one = map_set(step, images, maps)
    pooled = pooled_batch(one)
    for view in (patches, atlas, tab):
        view.add(pooled, STYLE, SIGNAL)
    for view in (patches, atlas):
        view.page([one], STYLE, [0, 1])
    return tab, one, places, decode(tab.page([one], STYLE, [0, 1]).blobs["normgrad/tab"])


def test_maps_images_and_names_are_those_of_training():
    _, one, _, content = collected()
    [found] = content.header["sets"]
    assert [layer["name"] for layer in found["layers"]] == list(one.maps)
    for layer, maps in zip(found["layers"], one.maps.values(), strict=True):
        np.testing.assert_allclose(content.maps(layer["maps"]), maps, rtol=2e-3, atol=1e-6)
    assert found["labels"] == ["cat", "dog"] * 4
    [images] = content.header["images"]
    assert (images["source"], images["colours"]) == ("batch", "true")
    picture = np.asarray(Image.open(io.BytesIO(content.parts[images["jpegs"][3]]))).astype(float) / 255
    wanted = (one.images[3] * 0.25 + 0.5).clamp(0, 1).permute(1, 2, 0).numpy()
    assert picture.shape == wanted.shape
    assert abs(picture.mean() - wanted.mean()) < 0.01


def test_the_typical_map_is_the_mean_of_maps_that_were_divided_by_their_mean():
    """It starts with eight even maps; there are eight images, which count half by now."""
    _, one, _, content = collected()
    late = content.header["sets"][0]["layers"][1]
    even = one.maps["net.late"] / one.maps["net.late"].mean((1, 2), keepdim=True)
    np.testing.assert_allclose(content.maps(late["typical"])[0], (even.mean(0) + 2) / 3, rtol=2e-3)


def test_a_patch_has_its_whole_image_its_place_and_its_map():
    _, one, places, content = collected()
    cat = content.header["classes"][0]
    assert (cat["name"], cat["seen"], cat["steps"]) == ("cat", 4, [5, 5])
    row = next(found for found in cat["patches"] if found["map"] == "combined")
    assert len(row["items"]) == 4
    combined = combine([m for m in one.maps.values()], one.maps["net.early"].shape[1:])
    for item in row["items"]:
        top, left, height, width = item["box"]
        inside = [top <= r / 64 <= top + height and left <= c / 48 <= left + width for r, c in places[::2]]
        assert any(inside)
        picture = np.asarray(Image.open(io.BytesIO(content.parts[item["image"]]))).astype(float) / 255
        assert picture.shape[:2] == (64, 48)
        errors = [
            abs(picture - (image * 0.25 + 0.5).clamp(0, 1).permute(1, 2, 0).numpy()).mean() for image in one.images
        ]
        owner = int(np.argmin(errors))
        assert owner % 2 == 0  # an image of a cat
        map_ = torch.from_numpy(content.maps(item["map"])[0])
        small = torch.nn.functional.interpolate(combined[None, None, owner], map_.shape, mode="area")[0, 0]
        assert np.corrcoef(map_.flatten(), small.flatten())[0, 1] > 0.9
        assert [layer["name"].partition("_")[2] for layer in item["layers"]] == list(one.maps)
        for layer, maps in zip(item["layers"], one.maps.values(), strict=True):
            stored = content.maps(layer["maps"])[0]
            small = torch.nn.functional.interpolate(maps[None, None, owner], stored.shape, mode="area")[0, 0]
            assert np.corrcoef(stored.flatten(), small.flatten())[0, 1] > 0.9


def test_the_atlas_is_what_its_card_shows():
    _, one, _, content = collected()
    stored = next(one for one in content.header["classes"][1]["atlas"] if one["map"] == "combined")
    fresh = Atlas()
    fresh.add(pooled_batch(one), STYLE, SIGNAL)
    means, lifts = fresh.lifts("combined")  # as before the event, after which what came before counts half
    np.testing.assert_allclose(content.maps(stored["mean"])[0], means[1], rtol=2e-3)
    np.testing.assert_allclose(content.maps(stored["lift"])[0], lifts[1], rtol=2e-3)
    assert stored["spot"] == pytest.approx(lifts[1].max())


def test_images_are_stored_again_only_if_they_change():
    tab = Tab()
    images, maps, _ = batch_of(0)
    others = images.flip(0)

    def stored(step, shown):
        return decode(tab.page([map_set(step, shown, maps, source="probe")], STYLE, []).blobs["normgrad/tab"])

    found = [stored(step, shown).header["images"][0] for step, shown in enumerate([images, images, others, others])]
    assert [(one["jpegs"] is None, one["stored"]) for one in found] == [
        (False, None),
        (True, 0),
        (False, None),
        (True, 2),
    ]
    assert found[0]["hash"] == found[1]["hash"] != found[2]["hash"]


def test_several_kinds_and_sources_each_have_their_images():
    images, maps, _ = batch_of(0)
    sets = [
        map_set(0, images, maps),
        map_set(0, images[:2], {name: m[:2] for name, m in maps.items()}, "contrast"),
        map_set(0, images.flip(0), maps, source="probe"),
    ]
    header = decode(Tab().page(sets, Style(), []).blobs["normgrad/tab"]).header
    assert [one["name"] for one in header["sets"]] == ["order0", "contrast", "probe_order0"]
    assert [header["images"][one["images"]]["source"] for one in header["sets"]] == ["batch", "batch, order 1", "probe"]
    assert header["images"][0]["colours"] == "stretched"
    assert [one["signed"] for one in header["sets"]] == [False, True, False]


@pytest.mark.parametrize("size", [(100,), (6, 20, 24)])
def test_signals_and_volumes_are_stored_as_they_are_drawn(size):
    images = torch.rand(4, 1, *size)
    maps = {"a": torch.rand(4, *size) + 0.1}
    tab, patches = Tab(), Patches()
    tab.patches = patches
    one = map_set(0, images, maps)
    for view in (patches, tab):
        view.add(pooled_batch(one), STYLE_OF_ONE, SIGNAL)
    patches.page([one], STYLE_OF_ONE, [0, 1])
    content = decode(tab.page([one], STYLE_OF_ONE, [0, 1]).blobs["normgrad/tab"])
    shape = content.header["sets"][0]["layers"][0]["maps"]["shape"]
    assert shape == ([4, 1, 100] if len(size) == 1 else [4, 20, 24])
    item = content.header["classes"][0]["patches"][0]["items"][0]
    if len(size) == 1:
        assert (item["box"][0], item["box"][2]) == (0.0, 1.0)


STYLE_OF_ONE = Style(mean=0.0, std=1.0)


def test_without_images_or_batches_the_maps_are_there():
    maps = {"a": torch.rand(2, 8, 8)}
    one = MapSet(KINDS["order0"], 3, maps, None, {"a": None}, ["a"])
    header = decode(Tab().page([one], STYLE, []).blobs["normgrad/tab"]).header
    assert header["images"] == header["classes"] == []
    assert header["sets"][0]["images"] is None


def test_without_maps_there_is_no_page():
    assert Tab().page([], STYLE, []) is None


def test_the_check_is_stored_with_its_pictures():
    tab = Tab()
    tab.check = lambda style: check(10)
    content = decode(tab.page([map_set(10, *batch_of(0)[:2])], STYLE, []).blobs["normgrad/tab"])
    sure = content.header["check"]["classes"][1]
    assert (sure["covered"], sure["share"], sure["sure"]) == ([5.1, 0.5], 0.84, True)
    assert [one["label"] for one in sure["pictures"]] == ["covered", "pasted"]


def test_the_last_event_comes_at_the_end_if_it_was_left_out():
    tab = Tab()
    tab._thinning = Thinning(budget=300_000)
    images, maps, _ = batch_of(0)
    steps = [page.step for step in range(40) if (page := tab.page([map_set(step, images, maps)], STYLE, []))]
    assert steps[0] == 0
    assert len(steps) < 40
    last = tab.last_page(STYLE)
    assert (steps[-1], last and last.step) in ((39, None), (steps[-1], 39))
    assert tab.last_page(STYLE) is None


def test_what_the_check_finds_after_the_last_event_is_stored_at_a_step_of_its_own():
    """TensorBoard keeps the first blob of a step."""
    tab = Tab()
    results = {10: check(10), 12: check(12)}
    tab.check = lambda style: results[10]
    one = map_set(10, *batch_of(0)[:2])
    tab.page([one], STYLE, [])
    assert tab.last_page(STYLE) is None
    tab.check = lambda style: results[12]
    last = tab.last_page(STYLE)
    header = decode(last.blobs["normgrad/tab"]).header
    assert (last.step, header["step"], header["maps_step"]) == (12, 12, 10)
    assert header["check"]["classes"][1]["covered"] == [5.12, 0.5]
    assert header["images"][0]["stored"] == 10
    assert len(header["sets"][0]["layers"]) == 2
    assert tab.last_page(STYLE) is None


def test_patches_that_were_found_after_the_last_event_are_stored_with_it():
    tab, *_ = collected(step=5)
    images, maps, _ = batch_of(8)
    late = pooled_batch(map_set(8, images[:4], {name: m[:4] for name, m in maps.items()}))
    for view in (tab.patches, tab.atlas, tab):
        view.add(late, STYLE, SIGNAL)
    for view in (tab.patches, tab.atlas):
        view.page([], STYLE, [0, 1])
    last = tab.last_page(STYLE)
    header = decode(last.blobs["normgrad/tab"]).header
    assert (last.step, header["maps_step"]) == (8, 5)
    assert [(one["seen"], one["steps"]) for one in header["classes"]] == [(6, [5, 8])] * 2
    assert sorted(item["step"] for item in header["classes"][0]["patches"][0]["items"]) == [5] * 4 + [8] * 2


def test_a_resumed_run_keeps_to_the_budget_and_stores_its_first_event_whole():
    """The log of a resumed run may be a new one: what it stored before is not there."""
    images, maps, _ = batch_of(0)
    state, stored = None, []
    for start in range(0, 200, 20):
        tab = Tab()
        if state is None:
            tab._thinning = Thinning(budget=300_000)
        else:
            tab.load_state_dict(state)
        pages = [tab.page([map_set(step, images, maps)], STYLE, []) for step in range(start, start + 20)]
        if pages[0] is not None:
            stored.append(pages[0])
            assert decode(pages[0].blobs["normgrad/tab"]).header["images"][0]["jpegs"]
        stored += [page for page in pages[1:] if page]
        state = tab.state_dict()
    assert sum(page.size for page in stored) < 300_000 + 10 * max(page.size for page in stored)
    assert {page.step for page in stored} >= set(range(0, 200, 20))
    Tab().load_state_dict({})  # of an earlier version


def test_training_stores_its_events_for_the_tab_and_what_came_after_the_last_of_them(tmp_path):
    class Lit(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = ResNet()

        def training_step(self, batch, batch_idx):
            self.trainer.should_stop = self.global_step == 3
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    loader = DataLoader(TensorDataset(torch.rand(12, 3, 32, 32), torch.arange(12) % 3), batch_size=4)
    callback = NormGradCallback(
        every_n_steps=2, read_every_n_steps=1, num_images=2, views=["patches", "tab"], budget=None, on_error="raise"
    )
    logger = TensorBoardLogger(tmp_path)
    options = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    Trainer(max_epochs=9, logger=logger, callbacks=[callback], accelerator="cpu", **options).fit(Lit(), loader)
    [run] = runs_in([tmp_path])
    assert list(run.blobs["normgrad/tab"]) == [0, 2, 3]
    last = decode(run.blobs["normgrad/tab"][3]).header
    assert last["maps_step"] == 2
    assert {item["step"] for one in last["classes"] for row in one["patches"] for item in row["items"]} == {1, 2, 3}
    content = decode(run.blobs["normgrad/tab"][2])
    [found] = content.header["sets"]
    assert len(found["layers"]) > 1
    assert all(layer["typical"] for layer in found["layers"])
    assert len(content.header["images"][0]["jpegs"]) == found["layers"][0]["maps"]["shape"][0]
