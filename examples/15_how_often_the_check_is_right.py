"""How often does the check say, rightly or wrongly, that a class rests on one small place?

    python examples/15_how_often_the_check_is_right.py                     # drawn shapes
    python examples/15_how_often_the_check_is_right.py --pets PETS         # photographs with stickers, two networks
    python examples/15_how_often_the_check_is_right.py --xrays XRAYS       # X-rays, with a sticker on one class
    python examples/15_how_often_the_check_is_right.py --judge FILE …      # kept runs again, by the rule as it is now

Each run trains a network, with a mark that names a class or without one, and lets the check do a piece at every tenth
step, as the callback does. A marked run counts if its network has learned the mark: accuracy on a marked class is then
at least 0.2 lower without it. `PETS` and `XRAYS` are folders as `shortcuts.photographs` takes them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from classifier import ShapeClassifier
from photographs import markdown
from shortcut_training import lite0, resnet18
from shortcuts import MARKED, Marked, accuracy, drawn_shapes, photographs, some_of
from torch import nn

from normgrad_lightning import NormGrad
from normgrad_lightning.check.network import Comparison, NetworkWatch
from normgrad_lightning.check.passes import Pool, network_pool
from normgrad_lightning.check.rounds import Check
from normgrad_lightning.check.rule import rests

DAMAGE = 0.2
READ_EVERY = 10
BATCH = 32
LAST_ROUND = 0.8  # of all steps: from there on, as in a `fit`


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
        case: its name.
        marked: the classes that have the mark; none in a clean run.
        seed: of the run.
        steps_an_epoch: how many.
        accuracy: of each marked class, with the mark and without it.
        states: what the check knew, whenever that changed: the step, and what a checkpoint would carry.
    """

    case: str
    marked: list[str]
    seed: int
    steps_an_epoch: int
    accuracy: dict[str, tuple[float, float]] = field(default_factory=dict)
    states: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    @property
    def learned(self) -> list[str]:
        """The marked classes whose accuracy falls without the mark."""
        return [name for name, (marked, clean) in self.accuracy.items() if marked - clean >= DAMAGE]


class Verdict(NamedTuple):
    """What the rule makes of a run.

    Attributes:
        told: the classes that rest on one small place, with the step at which that was first said.
        largest: the largest of the smaller of both differences, of any class, over the run.
    """

    told: dict[str, int]
    largest: float


def judged(run: Run) -> Verdict:
    """Return what the rule, as it is now, makes of the numbers of a run."""
    told: dict[str, int] = {}
    largest = -math.inf
    for step, state in run.states:
        check = Check()
        check.load_state_dict({"check": _with_whole_numbers(state)})
        for found in check.results().values():
            if found.pasted_difference is not None:
                largest = max(largest, min(found.covered_difference, found.pasted_difference))
            if rests(found):
                told.setdefault(found.name, step)
    return Verdict(told, largest)


def _with_whole_numbers(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with classes as numbers: in JSON, they are text."""
    return {**state, "names": {int(label): name for label, name in state["names"].items()}}


def cases_of_shapes(quick: bool) -> list[Case]:
    """Drawn shapes; one class of six has a mark in a corner or anywhere."""

    def data(split: str, seed: int, is_marked: bool, shortcut: str) -> Marked:
        count, offset = (2048 if quick else 4096, 0) if split == "train" else (384, 1)
        return drawn_shapes(count, 2 * seed + offset, shortcut if is_marked else None, 48)

    return [
        Case(f"shapes, {name}", ShapeClassifier, partial(data, shortcut=name), [MARKED], epochs, 1e-2)
        for name, epochs in (("corner", 2), ("anywhere", 3))
    ]


def cases_of_photographs(kind: str, root: Path, size: int, epochs: int, only: str | None = None) -> list[Case]:
    """Two classes with stickers on both or on `only` one; a network from scratch, and one with ImageNet weights."""

    def data(split: str, seed: int, is_marked: bool) -> Marked:
        found = photographs(root, split, size, stickers=is_marked, only=only)
        return some_of(found, 256) if split == "val" else found

    marked = ["cat", "dog"] if only is None else [only]
    networks = (("ResNet-18", resnet18, 1e-3), ("EfficientNet-Lite0, pretrained", lite0, 3e-4))
    return [Case(f"{kind}, {name}", net, data, marked, epochs, rate) for name, net, rate in networks]


def train(case: Case, seed: int, is_marked: bool) -> Run:
    """Train once, with the check."""
    torch.manual_seed(seed)
    training, net, check = case.data("train", seed, is_marked), case.net().train(), Check()
    check.names = dict(enumerate(training.classes))
    run = Run(case.name, list(case.marked) if is_marked else [], seed, len(training) // BATCH)
    steps = case.epochs * run.steps_an_epoch
    optimizer = torch.optim.AdamW(net.parameters(), case.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, case.learning_rate, steps, pct_start=0.2)
    is_last_round = False
    recorder, watch, order = NormGrad(net), NetworkWatch(net), list[int]()
    for step in range(steps):
        order = order if len(order) >= BATCH else torch.randperm(len(training)).tolist()
        rows, order = order[:BATCH], order[BATCH:]
        images, labels = training.images[rows], training.labels[rows]
        is_near_end, is_last = step >= LAST_ROUND * steps, step == steps - 1
        has_work = check.is_due(step) or (is_near_end and not is_last_round)
        is_read = is_last or (step % READ_EVERY == 0 and has_work)
        if is_read:
            recorder.attach()
            watch.attach()
        loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        if is_read:
            pool = pool_of(recorder, watch, images, labels, loss)
            if is_near_end and check.is_complete and not is_last_round:
                check.begin_round(step)
                is_last_round = True
            while check.advance(pool, step) and is_last:
                pass
            state = check.state_dict()["check"]
            if not run.states or run.states[-1][1] != state:
                run.states.append((step, json.loads(json.dumps(state))))
            for watcher in (recorder, watch):
                watcher.clear()
                watcher.detach()
        optimizer.step()
        schedule.step()
    run.accuracy = dict(accuracies(case, net, seed, run.marked, training.classes))
    return run


def pool_of(recorder: NormGrad, watch: NetworkWatch, images: Any, labels: Any, loss: torch.Tensor) -> Pool:
    """Return what the step has shown."""
    call, *_ = Comparison(watch.calls, labels, loss).result()
    assert call is not None
    return network_pool(call, images, recorder.latest_maps(), labels.tolist())


def accuracies(
    case: Case, net: nn.Module, seed: int, names: Iterable[str], classes: Sequence[str]
) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield the accuracy on each class in validation, with the mark and without it."""
    marked, clean = (case.data("val", seed, is_marked) for is_marked in (True, False))
    for name in names:
        number = [list(classes).index(name)]
        yield name, (accuracy(net, marked, number), accuracy(net, clean, number))


def interval(hits: int, count: int) -> str:
    """Return the share with Wilson's interval of 95 %."""
    if count == 0:
        return "no runs"
    share, z = hits / count, 1.96
    middle = (share + z * z / 2 / count) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / 4 / count**2)
    return f"{hits} of {count} ({max(middle - half, 0):.0%} – {min(middle + half, 1):.0%})"


HEAD = [
    "",
    "learned the mark",
    "sentence on its class within two epochs",
    "by the end",
    "first at step",
    "marked: sentence on another class",
    "mark not learned: any sentence",
    "clean: any sentence",
    "largest effect in clean runs",
]


def row(name: str, runs: Sequence[Run]) -> list[str]:
    """Return a line of the table."""
    verdicts = [(run, judged(run)) for run in runs]
    marked = [one for one in verdicts if one[0].marked]
    clean = [verdict for run, verdict in verdicts if not run.marked]
    learned = [one for one in marked if one[0].learned]
    right = [(run, [told[of] for of in run.learned if of in told]) for run, (told, _) in learned]
    early = [run for run, steps in right if steps and min(steps) < 2 * run.steps_an_epoch]
    first = sorted(min(steps) for _, steps in right if steps)
    wrong = [run for run, (told, _) in marked if set(told) - set(run.marked)]
    others = [verdict for run, verdict in marked if not run.learned]
    return [
        name,
        f"{len(learned)} of {len(marked)}",
        interval(len(early), len(learned)),
        interval(len(first), len(learned)),
        f"{first[0]} – {first[-1]}" if first else "never",
        interval(len(wrong), len(marked)),
        f"{sum(bool(told) for told, _ in others)} of {len(others)}",
        interval(sum(bool(told) for told, _ in clean), len(clean)),
        f"{max((largest for _, largest in clean), default=math.nan):.2f}",
    ]


def table(runs: Sequence[Run]) -> str:
    """Return a line for each case, and one for all."""
    names = list(dict.fromkeys(run.case for run in runs))
    rows = [row(name, [run for run in runs if run.case == name]) for name in names]
    return markdown(HEAD, [*rows, *([row("all", runs)] if len(names) > 1 else [])])


def kept(files: Iterable[Path]) -> list[Run]:
    """Return the runs of these files."""
    return [Run(**one) for file in files for one in json.loads(file.read_text())]


def main() -> None:
    """Train all runs, or read kept ones, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pets", type=Path, help="a folder of cats and dogs")
    parser.add_argument("--xrays", type=Path, help="a folder of X-rays, one class of them `covid`")
    parser.add_argument("--only", default="", help="run the cases whose name has this text")
    parser.add_argument("--runs", type=int, default=10, help="of each case, with the mark and without it")
    parser.add_argument("--first", type=int, default=120, help="seed; the rule was found on seeds below 103")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--judge", type=Path, nargs="+", help="run nothing, judge the runs of these files")
    parser.add_argument("--quick", action="store_true", help="a short run, for a test")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.judge:
        print(table(kept(args.judge)))
        return
    cases = [] if args.pets or args.xrays else cases_of_shapes(args.quick)
    if args.pets:
        cases += cases_of_photographs("pets", args.pets, 48 if args.quick else 64, epochs=3)
    if args.xrays:
        cases += cases_of_photographs("X-rays", args.xrays, 48 if args.quick else 64, epochs=4, only="covid")
    runs: list[Run] = []
    for seed in range(args.first, args.first + args.runs):
        for number, case in enumerate(cases):
            for is_marked in (True, False) if args.only in case.name else ():
                runs.append(train(case, seed + 1000 * number, is_marked))
                told, largest = judged(runs[-1])
                kind = f"marked, learned {runs[-1].learned or 'nothing'}" if is_marked else "clean"
                print(f"{case.name}, seed {seed}, {kind}: told {told or 'nothing'}, {largest:.2f} at most", flush=True)
                if args.json:
                    args.json.write_text(json.dumps([asdict(run) for run in runs]))
    print("", table(runs), sep="\n")


if __name__ == "__main__":
    main()
