"""Maps in a notebook, with a real kernel: what a person sees below each cell."""

import base64
import io

import nbformat
import numpy as np
import pytest
import torch
from nbclient import NotebookClient
from PIL import Image
from test_figure import check_picture

TRAIN = """
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from normgrad_lightning import NormGrad, NormGradCallback, order0_maps, order1_maps

class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1), nn.ReLU())
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.net(x).mean((2, 3)))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def loss_fn(module, batch):
    return module.training_step(batch, 0)

torch.manual_seed(0)
images, labels = torch.rand(3, 3, 24, 32), torch.tensor([0, 1, 0])
images[0, :, 8:16, 4:20] = torch.tensor([1.0, 0.0, 0.0])[:, None, None]
images[1, :, 2:20, 16:28] = torch.tensor([0.0, 0.0, 1.0])[:, None, None]
callback, module = NormGradCallback(every_n_steps=2, mean=0.0, std=1.0), Lit()
quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
trainer = pl.Trainer(max_steps=3, accelerator="cpu", callbacks=[callback], **quiet)
"""

CELLS = {
    "train": TRAIN,
    "too early": "try:\n    callback.figure()\nexcept ValueError as error:\n    print(error)",
    "fit": "trainer.fit(module, DataLoader([(images, labels)] * 3, batch_size=None))",
    "callback": "callback.figure()",
    "order0": "maps = order0_maps(module, loss_fn, (images, labels), ['net.1', 'net.3'])\nmaps",
    "order1": "order1_maps(module, loss_fn, (images, labels), ['net.3'])",
    "recorder": "with NormGrad(module, ['net.1']) as recorder:\n    loss_fn(module, (images, labels)).backward()\n"
    "recorder.maps",
    "odd": "from normgrad_lightning.views.map_dict import Maps\nMaps({'a': torch.zeros(3)})",
    "numbers": "torch.save({'images': images, 'order0': maps, 'recorder': recorder.maps, "
    "'callback': callback.latest['order0'].maps, 'inputs': callback.inputs}, 'numbers.pt')",
}


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What each cell shows, by MIME type, and the numbers behind."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS.values()])
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = {}
    for name, cell in zip(CELLS, notebook.cells, strict=True):
        outputs[name] = {}
        for output in cell.outputs:
            outputs[name].update(output.get("data", {"stream": output.get("text")}))
    return outputs, torch.load(folder / "numbers.pt", weights_only=True)


def picture(data):
    kind = "image/png" if "image/png" in data else "image/jpeg"
    return Image.open(io.BytesIO(base64.b64decode(data[kind])))


def test_a_figure_of_the_callback_is_a_picture(shown):
    outputs, numbers = shown
    figure = picture(outputs["callback"])
    colours = np.asarray(figure.convert("RGB")).reshape(-1, 3)
    for colour in ((255, 0, 0), (0, 0, 255)):  # as the images have them
        assert (colours == colour).all(1).sum() > 500
    check_picture(figure, numbers["inputs"], numbers["callback"], mean=0.0, std=1.0)


@pytest.mark.parametrize("name", ["order0", "recorder"])
def test_maps_are_a_picture(name, shown):
    outputs, numbers = shown
    assert set(outputs[name]) == {"image/jpeg", "text/plain"}
    check_picture(picture(outputs[name]), numbers["images"], numbers[name], tolerance=6)


def test_what_is_not_drawn_is_text(shown):
    outputs, _ = shown
    assert outputs["odd"] == {"text/plain": "{'a': tensor([0., 0., 0.])}"}
    assert outputs["too early"]["stream"].startswith("`figure`: no maps yet.")
    assert picture(outputs["order1"]).format == "JPEG"
