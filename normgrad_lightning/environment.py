"""What the environment says: `NORMGRAD=1` or `NORMGRAD=0`, and a variable `NORMGRAD_<FLAG>` for each flag.

Light to import, for Lightning's entry points bring it into every run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

SWITCH = "NORMGRAD"
_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")

REMOVED = {
    "second_order": "the callback takes the Hessian term. Leave it out, or call `order1_maps(second_order=...)`.",
    "factorised": "the callback takes the factorised form. Leave it out, or call `order1_maps(factorised=...)`.",
    "patch_layers": "patches and atlas are of all layers combined and of the last one. Leave this out.",
}
"""Flags of earlier versions, and what to do instead."""


def switch() -> bool | None:
    """Return whether the environment switches NormGrad on or off; None if it says nothing."""
    text = os.environ.get(SWITCH, "").strip()
    if not text:
        return None
    try:
        return _yes_or_no(text)
    except ValueError:
        raise ValueError(f"`{SWITCH}`: expected 1 or 0 in the environment, but got {text!r}.") from None


def variables() -> dict[str, str]:
    """Return the variables of flags that are set to something, by the flag's name."""
    prefix = f"{SWITCH}_"
    texts = {name: text.strip() for name, text in os.environ.items() if name.startswith(prefix)}
    return {name[len(prefix) :].lower(): text for name, text in texts.items() if text}


def variable(flag: str) -> str:
    """Return the name of a flag's variable."""
    return f"{SWITCH}_{flag.upper()}"


def flags(kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that the environment sets, each of its own type.

    Args:
        kinds: the types of all flags.

    Raises:
        ValueError: a variable that is none of them, or that cannot be read.
    """
    return {flag: _read(flag, text, kinds) for flag, text in variables().items()}


def hint(wrong: str, flags: Iterable[str], spelt: Callable[[str], str] = str) -> str:
    """Return which flag a wrong name may mean: one spelt alike, or the shortest with that word; or else all flags."""
    import difflib

    known = sorted(flags, key=lambda flag: (len(flag), flag))
    near = difflib.get_close_matches(wrong, known, 1) or [flag for flag in known if wrong in flag.split("_")]
    return f"Did you mean `{spelt(near[0])}`?" if near else f"The flags are {', '.join(map(spelt, sorted(known)))}."


def _read(flag: str, text: str, kinds: Mapping[str, Any]) -> Any:
    if flag in REMOVED:
        raise ValueError(f"`{variable(flag)}`: {REMOVED[flag]}")
    if flag not in kinds:
        raise ValueError(f"`{variable(flag)}`: there is no such flag. {hint(flag, kinds, variable)}")
    try:
        return parse(text, kinds[flag])
    except ValueError:
        raise ValueError(f"`{variable(flag)}`: expected {spoken(kinds[flag])}, but got {text!r}.") from None


def can_be_set(flag: str, text: str, kinds: Mapping[str, Any]) -> bool:
    """Return whether a variable can give a flag this value: a batch, for example, can be given in code only."""
    try:
        parse(text, kinds[flag])
    except ValueError:
        return False
    return True


def parse(text: str, kind: Any) -> Any:
    """Return the value of this type that is written in the text; lists are separated by commas, in brackets or not.

    Raises:
        ValueError: if it cannot be read as one.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _first_that_fits(text, inner)
    if origin is Sequence:
        parts = (text[1:-1] if _is_bracketed(text) else text).split(",")
        return [parse(part.strip().strip("'\""), inner[0]) for part in parts]
    if origin is Literal and text not in inner:
        raise ValueError(text)
    return text if origin is Literal else _PLAIN[kind][0](text)


def spoken(kind: Any) -> str:
    """Return a type in the words of a message."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        listed = [get_args(kind)[0] for kind in inner if get_origin(kind) is Sequence]
        return " or ".join(spoken(kind) for kind in inner if kind not in listed)
    if origin is Sequence:
        return f"{spoken(inner[0])} (several: separated by commas)"
    if origin is Literal:
        return ", ".join(map(repr, inner))
    return _PLAIN[kind][1]


def _first_that_fits(text: str, kinds: Sequence[Any]) -> Any:
    """Read it as a list if it looks like one, and as one value if it does not."""
    lists = [kind for kind in kinds if get_origin(kind) is Sequence]
    single = [kind for kind in kinds if kind not in lists]
    for kind in [*lists, *single] if _is_bracketed(text) or "," in text else [*reversed(single), *lists]:
        try:
            return parse(text, kind)
        except ValueError:
            continue
    raise ValueError(text)


def _is_bracketed(text: str) -> bool:
    return (text[:1], text[-1:]) in (("[", "]"), ("(", ")"))


def _yes_or_no(text: str) -> bool:
    if text.lower() not in (*_YES, *_NO):
        raise ValueError(text)
    return text.lower() in _YES


def _none(text: str) -> None:
    if text.lower() not in ("none", "null"):
        raise ValueError(text)


_PLAIN: dict[Any, tuple[Callable[[str], Any], str]] = {
    bool: (_yes_or_no, "1 or 0"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    str: (str, "text"),
    NoneType: (_none, "none"),
}
"""What reads a value of each type, and the type in the words of a message."""
