"""Tensor subclasses: plain maps and images, cuts and copies of their type, and training that keeps its bits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import tv_tensors
from twice import Lit, twice

from normgrad_lightning import NormGrad, grad_cam_maps, order0_maps, order1_maps
from normgrad_lightning import functional as NF
from normgrad_lightning.isolated.batches import batch_size, copied, single_images
from normgrad_lightning.isolated.sandbox import Sandbox


class WithMeta(Tensor):
    """As MONAI's MetaTensor: what is computed of it has its type and its metadata, and `new_empty` takes only sizes."""

    @staticmethod
    def __new__(cls, values, meta=None):
        made = torch.as_tensor(values).as_subclass(cls)
        made.meta = meta or {}
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, cls):
            result.meta = next((dict(a.meta) for a in args if isinstance(a, cls) and hasattr(a, "meta")), {})
        return result

    def new_empty(self, size, dtype=None, device=None, requires_grad=False):
        empty = self.as_subclass(Tensor).new_empty(size=size, dtype=dtype, device=device)
        return type(self)(empty.requires_grad_(requires_grad))


class Strict(Tensor):
    """Raises in every function that training does not need."""

    needed = (
        "conv2d", "batch_norm", "relu", "gelu", "silu", "softplus", "tanh", "dropout", "add", "__add__", "mean",
        "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "flatten", "linear", "cross_entropy", "backward",
        "__get__", "dim", "size",
    )  # fmt: skip

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        if name not in cls.needed:
            raise NotImplementedError(f"{name} is not for this tensor")
        return super().__torch_function__(func, types, args, kwargs or {})


def strict(t: Tensor) -> Strict:
    return t.as_subclass(Strict)


def with_meta(t: Tensor) -> WithMeta:
    return WithMeta(t, {"names": ["a", "b"]})


KINDS = {"with metadata": with_meta, "tv_tensors": tv_tensors.Image, "strict": strict}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def batch():
    images = torch.randn(4, 3, 10, 12, generator=torch.Generator().manual_seed(1))
    return images, torch.tensor([0, 1, 2, 3])


MAPS = {
    "order 0": lambda model, b: order0_maps(model, loss_fn, b),
    "order 1": lambda model, b: order1_maps(model, loss_fn, b),
    "order 1, whole sum": lambda model, b: order1_maps(model, loss_fn, b, factorised=False),
    "order 1 of the batch": lambda model, b: order1_maps(model, loss_fn, b, per_image=False),
    "Grad-CAM": lambda model, b: grad_cam_maps(model, b, loss_fn=loss_fn),
    "weight": lambda model, b: order0_maps(model, loss_fn, b, ["0", "3"], target="weight"),
    "input": lambda model, b: order1_maps(model, loss_fn, b, "3", target="input"),
}


@every_kind
@pytest.mark.parametrize("maps_of", MAPS.values(), ids=MAPS)
def test_maps_are_plain_and_those_of_plain_images(kind, maps_of):
    images, labels = batch()
    expected, maps = maps_of(network(), (images, labels)), maps_of(network(), (kind(images), labels))
    assert list(maps) == list(expected)
    for name, m in maps.items():
        assert type(m) is Tensor
        assert torch.equal(m, expected[name])


@every_kind
def test_a_recorder_gives_plain_maps_and_images(kind):
    (images, labels), model = batch(), network()
    with NormGrad(model, kinds=["order0", "grad_cam"]) as recorder:
        loss_fn(model, (kind(images), labels)).backward()
    assert type(recorder.images) is Tensor
    assert torch.equal(recorder.images, images)
    assert {type(m) for name in ("order0", "grad_cam") for m in recorder.maps_of(name).values()} == {Tensor}


@every_kind
def test_cuts_and_copies_keep_the_type(kind):
    images = kind(batch()[0])
    assert batch_size((images, torch.arange(4))) == 4
    cut = single_images({"image": images, "label": torch.arange(4)}, [2])[0]["image"]
    for part, values in ((cut, batch()[0][2:3]), (copied(images), batch()[0])):
        assert type(part) is type(images)
        assert torch.equal(part.as_subclass(Tensor) if kind is not strict else _values(part), values)


def _values(t):
    with torch._C.DisableTorchFunctionSubclass():
        return t.as_subclass(Tensor)


def test_a_copy_has_its_own_memory_and_attributes():
    images = with_meta(batch()[0])
    copy = copied(images)
    copy.meta["names"].append("c")
    copy.zero_()
    assert images.meta == {"names": ["a", "b"]}
    assert torch.equal(images.as_subclass(Tensor), batch()[0])


def test_a_cut_has_the_attributes_of_its_subclass():
    boxes = tv_tensors.BoundingBoxes(torch.rand(4, 4), format="XYXY", canvas_size=(10, 12))
    cut = single_images((tv_tensors.Image(batch()[0]), boxes), [1])[0][1]
    assert type(cut) is tv_tensors.BoundingBoxes
    assert cut.canvas_size == (10, 12)


def order1(x, g, factorised):
    return NF.normgrad_order1(x, g, x, g, x, g, epsilon=1.0, h=1.0, factorised=factorised)


@every_kind
def test_functions_of_a_subclass_give_plain_maps(kind):
    x, g = batch()[0], batch()[0].flip(0)
    if kind is strict:
        pytest.skip("its shape cannot be checked")
    calls = [NF.normgrad, NF.grad_cam, lambda x, g: NF.normgrad_conv(x, g, kernel_size=1)]
    calls += [partial(order1, factorised=factorised) for factorised in (True, False)]
    calls += [lambda x, g: NF.contrast(x[:, 0].abs(), g[:, 0].abs())]
    for call in calls:
        m = call(kind(x), kind(g))
        assert type(m) is Tensor
        assert torch.equal(m, call(x, g))


class Holds(nn.Module):
    """Keeps the latest images, as training steps that log pictures do."""

    def __init__(self, kind):
        super().__init__()
        self.latest = kind(torch.zeros(2, 3))

    def change(self):
        with torch._C.DisableTorchFunctionSubclass():
            self.latest.fill_(5.0)
        vars(self.latest)["seen"] = True


@every_kind
def test_what_a_model_holds_is_put_back(kind):
    model = Holds(kind)
    before = model.latest
    Sandbox(model).run(Holds.change)
    assert model.latest is before
    assert not _values(before).any()
    assert "seen" not in vars(before)


# ---------------------------------------------------------------- whole runs


class OfKind(Lit):
    """Trains on images of a subclass; it reads and writes their metadata."""

    kind = staticmethod(with_meta)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return self.kind(batch[0]), batch[1]

    def training_step(self, batch, batch_idx):
        assert len(batch[0].shape) == 4
        if isinstance(batch[0], WithMeta):
            batch[0].meta["names"].append(str(batch_idx))
            self.names = list(batch[0].meta["names"])
        assert type(batch[0]) is type(self.kind(torch.zeros(1, 3, 2, 2)))
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.keep(_values(loss))
        return loss


class StrictInside(Lit):
    """Trains on images that Lightning itself could not handle, made in the step."""

    def training_step(self, batch, batch_idx):
        loss = _values(F.cross_entropy(self.net(strict(batch[0])), batch[1]))
        self.keep(loss)
        return loss


def test_a_run_on_a_subclass_that_raises_keeps_its_bits_and_has_maps(tmp_path):
    _, watched = twice(tmp_path, StrictInside, eager=Lit)
    assert not watched.warned
    assert type(watched.callback.inputs) is Tensor


@pytest.mark.parametrize("kind", [with_meta, tv_tensors.Image])
def test_a_run_on_a_subclass_keeps_its_bits_and_has_plain_maps(kind, tmp_path):
    made = type("Made", (OfKind,), {"kind": staticmethod(kind)})
    plain, watched = twice(tmp_path, made, eager=Lit)
    assert not watched.warned
    assert {type(m) for m in watched.callback.maps.values()} == {Tensor}
    assert {type(m) for maps in watched.callback.order1.values() for m in maps.values()} == {Tensor}
    assert type(watched.callback.inputs) is Tensor
    assert getattr(plain.module, "names", None) == getattr(watched.module, "names", None)


@pytest.mark.nightly
def test_a_run_on_monais_tensors(tmp_path):
    data = pytest.importorskip("monai.data")
    made = type("Made", (OfKind,), {"kind": staticmethod(lambda t: data.MetaTensor(t, meta={"spacing": [1.0, 2.0]}))})
    _, watched = twice(tmp_path, made, eager=Lit)
    assert not watched.warned
    assert {type(m) for maps in watched.callback.order1.values() for m in maps.values()} == {Tensor}
    assert type(watched.callback.inputs) is Tensor


@pytest.mark.nightly
def test_monais_own_cut_of_metadata_is_kept():
    data = pytest.importorskip("monai.data")
    singles = [data.MetaTensor(torch.rand(1, 4, 4), meta={"name": name}) for name in "abc"]
    images = next(iter(data.DataLoader(singles, batch_size=3)))
    cut = single_images((images, torch.arange(3)), [1])[0][0]
    assert cut.meta["name"] == ["b"]
