"""Every test of the command line may name scripts of its own: their folders leave `sys.path` again."""

import sys

import pytest


@pytest.fixture(autouse=True)
def same_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
