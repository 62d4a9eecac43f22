"""What images were normalised with, found in real transforms."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from normgrad_lightning.step.normalisation import normalisation_of

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def loader(**attributes):
    dataset = TensorDataset(torch.zeros(4, 3, 8, 8))
    vars(dataset).update(attributes)
    return DataLoader(dataset)


def of_torchvision():
    from torchvision import transforms as v1
    from torchvision.datasets import FakeData
    from torchvision.transforms import v2

    chain = v1.Compose([v1.Resize(8), v1.RandomApply([v1.ColorJitter()]), v1.ToTensor(), v1.Normalize(MEAN, STD)])
    inner = v2.Compose([v2.RandomHorizontalFlip(), nn.Sequential(v2.Normalize(list(MEAN), list(STD)))])
    return {
        "v1": DataLoader(FakeData(4, transform=chain)),
        "v2": loader(transform=v2.Compose([v2.ToImage(), inner])),
        "inside of data sets": DataLoader(ConcatDataset([Subset(FakeData(4, transform=chain), [0, 1])])),
        "several loaders": {"a": DataLoader(FakeData(4, transform=chain)), "b": [DataLoader(FakeData(4))]},
    }


@pytest.mark.parametrize("name", ["v1", "v2", "inside of data sets", "several loaders"])
def test_torchvisions_normalize_is_found(name):
    pytest.importorskip("torchvision")
    assert normalisation_of(of_torchvision()[name]) == (MEAN, STD)


def test_what_undoes_it_gives_the_pixels_back():
    v2 = pytest.importorskip("torchvision.transforms.v2")
    image, transform = torch.rand(3, 8, 8), v2.Normalize(MEAN, STD)
    mean, std = normalisation_of(loader(transform=transform))
    back = transform(image) * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]
    torch.testing.assert_close(back, image)


class Normalize:
    """As albumentations has it."""

    def __init__(self, normalization="standard"):
        self.mean, self.std, self.max_pixel_value, self.normalization = MEAN, STD, 255.0, normalization


def test_albumentations_and_timm():
    compose = SimpleNamespace(transforms=[SimpleNamespace(), Normalize()])
    assert normalisation_of(loader(transform=compose)) == (MEAN, STD)
    assert normalisation_of(loader(transform=Normalize("image"))) is None
    assert normalisation_of(loader(data_config={"mean": MEAN, "std": STD, "crop_pct": 0.9})) == (MEAN, STD)


def test_what_is_not_known_for_sure_is_none():
    endless = SimpleNamespace()
    endless.transform = endless
    other = Normalize()
    other.mean = (0.5,) * 3
    for attributes in (
        {},
        {"transform": lambda image: image},
        {"transform": endless},
        {"transform": [Normalize(), other]},
        {"data_config": {"mean": "imagenet", "std": None}},
        {"data_config": {"mean": (0.0,), "std": (0.0,)}},
    ):
        assert normalisation_of(loader(**attributes)) is None
    assert normalisation_of(None) is None
