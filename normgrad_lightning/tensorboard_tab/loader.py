"""What TensorBoard imports when it starts. It must not fail: an error here would stop TensorBoard itself.

Whatever goes wrong in `load` is a line in TensorBoard's log, and TensorBoard goes on without the tab.
"""

from __future__ import annotations

from typing import Any

from tensorboard.plugins import base_plugin  # type: ignore[import-untyped]

from normgrad_lightning.tensorboard_tab.stored import NAME

SAMPLES = 1000
"""Events that TensorBoard keeps of each run for this tab, unless `--samples_per_plugin` says otherwise."""


class Loader(base_plugin.TBLoader):  # type: ignore[misc]
    """Makes the plugin, and lets TensorBoard keep all of its events: by default it keeps ten."""

    def fix_flags(self, flags: Any) -> None:
        """Raise the number of events kept, unless the user gave one."""
        samples = dict(getattr(flags, "samples_per_plugin", None) or {})
        flags.samples_per_plugin = {NAME: SAMPLES, **samples}

    def load(self, context: Any) -> Any:
        """Return the plugin."""
        from normgrad_lightning.tensorboard_tab.plugin import Plugin

        return Plugin(context)
