"""Which operations a device is charged for, and which line of the package asked for them."""

import sys
from collections import Counter
from pathlib import Path

from torch.utils._python_dispatch import TorchDispatchMode

import normgrad_lightning

OURS = str(Path(normgrad_lightning.__file__).parent)
NOT_LAUNCHED = {"empty", "new_empty", "new_empty_strided", "empty_strided", "empty_like", "is_pinned", "lift_fresh"}
"""Operations that compute nothing, beside views."""


def is_launch(func):
    """Whether an operation computes something on the device: no view, no bare memory."""
    if func._schema.name.removeprefix("aten::") in NOT_LAUNCHED:
        return False
    aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
    return not aliases or any(alias.is_write for alias in aliases)


def line_to_blame():
    """The line of the package that runs, the innermost; None outside of it."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            return f"{Path(frame.f_code.co_filename).relative_to(OURS)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


class Launches(TorchDispatchMode):
    """Counts the operations that the package launches inside, by line, and those of others."""

    def __init__(self):
        super().__init__()
        self.ours, self.others = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if is_launch(func):
            line = line_to_blame()
            if line is None:
                self.others += 1
            else:
                self.ours[line] += 1
        return result
