"""The entry point of 0.2.0: `pip install -e` of that version still names it, and each Trainer would fail without it."""

from normgrad_lightning.env_activation.entry_point import callbacks as callbacks
