"""A callback that both Lightnings accept, without importing either.

`pytorch_lightning` and `lightning.pytorch` each have their own `Callback`. Importing one of them changes loggers,
warnings and filters of a script that uses the other. So our class gets each of these bases once the script imports it.
"""

from __future__ import annotations

import sys
from typing import TypeVar

_HOMES = ("pytorch_lightning.callbacks.callback", "lightning.pytorch.callbacks.callback")
_Class = TypeVar("_Class", bound=type)


class Callback:
    """The base of our class until the script imports a Lightning."""


def for_both_lightnings(cls: _Class) -> _Class:
    """Return the class itself, a subclass of each `Callback` that is imported, now or later.

    Args:
        cls: a class whose only base is the `Callback` above.
    """
    bases = _Bases(cls)
    bases.update()
    sys.meta_path.insert(0, bases)
    return cls


class _Bases:
    """Updates the bases of a class. Python asks it at each import, as it asks every finder; it never finds a module.

    Lightning imports more modules after `Callback`, so the bases are there before the import of Lightning ends.
    """

    def __init__(self, cls: type) -> None:
        self._class = cls

    def find_spec(self, *_: object) -> None:
        """Find nothing: the module is somebody else's."""
        self.update()

    def update(self) -> None:
        """Add each `Callback` that is not yet a base. New ones come last, so no subclass gets a conflict of bases."""
        found = [getattr(sys.modules.get(home), "Callback", None) for home in _HOMES]
        new = [base for base in found if isinstance(base, type) and base not in self._class.__mro__]
        if new:
            old = [base for base in self._class.__bases__ if base is not Callback]
            self._class.__bases__ = (*old, *new)
