"""The command `normgrad-lightning`."""
