"""The names of pictures, scalars and artifacts in MLflow."""

import sys
from types import SimpleNamespace

import pytest

from normgrad_lightning.writers.mlflow import key


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("3.11.1", "normgrad_order0/03_gr__e.1"),
        ("3.12.0rc1", "normgrad_order0/03_gr__e.1"),
        ("3.10.1", "normgrad_order0_03_gr__e.1"),
        ("2.22.0", "normgrad_order0_03_gr__e.1"),
    ],
)
def test_mlflow_gets_names_that_it_can_read_back(version, expected, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(__version__=version))
    assert key("normgrad_order0/03_größe.1") == expected
