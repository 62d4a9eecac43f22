"""What every test needs before torch is imported, what its marks imply, and in which order tests run."""

import gc
import os

import google_crc32c
import pytest
from hypothesis import settings
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow

# On some virtual CPUs oneDNN's AMX path dies of an illegal instruction in bf16 products.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# The networks here are so small that a second thread only waits for the first.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# TensorBoard's own checksums, in pure Python, take a third of a short run.
pywrap_tensorflow.crc32c = google_crc32c.value

LONGEST = ("test_works_strategies.py", "test_stand_in.py")
"""Files that come first: at the end, one process would wait for the other."""

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What runs at night is slow, too: `-m "not slow"` leaves it out."""
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker("slow")
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish():
    """Leave what was imported out of all searches for garbage: with it, each takes a third of a second."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # libraries tell of what is never freed
