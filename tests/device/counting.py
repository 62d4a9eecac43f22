"""What a reading costs a device, counted on meta tensors: launches by the line that asked for them, and bytes kept."""

import sys
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision import models

import normgrad_lightning
from normgrad_lightning import NormGrad

NETWORKS = {
    "ResNet-18": (models.resnet18, [f"layer{i}" for i in range(1, 5)]),
    "ResNet-50": (models.resnet50, [f"layer{i}" for i in range(1, 5)]),
    "ViT-B": (models.vit_b_16, [f"encoder.layers.encoder_layer_{i}" for i in (2, 5, 8, 11)]),
}
"""How to make them, and layers to read."""
GRAD_CAM = ("order0", "grad_cam")
OURS = str(Path(normgrad_lightning.__file__).parent)
NOT_LAUNCHED = {"empty", "new_empty", "new_empty_strided", "empty_strided", "empty_like", "is_pinned", "lift_fresh"}
"""Operations that compute nothing, beside views."""


def is_launch(func):
    """Whether an operation computes something on the device: no view, no bare memory."""
    if func._schema.name.removeprefix("aten::") in NOT_LAUNCHED:
        return False
    aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
    return not aliases or any(alias.is_write for alias in aliases)


def line_to_blame():
    """The line of the package that runs, the innermost; None outside of it."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            return f"{Path(frame.f_code.co_filename).relative_to(OURS)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


class Launches(TorchDispatchMode):
    """Counts the operations that the package launches inside, by line, and those of others."""

    def __init__(self):
        super().__init__()
        self.ours, self.others = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if is_launch(func):
            line = line_to_blame()
            if line is None:
                self.others += 1
            else:
                self.ours[line] += 1
        return result


class Made(TorchDispatchMode):
    """Notes the memory of what the package makes inside, views of others' memory included."""

    def __init__(self):
        super().__init__()
        self._made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if line_to_blame() is not None:
            for t in pytree.tree_leaves(result):
                if isinstance(t, torch.Tensor):
                    storage = t.untyped_storage()
                    self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive(self):
        """The bytes of what is still held, by the address of its storage."""
        return {key: size for key, (storage, size) in self._made.items() if not storage.expired()}


@contextmanager
def _hooks_are_seen():
    """Dispatch modes see what hooks do inside: it is hidden from those of users."""
    ours = [module for name, module in sys.modules.items() if name.startswith("normgrad_lightning.")]
    with ExitStack() as patched:
        for module in ours:
            if hasattr(module, "unseen"):
                patched.enter_context(mock.patch.object(module, "unseen", nullcontext))
        yield


def on_meta(make):
    with torch.device("meta"):
        return make()


def launches(model, batch_size, layers="auto", num_images=None, **options):
    """What a step launches, ours by line and others, with hooks on these layers of a network on meta tensors."""
    images = torch.empty(batch_size, 3, 224, 224, device="meta")
    with _hooks_are_seen(), Launches() as counted, NormGrad(model, layers, num_images, **options):
        model(images).sum().backward()
    return counted


def bytes_kept(model, batch_size, layers="auto", num_images=None, **options):
    """The bytes that autograd keeps for the backward pass, and those that hooks keep beside them."""
    storages = {}

    def keep(t):
        storages[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    weights = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
    images = torch.empty(batch_size, 3, 224, 224, device="meta")
    saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
    with _hooks_are_seen(), Made() as made, saved, NormGrad(model, layers, num_images, **options):
        loss = model(images).sum()
        ours = made.alive()
        del loss
    autograd = {key: storage.nbytes() for key, storage in storages.items() if key not in weights}
    return sum(autograd.values()), sum(size for key, size in ours.items() if key not in autograd)
