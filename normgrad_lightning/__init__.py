"""See which pixels a vision model learns from, while it learns.

The names below are loaded when they are first used, so that importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normgrad_lightning import functional as functional
    from normgrad_lightning.callback import NormGradCallback as NormGradCallback
    from normgrad_lightning.check.given import check_maps as check_maps
    from normgrad_lightning.hooks.recorder import NormGrad as NormGrad
    from normgrad_lightning.isolated.choose_layers import select_layers as select_layers
    from normgrad_lightning.isolated.order0 import grad_cam_maps as grad_cam_maps
    from normgrad_lightning.isolated.order0 import order0_maps as order0_maps
    from normgrad_lightning.isolated.order1 import order1_maps as order1_maps
    from normgrad_lightning.tensorboard_tab.report import show_report as show_report
    from normgrad_lightning.writers.own_loop import log_maps as log_maps

__version__ = "0.3.0"

_HOMES = {
    "NormGrad": "hooks.recorder",
    "NormGradCallback": "callback",
    "check_maps": "check.given",
    "grad_cam_maps": "isolated.order0",
    "log_maps": "writers.own_loop",
    "order0_maps": "isolated.order0",
    "order1_maps": "isolated.order1",
    "select_layers": "isolated.choose_layers",
    "show_report": "tensorboard_tab.report",
}

__all__ = [
    "NormGrad",
    "NormGradCallback",
    "check_maps",
    "functional",
    "grad_cam_maps",
    "log_maps",
    "order0_maps",
    "order1_maps",
    "select_layers",
    "show_report",
]


def __getattr__(name: str) -> Any:
    if name == "functional":
        return import_module(f"{__name__}.functional")
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
