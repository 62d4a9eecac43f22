"""Runs all studies, two at a time, and keeps what they print.

    python examples/evidence.py --out evidence                   # drawn shapes, and the packages' photographs
    python examples/evidence.py --out evidence --pets FOLDER     # also those on photographs of cats and dogs
    python examples/evidence.py --out evidence --xrays FOLDER    # also those on X-rays
    python examples/evidence.py --quick                          # small and short: that everything runs

The folder of pets has `clean/`, `mask/` and `sticker/`, as `10_photographs_with_masks.py --help` and
`shortcuts.photographs` say; that of X-rays is as `14_what_x_rays_are_told_by.py --help` says.
A study whose packages are not installed is left out, and that is said. All seeds are fixed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
IMAGENET = ("efficientnet_lite_pytorch", "skimage")


class Study(NamedTuple):
    """A script with its options, and the packages that it needs beyond ours."""

    name: str
    command: list[str]
    packages: tuple[str, ...] = ()


def studies(out: Path, pets: Path | None, xrays: Path | None, quick: bool) -> list[Study]:
    """What to run; each leaves its pictures and figures in a folder of its own."""
    small, once = (["--quick"], ["--runs", "1"]) if quick else ([], [])
    right = ["15_how_often_the_check_is_right.py", *small, *once]
    found = []
    if pets is not None:  # the longest first, so that no core waits at the end
        how_soon = ["13_how_soon_a_shortcut_shows.py", "--data", str(pets), *small]
        noisy = ["12_label_noise.py", "--data", str(pets / "clean" / "train"), "--epochs", "4", "--seeds", "3", *small]
        with_masks = ["10_photographs_with_masks.py", "--data", str(pets), *_out(out, "pets"), *small]
        found = [
            Study("stickers_resnet", [*how_soon, "--only", "ResNet"], IMAGENET),
            Study("stickers_efficientnet", [*how_soon, "--only", "EfficientNet"], IMAGENET),
            Study("pets", with_masks, IMAGENET),
            Study("label_noise_of_pets", noisy, IMAGENET),
            Study("check_of_pets", [*right, "--pets", str(pets)], IMAGENET),
        ]
    if xrays is not None:
        found += [
            Study("check_of_x_rays", [*right, "--xrays", str(xrays)], IMAGENET),
            Study("x_rays", ["14_what_x_rays_are_told_by.py", "--data", str(xrays), *small], IMAGENET),
        ]
    found += [
        Study("shortcuts", ["13_how_soon_a_shortcut_shows.py", *small, *(["--seeds", "1"] if quick else [])]),
        Study("check", right),
        Study("drawn_x_rays", ["14_what_x_rays_are_told_by.py", *small]),
        Study("label_noise", ["12_label_noise.py", *small]),
        Study("sanity_checks", ["11_sanity_checks.py", *_out(out, "sanity_checks"), *small], IMAGENET),
        Study("shapes_with_masks", ["10_photographs_with_masks.py", "--data", "shapes", *_out(out, "shapes"), *small]),
        Study("paper_figures", ["09_paper_figures.py", *_out(out, "paper_figures"), *small], IMAGENET),
    ]
    if not quick:
        found.append(Study("two_objects", ["02_what_helps_and_what_hurts.py", *_out(out, "two_objects")]))
    return found


def _out(out: Path, name: str) -> list[str]:
    return ["--out", str(out / name)]


def run(study: Study, out: Path) -> bool:
    """Run a study, and keep what it prints; whether it went well."""
    missing = [package for package in study.packages if importlib.util.find_spec(package) is None]
    if missing:
        print(f"{study.name}: left out, for want of {', '.join(missing)}", flush=True)
        return True
    start = time.monotonic()
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    command = [sys.executable, str(HERE / study.command[0]), *study.command[1:]]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines(keepends=True) if "it/s" not in line]  # progress bars
    (out / f"{study.name}.md").write_text("".join(lines))
    took = f"{(time.monotonic() - start) / 60:.1f} min"
    print(f"{study.name}: {took}, {out / f'{study.name}.md'}" + ("" if not done.returncode else " FAILED"), flush=True)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
    return not done.returncode


def main() -> None:
    """Run all studies; the exit code says whether all went well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("normgrad_demo") / "evidence")
    parser.add_argument("--pets", type=Path, help="photographs of cats and dogs")
    parser.add_argument("--xrays", type=Path, help="X-rays")
    parser.add_argument("--only", default="", help="run the studies whose name has this text")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time; each takes one core")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = [study for study in studies(args.out, args.pets, args.xrays, args.quick) if args.only in study.name]
    with ThreadPoolExecutor(args.jobs) as workers:
        went_well = list(workers.map(partial(run, out=args.out), chosen))
    sys.exit(not all(went_well))


if __name__ == "__main__":
    main()
