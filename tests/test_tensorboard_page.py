"""The Images tab of a real TensorBoard in a real browser: the panels are there and can be read in their cards."""

import base64
import io
import json
import urllib.request
from urllib.parse import parse_qs, urlparse

import numpy as np
import pytest
import torch
from browser import CHROMIUM, DRIVER, chromium, open_images_tab, tensorboard
from networks import ResNet
from PIL import Image
from pytorch_lightning import LightningModule, Trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from normgrad_lightning import NormGradCallback

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
        every_n_steps=1, order1_every_n_steps=2, order1_maps=["contrast"], mean=0.0, std=1.0, on_error="raise"
    )
    trainer = Trainer(
        max_epochs=1, callbacks=[callback], default_root_dir=folder, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, enable_checkpointing=False, logger=True,
    )  # fmt: skip
    trainer.fit(Lit(), loader)
    with tensorboard(trainer.logger.log_dir) as address, chromium(1400, 1600) as browser:
        shown = open_images_tab(browser, address, panels=6)
        pictures = [
            np.asarray(Image.open(io.BytesIO(urllib.request.urlopen(panel["source"]).read()))) for panel in shown
        ]
        yield shown, pictures


def test_there_is_one_card_for_each_layer_and_kind_at_the_last_step(page):
    shown, _ = page
    keys = [parse_qs(urlparse(panel["source"]).query)["blob_key"][0] for panel in shown]
    tags_and_steps = [json.loads(base64.urlsafe_b64decode(key + "==="))[3:5] for key in keys]
    assert tags_and_steps == [
        [f"normgrad_{kind}/0{i}_net.stage{i + 1}", 2] for kind in ("contrast", "order0") for i in range(3)
    ]


def test_a_card_shows_its_whole_panel_with_tiles_large_enough_to_read(page):
    shown, _ = page
    for panel in shown:
        width, height = panel["shown"]
        assert 300 <= width <= 400
        assert height / width == pytest.approx(panel["natural"][1] / panel["natural"][0], rel=0.02)
        assert width / 4 >= 75  # four tiles side by side


def test_contrast_is_blue_and_red_over_grey(page):
    _, pictures = page
    overlays = np.stack([p[:, 130:258].reshape(-1, 3) for p in pictures[:3]]).astype(int)
    more_red = overlays[..., 0] - overlays[..., 2]
    assert (more_red > 40).any()
    assert (more_red < -40).any()


def test_each_input_stands_in_its_colour_beside_its_overlay(page):
    _, pictures = page
    for number, picture in enumerate(pictures):
        for i in range(8):
            top, left = i // 2 * 136, i % 2 * 266
            tile = picture[top : top + 128, left : left + 128].reshape(-1, 3).mean(0)
            beside = picture[top : top + 128, left + 130 : left + 258].reshape(-1, 3).astype(float)
            # The last batch begins with picture 16, whose label and colour are 16 mod 3.
            assert tile.argmax() == (16 + i) % 3
            assert tile.max() > 2 * np.median(tile)
            assert beside.std(0).max() > (8 if number >= 3 else 2)  # a map, not a flat colour
