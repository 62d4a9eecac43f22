"""What every test needs before torch is imported, and what its marks imply."""

import os

import pytest
from hypothesis import settings

# On some virtual CPUs oneDNN's AMX path dies of an illegal instruction in bf16 products.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# The networks here are so small that a second thread only waits for the first.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What runs at night is slow, too: `-m "not slow"` leaves it out."""
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker("slow")
