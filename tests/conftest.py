"""What every test needs before torch is imported."""

import os

# On some virtual CPUs oneDNN's AMX path dies of an illegal instruction in bf16 products.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# The networks here are so small that a second thread only waits for the first.
os.environ.setdefault("OMP_NUM_THREADS", "1")
