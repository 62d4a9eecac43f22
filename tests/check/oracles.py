"""Networks whose loss depends on one known place of the image by construction, and slow references."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

PLACE = (slice(3, 7), slice(20, 24))  # within images of 32 × 32
CENTRE = (5, 22)


class OnePlace(nn.Module):
    """Two classes: the mean of one place of the first channel, times `weight`, is the score of class 1."""

    def __init__(self, weight: float = 4.0, place=PLACE):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))
        self.place = place
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        score = self.weight * x[(slice(None), 0, *self.place)].mean((1, 2))
        return torch.stack([torch.zeros_like(score), score], 1)


def marked_images(count, seed=0, channels=3):
    """Images `(N, C, 32, 32)` and labels: those of class 1 have ones at the place, those of class 0 minus ones."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    images = 0.1 * torch.randn(count, channels, 32, 32, generator=generator)
    images[(slice(None), slice(None), *PLACE)] += (2.0 * labels - 1)[:, None, None, None]
    return images, labels


def maps_at_the_place(count, cells=16):
    """Maps of two layers with one peak, at the place."""
    maps = torch.full((count, cells, cells), 0.01)
    maps[:, CENTRE[0] * cells // 32, CENTRE[1] * cells // 32] = 1
    return {"early": maps, "late": maps[:, ::2, ::2] + maps[:, 1::2, ::2] + maps[:, ::2, 1::2] + maps[:, 1::2, 1::2]}


def cross_entropy(scores, label):
    """Of one image, in float64 without torch."""
    scores = scores.detach().double().numpy()
    return float(np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[label])


def slow_losses(network, images, labels, rows, donors, region, control):
    """The seven numbers of each row, image by image and pixel by pixel."""
    found = []
    for number, (image, donor) in enumerate(zip(rows, donors, strict=True)):
        own, other = images[image], images[donor]

        def mixed(inside, outside, where):
            changed = outside.clone()
            for y, x in where.nonzero().tolist():
                changed[:, y, x] = inside[:, y, x]
            return changed

        variants = {
            "plain": own,
            "covered": mixed(other, own, region[number]),
            "covered_control": mixed(other, own, control[number]),
            "pasted": mixed(own, other, region[number]),
            "pasted_control": mixed(own, other, control[number]),
        }
        with torch.no_grad():
            scores = {name: network(image[None])[0] for name, image in variants.items()}
        row = [
            cross_entropy(scores[name], labels[image if "pasted" not in name else donor].item()) for name in variants
        ]
        row += [float(scores[name].argmax() == labels[image]) for name in ("pasted", "pasted_control")]
        found.append(row)
    return torch.tensor(found)


def mean_loss(network, batch):
    """Cross-entropy of a batch `(images, labels)`."""
    return F.cross_entropy(network(batch[0]), batch[1])
