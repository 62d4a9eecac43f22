"""How soon do the patches show a planted shortcut, how soon does the check say so, and how soon does validation?

    python examples/13_how_soon_a_shortcut_shows.py                      # drawn shapes, three shortcuts, five seeds
    python examples/13_how_soon_a_shortcut_shows.py --data PETS          # photographs with stickers, two networks

Each run is made twice, with the shortcut and without it. Without it, a patch counts if it shows the place where the
mark would have been: that is chance. What the check tells without it is a false alarm. `PETS` is a folder as
`shortcuts.photographs` takes it.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from classifier import ShapeClassifier, quiet_lightning
from shortcut_training import Entry, Journal, lite0, resnet18, train
from shortcuts import MARKED, SHORTCUTS, Hits, Marked, drawn_shapes, photographs, some_of
from torch import nn

from normgrad_lightning.views.tag_namer import COMBINED

ALIKE, MORE_ALIKE = 0.7, 0.2
"""A rule that would warn of a class: the sameness of its patches, and how much it has risen since the first event."""

DAMAGE = 0.2
"""Validation shows the damage if accuracy without the shortcut is this much lower than with it."""


class Case(NamedTuple):
    """What to train, on what, and which class and map to look at.

    Attributes:
        name: for the table.
        net: makes the network.
        data: makes pictures of a split, with or without the shortcut, from a seed.
        shortcut: what counts as shown; see `shortcuts.Hits`.
        classes: the classes that have it.
        steps: of training.
        learning_rate: of AdamW.
    """

    name: str
    net: Callable[[], nn.Module]
    data: Callable[[str, bool, int], Marked]
    shortcut: str
    classes: Sequence[str]
    steps: int
    learning_rate: float


def cases_of_shapes(quick: bool) -> list[Case]:
    """A small network and three shortcuts in one of six classes."""
    training, held_out, epochs, rate = (2048, 96, 2, 3e-3) if quick else (4096, 512, 3, 1e-2)

    def data(shortcut: str) -> Callable[[str, bool, int], Marked]:
        def make(split: str, is_marked: bool, seed: int) -> Marked:
            count, offset = (training, 0) if split == "train" else (held_out, 1)
            return drawn_shapes(count, 2 * seed + offset, shortcut if is_marked else None)

        return make

    epoch = training // 32
    return [
        Case(f"shapes, {name}", ShapeClassifier, data(name), name, [MARKED], epochs * epoch, rate) for name in SHORTCUTS
    ]


def cases_of_photographs(root: Path, quick: bool) -> list[Case]:
    """Cats and dogs with a sticker that says so: a network from scratch, and one with ImageNet weights."""
    cases = []
    for name, net, size, rate in (
        ("ResNet-18", resnet18, 96, 1e-3),
        ("EfficientNet-Lite0, pretrained", lite0, 112, 3e-4),
    ):
        cache: dict[tuple[str, bool], Marked] = {}

        def data(split: str, is_marked: bool, seed: int, size: int = size, cache: Any = cache) -> Marked:
            if (split, is_marked) not in cache:
                found = photographs(root, split, size, stickers=is_marked)
                cache[split, is_marked] = some_of(found, 64 if quick else 256) if split == "val" else found
            return cache[split, is_marked]

        steps = 16 if quick else 128
        cases.append(Case(f"pets, {name}", net, data, "sticker", ["cat", "dog"], steps, rate))
    return cases


def run(case: Case, seed: int, is_marked: bool, every_n_steps: int) -> Journal:
    """One training run."""
    pl.seed_everything(seed, verbose=False)
    training = case.data("train", is_marked, seed)
    validation = case.data("val", False, seed), case.data("val", True, seed)
    if not is_marked and case.shortcut != "tint":  # where the mark would have been
        training = replace(training, boxes=case.data("train", True, seed).boxes)
    with tempfile.TemporaryDirectory() as folder:
        journal, _ = train(
            case.net(),
            training,
            validation,
            Hits(training, case.shortcut),
            steps=case.steps,
            every_n_steps=every_n_steps,
            seed=seed,
            out=Path(folder),
            learning_rate=case.learning_rate,
            classes=case.classes,
        )
    return journal


def first_step(entries: Sequence[Entry], is_so: Callable[[Entry], bool]) -> float:
    """The step of the first event from which on it is so; infinite if never."""
    return next((entry.step for entry in entries if is_so(entry)), math.inf)


def hits(entry: Entry, which: str, classes: Sequence[str]) -> float:
    """The largest share over these classes of patches that show the shortcut, in the combined map or the last layer."""
    names = [name for name in entry.hits if (name == COMBINED) == (which == COMBINED)]
    return max((entry.hits[name].get(of, 0.0) for name in names for of in classes), default=0.0)


def result(case: Case, with_mark: Journal, without: Journal) -> dict[str, Any]:
    """What the table says of a seed."""
    marked, clean = with_mark.entries, without.entries
    found: dict[str, Any] = {}
    for which in (COMBINED, "last"):
        found[which] = {
            "first": hits(marked[0], which, case.classes),
            "half": first_step(marked[1:], lambda entry: hits(entry, which, case.classes) >= 0.5),  # noqa: B023
            "end": hits(marked[-1], which, case.classes),
            "chance": max(hits(entry, which, case.classes) for entry in clean[1:]),
        }
    found["damage"] = first_step(marked[1:], lambda entry: entry.marked - entry.clean >= DAMAGE)
    found["told"] = min((with_mark.told.get(of, math.inf) for of in case.classes), default=math.inf)
    found["clean accuracy"], found["marked accuracy"] = marked[-1].clean, marked[-1].marked
    found["control accuracy"] = clean[-1].clean
    return found


def row(case: Case, seeds: Sequence[dict[str, Any]]) -> list[str]:
    """A line of the table for each map: ranges over the seeds."""

    def span(values: Sequence[float], digits: int = 2) -> str:
        words = ["never" if math.isinf(v) else f"{v:.{digits}f}" for v in (min(values), max(values))]
        return words[0] if words[0] == words[1] else f"{words[0]} – {words[1]}"

    lines = []
    for which in (COMBINED, "last"):
        of = [seed[which] for seed in seeds]
        cells = [
            case.name,
            which,
            span([seed["first"] for seed in of]),
            span([seed["half"] for seed in of], 0),
            span([seed["end"] for seed in of]),
            span([seed["chance"] for seed in of]),
            span([seed["told"] for seed in seeds], 0),
            span([seed["damage"] for seed in seeds], 0),
            span([seed["clean accuracy"] for seed in seeds]),
            span([seed["marked accuracy"] for seed in seeds]),
            span([seed["control accuracy"] for seed in seeds]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def warned_of(entries: Sequence[Entry]) -> set[str]:
    """The classes that a rule would warn of: patches of the combined map that look alike, and more than at first."""
    first = entries[0].alike.get(COMBINED, {})
    later = [alike for entry in entries[1:] for alike in entry.alike.get(COMBINED, {}).items()]
    return {of for of, value in later if value >= ALIKE and value >= first.get(of, math.inf) + MORE_ALIKE}


def rule(case: Case, runs: Sequence[Sequence[Journal]]) -> str:
    """In how many runs sameness warns, rightly and wrongly."""
    found = sum(not warned_of(marked.entries).isdisjoint(case.classes) for marked, _ in runs)
    false = sum(bool(warned_of(clean.entries)) for _, clean in runs)
    return (
        f"{case.name}: sameness of at least {ALIKE}, and {MORE_ALIKE} above the first event, would warn of a class "
        f"with the shortcut in {found} of {len(runs)} runs; of any class in {false} of {len(runs)} runs without it."
    )


def told(case: Case, runs: Sequence[Sequence[Journal]]) -> str:
    """In how many runs the check tells a class, rightly and wrongly."""
    marked, clean = zip(*runs, strict=True)
    learned = [one for one in marked if one.entries[-1].marked - one.entries[-1].clean >= DAMAGE]
    found = sum(not one.told.keys().isdisjoint(case.classes) for one in learned)
    more = sum(not one.told.keys().isdisjoint(case.classes) for one in marked) - found
    others = sum(not one.told.keys() <= set(case.classes) for one in marked)
    return (
        f"{case.name}: the check tells a class with the shortcut in {found} of {len(learned)} runs in which it costs "
        f"accuracy in the end, and in {more} of {len(runs) - len(learned)} others; another class in {others} of "
        f"{len(runs)}; any class in {sum(bool(one.told) for one in clean)} of {len(runs)} runs without it."
    )


HEAD = [
    "| | map | patches on it at step 0 | half of them, from step | at the end | chance | told by the check, from step "
    "| damage in validation, from step | accuracy without it | with it | of the control |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
]


def main() -> None:
    """Run all seeds of all cases, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder of photographs; without it, drawn shapes")
    parser.add_argument("--only", default="", help="run the cases whose name has this text")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--every", type=int, default=16, help="steps from one event, and one validation, to the next")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="small and short, for a test")
    args = parser.parse_args()
    quiet_lightning()
    torch.set_num_threads(1)
    cases = cases_of_photographs(args.data, args.quick) if args.data else cases_of_shapes(args.quick)
    table, rules, kept = list(HEAD), [], {}
    for case in (case for case in cases if args.only in case.name):
        runs = [[run(case, seed, is_marked, args.every) for is_marked in (True, False)] for seed in range(args.seeds)]
        table += row(case, [result(case, *pair) for pair in runs])
        rules += [told(case, runs), rule(case, runs)]
        kept[case.name] = [
            [{"told": one.told, "entries": [asdict(entry) for entry in one.entries]} for one in pair] for pair in runs
        ]
        print("\n".join(table if len(kept) == 1 else table[-2:]), flush=True)
    print("", *rules, sep="\n")
    if args.json:
        args.json.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
