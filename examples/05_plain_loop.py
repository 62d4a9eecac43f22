"""The same maps in a plain training loop, without Lightning: torch and its `SummaryWriter`.

    python examples/05_plain_loop.py

Order-0 maps come from the loop's own backward. Order-1 maps take passes of their own, which leave no trace.
"""

from __future__ import annotations

import torch
from classifier import ShapeClassifier, classification_loss
from shapes import ShapesDataset
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

from normgrad_lightning import NormGrad, log_maps, order1_maps
from normgrad_lightning import functional as NF

STEPS, EVERY, SHOWN = 100, 20, 8


def main() -> None:
    """Train, and log maps now and then."""
    torch.manual_seed(0)
    model = ShapeClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(ShapesDataset(32 * STEPS, seed=0), batch_size=32, shuffle=True)
    recorder = NormGrad(model, layers="auto", num_images=SHOWN)
    look = {"mean": 0.5, "std": 0.5}
    with SummaryWriter("normgrad_demo/plain") as writer:
        for step, (images, labels) in enumerate(loader):
            is_event = step % EVERY == 0
            if is_event:
                recorder.attach()
            optimizer.zero_grad()
            loss = classification_loss(model, [images, labels])
            loss.backward()
            if is_event:
                log_maps(writer, recorder.maps, recorder.images, step, **look)
                recorder.detach()
                first = [images[:SHOWN], labels[:SHOWN]]
                helps, hurts = (
                    order1_maps(model, classification_loss, first, recorder.layers, adversarial=adversarial)
                    for adversarial in (False, True)
                )
                contrast = {layer: NF.contrast(helps[layer], hurts[layer]) for layer in helps}
                log_maps(writer, contrast, first[0], step, tag="normgrad_contrast", signed=True, **look)
                writer.add_scalar("train_loss", loss.item(), step)
                print(f"step {step:3d}  loss {loss.item():.3f}")
            optimizer.step()
    print("all panels: tensorboard --logdir normgrad_demo")


if __name__ == "__main__":
    main()
