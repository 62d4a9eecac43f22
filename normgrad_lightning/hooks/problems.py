"""Why layers cannot be read, as sentences.

Exceptions are not kept: a traceback would keep the tensors of its step alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Problems:
    """What went wrong in hooks, the first problem of each layer."""

    def __init__(self) -> None:
        self._watching: dict[str, str] = {}
        self._refusals: dict[str, str] = {}
        self._errors: dict[str, str] = {}
        self._left_out: dict[str, list[str]] = {}
        self._overwritten: dict[str, str] = {}

    def watching_failed(self, name: str, error: Exception) -> None:
        """Note that a hook that only watches the layer has raised."""
        self._watching.setdefault(name, _described(error))

    def reading_failed(self, name: str, error: Exception) -> None:
        """Note that a hook that reads the layer has raised: a `ValueError` says why the layer cannot be read."""
        if isinstance(error, ValueError):
            self.refuse(name, str(error))
        else:
            self._errors.setdefault(name, _described(error))

    def refuse(self, name: str, why: str) -> None:
        """Note that the layer cannot be read; later calls of it may be."""
        self._refusals.setdefault(name, why)

    def leave_out(self, names: Sequence[str], why: str) -> None:
        """Note that the tokens of these layers are on no grid, so `"auto"` does not take them."""
        if names:
            self._left_out[why] = list(names)

    def overwritten(self, name: str, kind: str) -> None:
        """Note that the layer has no map of this kind: its activation was changed before the gradient came."""
        self._overwritten.setdefault(name, kind)

    def of_overwriting(self, name: str) -> str | None:
        """Return why the layer has no map of one kind; None if its activation was not overwritten."""
        if name not in self._overwritten:
            return None
        return (
            f"NormGrad has no {self._overwritten[name]} map of the layer {name!r}: an operation in place, such as "
            "`ReLU(inplace=True)`, overwrites what the layer gives. Name the layer that does so instead, or set "
            "`inplace=False`."
        )

    def of_order(self) -> Iterator[str]:
        """Yield a sentence about the layers that `"auto"` has left out, for each reason."""
        for why, (first, *others) in self._left_out.items():
            and_others = f" and {len(others)} more layer{'s' * (len(others) > 1)}" if others else ""
            yield f'NormGrad leaves {first!r}{and_others} out of `layers="auto"`: {why}.'

    def of_watching(self) -> Iterator[str]:
        """Yield a sentence for each layer at which watching failed."""
        for name, why in self._watching.items():
            what = f"the layer {name!r}" if name else "the model"
            yield f"NormGrad failed at watching {what}: {why}."

    def of_layer(self, name: str, *, called: bool, reached: bool, after_backward: bool) -> str | None:
        """Return why the layer has no map; None if it has one, or if it is too early to say.

        Args:
            name: the layer's.
            called: whether the forward pass has called it.
            reached: whether a gradient has come.
            after_backward: whether there has been a backward pass.
        """
        if name in self._errors:
            why = self._errors[name]
        elif reached:
            return None
        elif name in self._refusals:
            why = self._refusals[name]
        elif after_backward:
            why = "the loss does not depend on it" if called else "the forward pass does not call it"
        else:
            return None
        return f"NormGrad cannot read the layer {name!r}: {why}."

    def of_auto(
        self,
        *,
        has_seen_image: bool,
        has_seen_grid: bool,
        has_seen_complex: bool,
        reached: bool,
        has_compiled_parts: bool,
    ) -> str:
        """Return why `"auto"` found no layer.

        Args:
            has_seen_image: whether a module was given an image.
            has_seen_grid: whether a layer with weights, or after one, gave features on a grid.
            has_seen_complex: whether a layer gave complex numbers.
            reached: whether a gradient has come to any such layer.
            has_compiled_parts: whether there are layers that hooks do not see.
        """
        if IN_FUNC in self._refusals.values():
            why = f"the network is called so that {IN_FUNC}"
        elif not has_seen_image:
            why = (
                "no module was given an image of more than one pixel, a floating-point tensor (N, C, H, W). "
                "It needs a model that is trained on images, signals or volumes"
            )
        elif self._errors:
            why = next(iter(self._errors.values()))
        elif has_seen_complex:
            why = (
                "layers give complex numbers, which have no maps. If one gives their real part or magnitude, name it "
                "in `layers`"
            )
        elif reached:
            why = (
                'no layer that gets a gradient gives what "auto" takes: features on a grid of several cells that fits '
                "the image. If you know a layer that does, name it in `layers`"
            )
        else:
            why, remedy = _NO_GRADIENT if has_seen_grid or has_compiled_parts else _NO_GRID
            why += f". {_COMPILED if has_compiled_parts else remedy}"
        return f"NormGrad found no layer to read: {why}."


IN_FUNC = "it runs inside of `torch.func`, as `vmap`, `grad` or `jvp`, where hooks get no gradients"
OUT_OF_ORDER = (
    "the tokens are not in the order of the image's rows, but picked by an index, sorted into blocks, followed by "
    "other tokens, or not made of patches at all. If you know where the patches are, name the layer and set "
    "`token_grid=(rows, columns, tokens before them)`"
)
_NO_GRADIENT = (
    "no layer that gives features on a grid gets a gradient",
    "Check that `backward()` has run, that the model is not frozen and that the loss depends on it",
)
_NO_GRID = (
    "no layer gives features on a grid over the image",
    "It needs a model that keeps rows and columns, as convolutions do and linear layers on flattened images do not",
)
_COMPILED = "Parts of the model are compiled, and hooks see only what goes in and out of these"


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")
