"""All that a process shares: loggers, warnings, the environment, torch's settings, random numbers, both Lightnings."""

import hashlib
import logging
import os
import random
import signal
import sys
import threading
import warnings

PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics")


def state():
    """What is set now, by name, in plain values that two processes can compare."""
    return {
        "warnings.filters": [repr(entry) for entry in warnings.filters],
        "warnings.formatwarning": named(warnings.formatwarning),
        "warnings.showwarning": named(warnings.showwarning),
        "loggers": loggers(),
        "logging": [logging.root.manager.disable, logging.getLoggerClass().__name__, logging.raiseExceptions],
        "rank_zero": rank_zero(),
        "Lightnings": sorted({name.split(".")[0] for name in sys.modules} & set(PACKAGES)),
        "environment": {name: text for name, text in os.environ.items() if not name.startswith(("NORMGRAD", "PYTEST"))},
        "sys": [list(sys.path), named(sys.excepthook), sys.getrecursionlimit(), named(threading.excepthook)],
        "signals": [named(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
        "torch": torch_settings(),
        "random numbers": random_numbers(),
    }


def named(what):
    return f"{getattr(what, '__module__', '')}.{getattr(what, '__qualname__', what)}"


def loggers():
    """Level, handlers and the like of the root and of each logger of a Lightning; our own are below theirs."""
    known = {name: logger for name, logger in logging.root.manager.loggerDict.items() if name.startswith(PACKAGES)}
    real = {name: logger for name, logger in known.items() if isinstance(logger, logging.Logger)}
    real = {name: logger for name, logger in real.items() if not name.endswith(".normgrad")}
    return {
        name: [logger.level, [repr(h) for h in logger.handlers], logger.propagate, logger.disabled, len(logger.filters)]
        for name, logger in {"": logging.root, "py.warnings": logging.getLogger("py.warnings"), **real}.items()
    }


def rank_zero():
    module = sys.modules.get("lightning_utilities.core.rank_zero")
    return module and [module.log.name, named(module.rank_zero_deprecation_category), named(module.rank_zero_only)]


def torch_settings():
    if "torch" not in sys.modules:
        return None
    import torch

    return [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch.is_autocast_enabled(),
        torch.is_autocast_cpu_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        str(torch.get_default_dtype()),
        str(torch.get_default_device()),
        torch.get_num_threads(),
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.mkldnn.enabled,
        torch.utils.data.get_worker_info() is None,
        len(torch.nn.modules.module._global_forward_hooks),
        len(torch.nn.modules.module._global_forward_pre_hooks),
    ]


def random_numbers():
    states = [random.getstate()]
    if "numpy" in sys.modules:
        import numpy as np

        states.append(np.random.get_state()[1].tobytes())
    if "torch" in sys.modules:
        import torch

        states.append(torch.get_rng_state().numpy().tobytes())
    return [hashlib.sha256(repr(one).encode()).hexdigest() for one in states]
