"""Classes by name: what `--classes` and `--label` say."""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from pathlib import Path

from normgrad_lightning.cli.finding import did_you_mean


def read_classes(text: str) -> list[str]:
    """The names of classes, in the order of their numbers: lines of a text file, or names between commas."""
    if os.path.isfile(text):
        try:
            lines = Path(text).read_text(encoding="utf-8").rstrip().splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"`--classes`: expected a text file with a name per line, but got {text!r}.") from error
    elif "," in text:
        lines = text.split(",")
    else:
        raise ValueError(
            f"`--classes`: expected names with commas between them, or a text file with one per line, but there is no "
            f"file {text!r}."
        )
    return [line.strip() for line in lines]


def check_number_of_classes(classes: Sequence[str], count: int | None) -> None:
    """Raise if there are not as many names as the model knows classes, where that is known."""
    if count is not None and len(classes) != count:
        raise ValueError(
            f"`--classes`: expected {count} names, as the model knows {count} classes, but got {len(classes)}."
        )


def class_number(label: int | str, classes: Sequence[str] | None) -> int:
    """The number of a class that is given by its name or number; a name counts first."""
    name = str(label)
    if classes is not None and name in classes:
        if list(classes).count(name) > 1:
            raise ValueError(f"`--label`: expected one class, but {name!r} is the name of several. Give its number.")
        return list(classes).index(name)
    if isinstance(label, int):
        return label
    if classes is None:
        raise ValueError(
            f"`--label`: expected a number, as the names of classes are not known, but got {name!r}. Give them with "
            "`--classes`."
        )
    raise ValueError(
        f"`--label`: expected the name or number of a class, but got {name!r}.{did_you_mean(name, classes)}"
    )


def class_name(label: int, classes: Sequence[str] | None) -> str:
    """The name of a class, or its number, if its name is empty or not known."""
    return (classes[label] if classes is not None and label < len(classes) else "") or str(label)
