"""The Images tab of a real TensorBoard in a real browser: the panels are there and can be read in their cards."""

import base64
import io
import json
import urllib.request
from urllib.parse import parse_qs, urlparse

import numpy as np
import pytest
import torch
from browser import CHROMIUM, DRIVER, chromium, open_images_tab, tensorboard, until
from networks import ResNet
from PIL import Image
from pytorch_lightning import LightningModule, Trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

from normgrad_lightning import NormGradCallback
from normgrad_lightning.page import Page
from normgrad_lightning.writers.tensorboard import TensorBoardWriter

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
]


class Lit(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = ResNet()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """What the Images tab shows of a short run whose images are red, green and blue."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    images = 0.1 * torch.rand(24, 3, 32, 32)
    images[torch.arange(24), torch.arange(24) % 3] += 0.8
    loader = DataLoader(TensorDataset(images, torch.arange(24) % 3), batch_size=8)
    callback = NormGradCallback(
        every_n_steps=1,
        images="first",
        order1_every_n_steps=2,
        order1_maps=["contrast"],
        views=["overview", "patches", "atlas", "panels"],
        probe=False,
        mean=0.0,
        std=1.0,
        on_error="raise",
    )
    trainer = Trainer(
        max_epochs=1, callbacks=[callback], default_root_dir=folder, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, enable_checkpointing=False, logger=True,
    )  # fmt: skip
    trainer.fit(Lit(), loader)
    with tensorboard(trainer.logger.log_dir) as address, chromium(1400, 1600) as browser:
        shown = open_images_tab(browser, address, panels=12)
        pictures = [
            np.asarray(Image.open(io.BytesIO(urllib.request.urlopen(panel["source"]).read()))) for panel in shown
        ]
        yield shown[6:], pictures[6:], shown[:6]


def test_there_is_one_card_for_each_layer_and_kind_at_the_last_step(page):
    shown, _, first = page
    keys = [parse_qs(urlparse(panel["source"]).query)["blob_key"][0] for panel in (*first, *shown)]
    tags_and_steps = [json.loads(base64.urlsafe_b64decode(key + "==="))[3:5] for key in keys]
    assert tags_and_steps == [
        *([f"normgrad/{view}/{of}", 2] for view in ("1_patches", "4_atlas") for of in ("0_combined", "02_net.stage3")),
        *([f"normgrad/5_overview/{kind}", 2] for kind in ("0_order0", "3_contrast")),
        *([f"normgrad_{kind}/0{i}_net.stage{i + 1}", 2] for kind in ("contrast", "order0") for i in range(3)),
    ]


def test_a_card_shows_its_whole_panel_with_tiles_large_enough_to_read(page):
    shown, _, first = page
    assert all(card["shown"][0] >= 300 for card in first)
    for panel in shown:
        width, height = panel["shown"]
        assert 300 <= width <= 400
        assert height / width == pytest.approx(panel["natural"][1] / panel["natural"][0], rel=0.02)
        assert width / 4 >= 75  # four tiles side by side


def test_contrast_is_blue_and_red_over_grey(page):
    _, pictures, _ = page
    overlays = np.stack([p[:, 130:258].reshape(-1, 3) for p in pictures[:3]]).astype(int)
    more_red = overlays[..., 0] - overlays[..., 2]
    assert (more_red > 40).any()
    assert (more_red < -40).any()


def test_each_input_stands_in_its_colour_beside_its_overlay(page):
    _, pictures, _ = page
    for number, picture in enumerate(pictures):
        for i in range(8):
            top, left = i // 2 * 136, i % 2 * 266
            tile = picture[top : top + 128, left : left + 128].reshape(-1, 3).mean(0)
            beside = picture[top : top + 128, left + 130 : left + 258].reshape(-1, 3).astype(float)
            # The last batch begins with picture 16, whose label and colour are 16 mod 3.
            assert tile.argmax() == (16 + i) % 3
            assert tile.max() > 2 * np.median(tile)
            assert beside.std(0).max() > (8 if number >= 3 else 2)  # a map, not a flat colour


def test_a_film_moves(tmp_path):
    frames = [Image.new("RGB", (64, 48), colour) for colour in ("red", "blue")]
    file = io.BytesIO()
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:], duration=700, loop=0)
    TensorBoardWriter(SummaryWriter(tmp_path)).write(Page(7, films={"normgrad/film": file.getvalue()}))
    with tensorboard(tmp_path) as address, chromium(1000, 800) as browser:
        open_images_tab(browser, address, panels=1)

        def colours():
            pixels = np.asarray(Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")).reshape(-1, 3)
            return {name for name, colour in (("red", (254, 0, 0)), ("blue", (0, 0, 254))) if is_there(pixels, colour)}

        assert until(lambda: colours() == {"red"})
        assert until(lambda: colours() == {"blue"})


def is_there(pixels, colour):
    return int((np.abs(pixels.astype(int) - colour).max(1) < 12).sum()) > 1000
