"""How often the check says rightly, and wrongly, that a class rests on one small place.

    python tests/benchmarks/check_calibration.py                              # drawn shapes
    python tests/benchmarks/check_calibration.py --data PETS --runs 4         # photographs with stickers

Each run trains a small network from scratch, with a mark that names a class and without one, and lets the check do one
piece at every tenth step, as a callback would. A marked run counts if its network has learned the mark: accuracy on the
marked class is then at least 0.2 lower without it. The rule was found on seeds below 103; these are from 103 on.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from classifier import ShapeClassifier
from shortcuts import MARKED, Marked, accuracy, drawn_shapes, photographs, some_of

from normgrad_lightning import NormGrad
from normgrad_lightning.check.network import NetworkWatch, recognised
from normgrad_lightning.check.passes import Pool, network_pool
from normgrad_lightning.check.results import ClassCheck
from normgrad_lightning.check.rounds import Check
from normgrad_lightning.check.rule import rests

DAMAGE = 0.2
READ_EVERY = 10
BATCH = 32
SIZE = 48  # pixels of a side of drawn shapes


class Case(NamedTuple):
    """What to train, and on what.

    Attributes:
        name: for the table.
        net: makes the network.
        data: makes pictures of a split from a seed, with or without the mark.
        marked: the classes that have it.
        epochs: of training.
        learning_rate: of AdamW, at most.
    """

    name: str
    net: Callable[[], nn.Module]
    data: Callable[[str, int, bool], Marked]
    marked: Sequence[str]
    epochs: int
    learning_rate: float


@dataclass
class Run:
    """What came of a run.

    Attributes:
        seed: of the run.
        steps_an_epoch: how many.
        learned: the classes whose accuracy fell without the mark.
        told: the classes that the check told, with the step at which it did first.
        largest: of each class, the largest of the smaller of both differences, over the run.
        rounds: what was known of each class whenever that changed.
    """

    seed: int
    steps_an_epoch: int
    learned: list[str] = field(default_factory=list)
    told: dict[str, int] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)

    def note(self, step: int, results: dict[str, ClassCheck]) -> None:
        """Note what the check says at a step."""
        for name, found in results.items():
            if found.pasted_difference is not None:
                least = min(found.covered_difference, found.pasted_difference)
                self.largest[name] = max(self.largest.get(name, -math.inf), least)
            if rests(found):
                self.told.setdefault(name, step)
        known = {name: {k: v for k, v in asdict(found).items() if k != "example"} for name, found in results.items()}
        if known and (not self.rounds or self.rounds[-1]["classes"] != known):
            self.rounds.append({"step": step, "classes": known})


def cases_of_shapes(images: int) -> list[Case]:
    """Drawn shapes; one class of six has a mark in a corner or anywhere."""

    def data(shortcut: str) -> Callable[[str, int, bool], Marked]:
        def make(split: str, seed: int, is_marked: bool) -> Marked:
            count, offset = (images, 0) if split == "train" else (384, 1)
            return drawn_shapes(count, 2 * seed + offset, shortcut if is_marked else None, SIZE)

        return make

    return [
        Case(f"shapes, {name}", ShapeClassifier, data(name), [MARKED], epochs, 1e-2)
        for name, epochs in (("corner", 2), ("anywhere", 3))
    ]


def cases_of_photographs(root: Path) -> list[Case]:
    """Cats and dogs with a sticker that says so."""
    import torchvision

    def make(split: str, seed: int, is_marked: bool) -> Marked:
        found = photographs(root, split, 96, stickers=is_marked)
        return some_of(found, 256) if split == "val" else found

    return [Case("pets, ResNet-18", lambda: torchvision.models.resnet18(num_classes=2), make, ["cat", "dog"], 2, 1e-3)]


def run(case: Case, seed: int, is_marked: bool) -> Run:
    """Train once, with the check."""
    torch.manual_seed(seed)
    training, net, check = case.data("train", seed, is_marked), case.net(), Check()
    check.names = dict(enumerate(training.classes))
    found = Run(seed, len(training) // BATCH)
    steps = case.epochs * found.steps_an_epoch
    optimizer = torch.optim.AdamW(net.parameters(), case.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, case.learning_rate, steps, pct_start=0.2)
    is_last_round = False
    recorder, watch, order = NormGrad(net), NetworkWatch(net), list[int]()
    for step in range(steps):
        order = order if len(order) >= BATCH else torch.randperm(len(training)).tolist()
        rows, order = order[:BATCH], order[BATCH:]
        images, labels = training.images[rows], training.labels[rows]
        is_last = step == steps - 1
        has_work = check.is_due(step) or (step >= 0.8 * steps and not is_last_round)
        is_read = step == 0 or is_last or (step % READ_EVERY == 0 and has_work)
        if is_read:
            recorder.attach()
            watch.attach()
        loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        if is_read:
            pool = pool_of(recorder, watch, images, labels, loss.item())
            if step >= 0.8 * steps and check.is_complete and not is_last_round:
                check.begin_round(step)
                is_last_round = True
            while check.advance(pool, step) and is_last:
                pass
            found.note(step, {one.name: one for one in check.results().values()})
            recorder.clear()
            recorder.detach()
            watch.clear()
            watch.detach()
        optimizer.step()
        schedule.step()
    if is_marked:
        found.learned = learned(case, net, seed, training.classes)
    return found


def pool_of(recorder: NormGrad, watch: NetworkWatch, images: Any, labels: Any, loss: float) -> Pool:
    """Return what the step has shown."""
    call = recognised(watch.calls, labels.tolist(), loss)
    assert call is not None
    return network_pool(call, images, recorder.latest_maps(), labels.tolist())


def learned(case: Case, net: nn.Module, seed: int, classes: Sequence[str]) -> list[str]:
    """Return the marked classes that are no longer told without the mark."""
    clean, marked = (case.data("val", seed, is_marked) for is_marked in (False, True))
    numbers = [list(classes).index(name) for name in case.marked]
    return [
        name
        for name, number in zip(case.marked, numbers, strict=True)
        if accuracy(net, marked, [number]) - accuracy(net, clean, [number]) >= DAMAGE
    ]


def interval(hits: int, count: int) -> str:
    """Return the share with Wilson's interval of 95 %."""
    if count == 0:
        return "no runs"
    share, z = hits / count, 1.96
    middle = (share + z * z / 2 / count) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / 4 / count**2)
    return f"{hits} of {count} ({max(middle - half, 0):.0%} – {min(middle + half, 1):.0%})"


def row(case: Case, marked: Sequence[Run], clean: Sequence[Run]) -> str:
    """Return a line of the table."""
    found = [one for one in marked if one.learned]
    right = [one for one in found if set(one.told) & set(one.learned)]
    early = [one for one in right if min(one.told.values()) < 2 * one.steps_an_epoch]
    wrong = [one for one in marked if set(one.told) - set(case.marked)]
    false = [one for one in clean if one.told]
    steps = sorted(min(one.told[name] for name in one.told if name in one.learned) for one in right)
    highest = max((value for one in clean for value in one.largest.values()), default=math.nan)
    return (
        f"| {case.name} | {len(found)} of {len(marked)} | {interval(len(early), len(found))} | "
        f"{f'{steps[0]} – {steps[-1]}' if steps else 'never'} | {interval(len(wrong), len(marked))} | "
        f"{interval(len(false), len(clean))} | {highest:.2f} |"
    )


HEAD = (
    "| | learned the mark | of these told, for the right class, within two epochs | at step | other classes told | "
    "clean runs told | largest difference in clean runs |\n|---|---|---|---|---|---|---|"
)


def main() -> None:
    """Train all runs, and print the table as far as it is known after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder of photographs; without it, drawn shapes")
    parser.add_argument("--only", default="", help="run the cases whose name has this text")
    parser.add_argument("--runs", type=int, default=10, help="of each case, with the mark and without it")
    parser.add_argument("--first", type=int, default=103, help="seed")
    parser.add_argument("--images", type=int, default=4096, help="drawn shapes to train on")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = cases_of_photographs(args.data) if args.data else cases_of_shapes(args.images)
    cases = [case for case in cases if args.only in case.name]
    runs: dict[str, tuple[list[Run], list[Run]]] = {case.name: ([], []) for case in cases}
    for seed in range(args.first, args.first + args.runs):
        for case in cases:
            for is_marked, of in zip((True, False), runs[case.name], strict=True):
                of.append(run(case, seed + 1000 * cases.index(case), is_marked))
                last = of[-1]
                told, largest = last.told or "nothing", max(last.largest.values(), default=math.nan)
                print(f"{case.name}, {'marked' if is_marked else 'clean'}, seed {last.seed}: {told}", end="")
                print(f"; learned {last.learned}; largest {largest:.2f}", flush=True)
        if args.json:
            args.json.write_text(
                json.dumps({name: [[asdict(one) for one in of] for of in both] for name, both in runs.items()})
            )
    print("", HEAD, *[row(case, *runs[case.name]) for case in cases], sep="\n")


if __name__ == "__main__":
    main()
