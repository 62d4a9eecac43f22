"""Where version 0.1.0 kept its command. A script installed by that version still imports this module."""

from normgrad_lightning.cli.command import main as main
