"""Where version 0.1.0 kept its entry point. Metadata of that version may still be installed, and names this module."""

from normgrad_lightning.switch.entry_point import callbacks as callbacks
