"""Everything that an extra pass could disturb, and how each of these is protected.

- Weights: a pass runs on copies, so the weights and hooks on them, such as those of DDP, are not touched. Their `.grad`
  is taken away for the pass: an optimizer that it reaches has nothing to step with. Instead of copies, a pass may get
  the weights themselves, read-only (`read_only`).
- Buffers (BatchNorm's statistics, counters, queues): a pass runs on clones.
- Python attributes of the model, of its modules, of their classes and of what these hold: put back after each pass
  (`python_state`). Context variables: a pass has its own context.
- Train and eval mode: modules without children (BatchNorm, dropout and the like) run in eval mode, and get their own
  mode back.
- Random numbers: torch (CPU and the model's devices), numpy and python, and generators that the model holds, continue
  as if nothing had been drawn. So all passes of an event see the same random numbers.
- Hooks on modules: those that a pass adds are removed, those that it removes are put back.
- Compiled code: a pass runs eagerly, so nothing is compiled for it.
- Settings of torch: a pass needs some of them to be different, and gets them (`torch_settings`).

Not protected: files, prints, globals, other processes, data modules, and iterators and queues that the model holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from normgrad_lightning.isolated.interrupts import TalksToOthers
from normgrad_lightning.isolated.python_state import HOOKS, PythonState
from normgrad_lightning.isolated.random_state import devices_of, preserved_rng
from normgrad_lightning.isolated.torch_settings import settings_for_passes
from normgrad_lightning.maths.tensor_subclasses import no_overrides

HALF = (torch.float16, torch.bfloat16)
MIN_SHARED_VALUES = 2**14
"""A tensor of fewer numbers is copied faster than it is made read-only."""

_forbid_writing: Callable[[Tensor], None] | None = getattr(torch._C, "_set_throw_on_mutable_data_ptr", None)
_ACTS_BY_ITSELF = (nn.MultiheadAttention, nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)
_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_HOOKS = (*HOOKS, *_FLAGS)


class Sandbox:
    """Runs functions of a model so that they leave no trace in it.

    Args:
        model: any module. After each run it is as it is now.
        training: whether it runs as in training; else modules without children run in eval mode.
        exact: whether to compute in float32, with all of its bits, what training may compute in half precision.
        read_only: whether to take the weights themselves in place of copies. Writing to one is an error then.
    """

    def __init__(
        self, model: nn.Module, *, training: bool = False, exact: bool = False, read_only: bool = False
    ) -> None:
        self._model = model
        self._training = training
        self._read_only = read_only
        self._exact = exact
        self._copy = widened_copy if exact else Tensor.clone
        self._state = PythonState(model)
        self._devices = devices_of([*self._state.parameters, *self._state.buffers])
        self._in_place_of: dict[int, Tensor] = {}

    def replace(self, buffers: Mapping[int, Tensor]) -> None:
        """Run on copies of these in place of buffers from now on, by the identity of those."""
        self._in_place_of.update(buffers)

    def run(self, function: Callable[[nn.Module], Any], parameters: Mapping[str, Tensor] | None = None) -> Any:
        """Return `function(model)`, with these tensors in place of the parameters; by default, with copies."""
        given, stand_in = parameters or {}, read_only if self._read_only else self._copy
        known = self._model.named_parameters() if given else ()
        stand_ins = {id(p): given[name] for name, p in known if name in given}
        stand_ins |= {id(p): stand_in(p.detach()) for p in self._state.parameters if id(p) not in stand_ins}
        stand_ins |= {id(b): self._copy(self._in_place_of.get(id(b), b)) for b in self._state.buffers}
        try:
            with (
                _modes_kept(self._state.modules, leaves_in_eval=not self._training),
                _grads_aside(self._state.leaves),
                _hooks_kept(self._state.modules),
                preserved_rng(self._devices),
                _eager(),
                settings_for_passes(exact=self._exact),
            ):
                self._state.swap(stand_ins)
                return copy_context().run(function, self._model)
        finally:
            self._state.restore()


def widened_copy(t: Tensor) -> Tensor:
    """Return a copy of `t`, in float32 if it is in half precision."""
    return t.float() if t.dtype in HALF else t.clone()


def read_only(t: Tensor) -> Tensor:
    """Return the values of `t` in the same memory, where writing is an error; where torch cannot do this, a copy.

    Torch has a flag for memory that nobody may write to: operations in place, views, `.data`, numpy and extensions all
    fail before they write. The flag belongs to a storage, so `t` is given a second one on the same memory.
    """
    if _forbid_writing is None or t.numel() < MIN_SHARED_VALUES or t.device.type != "cpu" or type(t) is not Tensor:
        return t.clone()
    try:
        alias = torch.from_dlpack(t)  # type: ignore[attr-defined]
    except (RuntimeError, BufferError):  # a kind of number or of memory that cannot be shared
        return t.clone()
    if alias.untyped_storage()._cdata == t.untyped_storage()._cdata or alias.data_ptr() != t.data_ptr():
        return t.clone()
    _forbid_writing(alias)
    return alias


@contextmanager
def _modes_kept(modules: list[nn.Module], *, leaves_in_eval: bool) -> Iterator[None]:
    """Restore each module's mode afterwards; inside, modules without children are in eval mode if that is asked for.

    The others keep theirs: a detector returns a loss only in train mode. Attention has a child, but drops out itself;
    a BatchNorm may have been given children.
    """
    leaves = [m for m in modules if leaves_in_eval and (not m._modules or isinstance(m, _ACTS_BY_ITSELF))]
    modes = [(module, module.training) for module in modules]
    try:
        for module in leaves:
            _set_mode(module, False)
        yield
    finally:
        for module, training in modes:
            if module.training is not training:
                _set_mode(module, training)


def _set_mode(module: nn.Module, training: bool) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        module.training = training
    elif "training" in vars(module):  # it may be a property
        vars(module)["training"] = training  # what a module does with every attribute that is set takes its time


@contextmanager
def _grads_aside(leaves: list[Tensor]) -> Iterator[None]:
    """Take the gradients away inside, so that an optimizer has nothing to step with; put them back afterwards."""
    with no_overrides():
        grads = [(leaf, leaf.grad) for leaf in leaves]
    try:
        with no_overrides():
            for leaf, _ in grads:
                leaf.grad = None
        yield
    finally:
        with no_overrides():
            for leaf, grad in grads:
                leaf.grad = grad


@contextmanager
def _hooks_kept(modules: list[nn.Module]) -> Iterator[None]:
    """Undo what happens to hooks inside."""
    hooks = [of_kind for module in modules for of_kind in map(vars(module).get, _HOOKS) if of_kind is not None]
    before = [dict(of_kind) if of_kind else {} for of_kind in hooks]
    try:
        yield
    finally:
        for now, known in zip(hooks, before, strict=True):
            if (now or known) and now.keys() != known.keys():
                now.clear()
                now.update(known)


def _eager() -> AbstractContextManager[None]:
    """Run compiled modules eagerly."""
    if "torch._dynamo" not in sys.modules:  # it takes a second to load, and nothing is compiled
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes collective operations an error: the other processes would not answer, and all would hang."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let everything but collectives pass."""
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise TalksToOthers(
                f"the loss calls {func} in a pass that only one process runs, so the others would not answer. "
                "Write a method `normgrad_loss(self, batch)` that returns the loss without that call."
            )
        return func(*args, **(kwargs or {}))
