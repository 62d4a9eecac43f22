"""Checks of what a user says: the argument, what was expected, what came, what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise if `value` is none of the choices."""
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"`{name}`: expected one of {', '.join(map(repr, known))}, but got {value!r}.")


def check_choices(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise if `value` is not a list of some of the choices, each once."""
    known = list(choices)
    given = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    unknown = [one for one in given if one not in known]
    if unknown:
        raise ValueError(f"`{name}`: expected some of {', '.join(map(repr, known))}, but got {unknown[0]!r}.")
    if not given or len(set(given)) < len(given):
        raise ValueError(f"`{name}`: expected a list of {', '.join(map(repr, known))}, each once, but got {value!r}.")


def check_names(name: str, value: object, of: str) -> None:
    """Raise if `value` is not a list of texts. `of`: what each of them names."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_list or not value or not all(isinstance(one, str) and one.strip() for one in value):  # type: ignore[attr-defined]
        raise ValueError(f"`{name}`: expected a list of names, one for each {of}, but got {value!r}.")


def check_whole(name: str, value: object, least: int, hint: str = "") -> None:
    """Raise if `value` is not a whole number of at least `least`."""
    if not _is_whole(value) or int(value) < least:  # type: ignore[call-overload]
        raise ValueError(f"`{name}`: expected a whole number of at least {least}, but got {value!r}.{hint}")


def check_positive(name: str, value: object) -> None:
    """Raise if `value` is not a finite number above zero."""
    if not _is_number(value) or not 0 < value < math.inf:  # type: ignore[operator]
        raise ValueError(f"`{name}`: expected a number above 0, but got {value!r}.")


def check_flag(name: str, value: object, *, or_none: bool = False) -> None:
    """Raise if `value` is neither True nor False (nor, if allowed, None): the text "false" would count as true."""
    if not isinstance(value, bool) and not (or_none and value is None):
        expected = "True, False or None" if or_none else "True or False"
        raise ValueError(f"`{name}`: expected {expected}, but got {value!r}.")


def check_normalisation(mean: object, std: object) -> None:
    """Raise if `mean` and `std` are not numbers, one for all channels or one for each of the same channels."""
    counts = {"mean": _check_numbers("mean", mean), "std": _check_numbers("std", std)}
    if any(number <= 0 for number in _numbers(std)):
        raise ValueError(f"`std`: expected positive numbers, but got {std!r}.")
    if len({count for count in counts.values() if count > 1}) > 1:
        raise ValueError(f"`std`: expected as many numbers as `mean` has, {counts['mean']}, but got {counts['std']}.")


def check_opacity(value: object) -> None:
    """Raise if `value` is not a number from 0 to 1."""
    if not _is_number(value) or not 0 <= value <= 1:  # type: ignore[operator]
        raise ValueError(f"`opacity`: expected a number from 0 (image only) to 1 (map only), but got {value!r}.")


def check_grid(value: object) -> None:
    """Raise if `value` is neither None nor a grid of tokens."""
    sizes = list(value) if isinstance(value, Sequence) and value and all(map(_is_whole, value)) else [0]
    if value is not None and (min(sizes[:2]) < 1 or min(sizes) < 0):
        raise ValueError(
            "`token_grid`: expected None or the sizes (rows, columns), perhaps with the number of tokens before them, "
            f"but got {value!r}."
        )


def _check_numbers(name: str, value: object) -> int:
    numbers = _numbers(value)
    if value is not None and (not numbers or not all(_is_number(n) and math.isfinite(n) for n in numbers)):
        raise ValueError(f"`{name}`: expected None, a number, or a list with one for each channel, but got {value!r}.")
    return len(numbers)


def _numbers(value: object) -> list[float]:
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) else [value]  # type: ignore[list-item]


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
