"""Arguments that commands share. Of a wrong value, argparse says the name of the function that reads it."""

from __future__ import annotations

import argparse
import ast
from typing import Any


def add_model_arguments(parser: argparse.ArgumentParser, *, module_is_required: bool) -> None:
    """Add what says how to make the model of a checkpoint."""
    parser.add_argument(
        "--module",
        required=module_is_required,
        metavar="FILE.py:NAME",
        help="the class that was trained, or a function that makes the model: train.py:LitModel or package.module:Name",
    )
    parser.add_argument(
        "--arg",
        action="append",
        type=name_and_value,
        default=[],
        metavar="NAME=VALUE",
        help="an argument to make the model with (several)",
    )
    parser.add_argument("--unsafe", action="store_true", help="let the checkpoint run code; only if you trust it")


def name_and_value(text: str) -> tuple[str, Any]:
    """Return both parts of `name=value`; a value that is not a Python literal is text."""
    name, _, value = text.partition("=")
    if not (value and name.isidentifier()):
        raise ValueError(text)
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def shape(text: str) -> list[int]:
    """Return the sizes in a text such as `3x224x224`."""
    sizes = [int(size) for size in text.lower().split("x")]
    if min(sizes) < 1:
        raise ValueError(text)
    return sizes


def size(text: str) -> list[int]:
    """Return the height and width in `224x160`, or in `224`, which is both."""
    height, width = shape(text if "x" in text.lower() else f"{text}x{text}")
    return [height, width]


def numbers(text: str) -> list[float]:
    """Return the numbers in a text such as `0.5,0.4,0.4`."""
    return [float(number) for number in text.split(",")]
