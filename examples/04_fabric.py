"""The same maps in a training loop of Lightning Fabric.

    python examples/04_fabric.py

`NormGrad` hears what the loop computes anyway; every `EVERY` steps its maps are drawn and logged. With several
processes, the first one hears and logs its own share of the batch.
"""

from __future__ import annotations

import torch
from classifier import ShapeClassifier, classification_loss
from lightning_fabric import Fabric  # or: from lightning.fabric import Fabric
from lightning_fabric.loggers import TensorBoardLogger
from shapes import ShapesDataset
from torch.utils.data import DataLoader

from normgrad_lightning import NormGrad, log_maps

STEPS, EVERY = 100, 20


def main() -> None:
    """Train, and log maps now and then."""
    fabric = Fabric(accelerator="cpu", devices=1, loggers=TensorBoardLogger("normgrad_demo", name="fabric"))
    fabric.seed_everything(0)
    model = ShapeClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recorder = NormGrad(model, layers="auto", num_images=8)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(ShapesDataset(32 * STEPS, seed=0), batch_size=32, shuffle=True))

    for step, batch in enumerate(loader):
        is_event = step % EVERY == 0 and fabric.is_global_zero
        if is_event:
            recorder.attach()
        optimizer.zero_grad()
        loss = classification_loss(model, batch)
        fabric.backward(loss)
        if is_event:
            log_maps(fabric.logger, recorder.maps, recorder.images, step, mean=0.5, std=0.5)
            recorder.detach()
            fabric.log("train_loss", loss, step)
            print(f"step {step:3d}  loss {loss.item():.3f}")
        optimizer.step()
    print("all panels: tensorboard --logdir normgrad_demo")


if __name__ == "__main__":
    main()
