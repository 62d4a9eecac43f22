"""Order-1 maps: what of an image matters for *training on it*, or would degrade the model.

Order 0 is the same for raising and for lowering the loss. Order 1 looks at the loss after one inner step of SGD,
`ℓ(θ − ε∇ℓ(θ))`, and adversarial maps at the loss after a step uphill. With θ' for the stepped weights, the gradient of
that is `∇ℓ(θ') − ε∇²ℓ(θ)∇ℓ(θ')`; the Hessian term is a centred difference along `∇ℓ(θ')` (see `inner_step`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normgrad_lightning.checks import check_flag
from normgrad_lightning.isolated.batches import single_images
from normgrad_lightning.isolated.choose_layers import auto_layers
from normgrad_lightning.isolated.inner_step import InnerStep, InnerStepPasses
from normgrad_lightning.isolated.one_pass import LossFunction, check_loss_fn
from normgrad_lightning.isolated.pairs import LayerMaps, PairRecorder
from normgrad_lightning.isolated.retry import PassResult, Retry, WholeBatch, arrived
from normgrad_lightning.layers.names import AUTO, check_model, check_spec, match_layers
from normgrad_lightning.layers.options import ReadOptions, Target
from normgrad_lightning.layers.own_passes import own_pass
from normgrad_lightning.maps import EPSILON
from normgrad_lightning.views.map_dict import Maps


class PassMaps(NamedTuple):
    """Maps of each kind, and what they are maps of.

    Attributes:
        maps: by kind.
        on_host: the same, on the host.
        images: as the network saw them, `(N, C, *S)`; None if none was recognised.
        layers: the names of all layers asked for, in the order of the network.
        problems: a sentence for each of them that cannot be read.
        nothing_to_learn: whether some images have a loss without any gradient, before an inner step.
    """

    maps: dict[str, LayerMaps]
    on_host: dict[str, LayerMaps]
    images: Tensor | None
    layers: list[str]
    problems: list[str]
    nothing_to_learn: bool = False


def order1_maps(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    layers: str | Sequence[str] = AUTO,
    *,
    epsilon: float = EPSILON,
    adversarial: bool = False,
    factorised: bool = True,
    second_order: bool = True,
    per_image: bool = True,
    target: Target = "output",
    token_grid: Sequence[int] | None = None,
    channels_last: bool | None = None,
) -> Maps:
    """Return the order-1 (or adversarial) maps of a model for a batch, in passes that leave no trace in the model.

    Weights that do not ask for a gradient take no part in the inner step, unless none does. BatchNorm, dropout and
    other modules without children run in eval mode. If that gives no maps while BatchNorm has hardly any statistics
    yet, as in the first steps of training, it takes those of the batch. A model in half precision, where an
    inner step would be lost in rounding, runs in float32, and its batch too.

    Args:
        model: any module.
        loss_fn: `loss_fn(model, batch)`, a scalar.
        batch: whatever `loss_fn` takes; with `per_image`, it must be possible to take single images out of it.
        layers: see `select_layers`. `"auto"` takes one more forward pass, to decide.
        epsilon: size of the inner step; the default is the paper's. At a hundred times as much the step has fitted the
            image, and the gradients vanish. As `order1(s·loss, ε) = s · order1(loss, s·ε)`, a loss that is a sum over
            N images takes a step N times as long as a mean.
        adversarial: maps of what would degrade the model, instead of what matters for training on the image.
        factorised: take the activation to be the same in all passes; False: the norm of the whole sum of products.
        second_order: False leaves out the Hessian term, which halves the number of passes. The term is small at the
            default `epsilon`, and grows with it. The map is then that of order 0 after the inner step.
        per_image: each image takes its own inner step, as in the paper; False: the batch takes one together, which is
            the step that training is about to take, at a fraction of the cost. Raw values of the two scale
            differently: a mean over N images divides those of the batch by N.
        target: see `NormGrad`.
        token_grid: see `NormGrad`.
        channels_last: see `NormGrad`.

    Returns:
        The map `(N, *S)` of each layer, in the order of the network: a dict, which a notebook shows as a picture.
        Images that differ in size have maps padded with zeros at the end of each axis.

    Raises:
        ValueError: a loss that is not a finite scalar or does not depend on the weights, one that single images do not
            have, a batch that cannot be taken apart, or a wrong option.

    Example:
        >>> import torch
        >>> from normgrad_lightning import order1_maps
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1, bias=False), torch.nn.Flatten())
        >>> _ = torch.nn.init.constant_(model[0].weight, 2.0)
        >>> image = torch.tensor([[[[0.0, 1.0], [2.0, 3.0]]]])
        >>> def loss_fn(model, images):
        ...     return model(images).square().sum() / 2

        With one weight, w = 2, the loss is ½w²Σx², where Σx² = 14. The map can be had by hand: w²(1 − 14ε)³x², and
        w²(1 + 14ε)³x² for what would degrade the model. With 14ε = ½ that is ½x² and 13½x².

        >>> order1_maps(model, loss_fn, image, "0", epsilon=1 / 28)["0"]
        tensor([[[0.0000, 0.5000],
                 [2.0000, 4.5000]]])
        >>> order1_maps(model, loss_fn, image, "0", epsilon=1 / 28, adversarial=True)["0"]
        tensor([[[  0.0000,  13.5000],
                 [ 54.0000, 121.5000]]])
    """
    check_loss_fn(loss_fn)
    check_flag("adversarial", adversarial)
    check_flag("per_image", per_image)
    check_model(model)
    check_spec(layers)
    kind = "adversarial" if adversarial else "order1"
    options, step = ReadOptions(target, token_grid, channels_last), InnerStep(epsilon, second_order, factorised)
    batches = single_images(batch) if per_image else [batch]
    if layers == AUTO:
        layers = auto_layers(model, loss_fn, batch, options)
    whole = WholeBatch(batch, range(len(batches)) if per_image else None)
    result = run_passes(model, loss_fn, batches, layers, [kind], step, options, whole=whole)
    for problem in result.problems:
        warnings.warn(problem, stacklevel=2)
    maps = result.maps[kind]
    return Maps(maps, kind=kind, images_of=dict.fromkeys(maps, result.images))


def run_passes(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    layers: str | Sequence[str],
    kinds: Sequence[str],
    step: InnerStep,
    options: ReadOptions,
    *,
    num_images: int | None = None,
    whole: WholeBatch | None = None,
) -> PassMaps:
    """Return the maps of these kinds, of all images of all batches; each batch takes its own inner step.

    Args:
        model: see `order1_maps`, as for all that is not described here.
        loss_fn: see there.
        batches: one after the other.
        layers: names or globs.
        kinds: of `ORDER1_KINDS`, which share the pass at θ, or of `READ_KINDS`, which take one pass and no inner step.
        step: how to make the inner step.
        options: how to read layers.
        num_images: how many images of each batch to make maps of, from the first on; None: all.
        whole: what the batches were cut from, for a second look where they give nothing; None: no second look.
    """
    batches = list(batches)
    with own_pass():
        names = match_layers(model, layers, options.target)
        recorder = PairRecorder(model, names, num_images, **vars(options))
        recorder.enabled = False
        with recorder:
            passes = InnerStepPasses(model, loss_fn, recorder, options.target, step)
            run = partial(_run, passes, recorder, kinds)
            result = run(batches) if whole is None else Retry(passes, run, batches, whole).maps()
    of_layers, nothing_to_learn = (recorder.layers, recorder.new_problems()), result.nothing_to_learn
    return PassMaps(result.maps, result.on_host, result.images, *of_layers, nothing_to_learn)


def _run(passes: InnerStepPasses, recorder: PairRecorder, kinds: Sequence[str], batches: Sequence[Any]) -> PassResult:
    """Return the maps of all batches, and their images."""
    results, images = [], []
    passes.losses.clear()
    for batch in batches:
        results.append(passes.maps(batch, kinds))
        images.append(recorder.images)
    maps = {kind: _joined([result[kind] for result in results]) for kind in kinds}
    return PassResult(maps, arrived(maps, passes.losses), None if any(i is None for i in images) else _stacked(images))


def _joined(maps: Sequence[LayerMaps]) -> LayerMaps:
    """Return the maps of all images, of the layers that have one for each."""
    return {name: _stacked([m[name] for m in maps]) for name in maps[0] if all(name in m for m in maps)}


def _stacked(parts: Sequence[Any]) -> Tensor:
    """Return tensors `(n, …)` in one; where they differ in size, padded with zeros at the end of each axis."""
    sizes = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    padded = [F.pad(part, _pads(part.shape[1:], sizes)) for part in parts]
    return torch.cat(padded)


def _pads(shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
    return [pad for size, wanted in reversed(list(zip(shape, sizes, strict=True))) for pad in (0, wanted - size)]
