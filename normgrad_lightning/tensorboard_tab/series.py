"""Which curves belong to the page."""

import re

from normgrad_lightning.tensorboard_tab.stored import SUFFIX

_VALIDATION = re.compile(r"(^|[_/.-])(val|valid|validation)([_/.-]|$)", re.IGNORECASE)


def is_validation(tag: str) -> bool:
    """Whether a curve is a metric of validation."""
    return bool(_VALIDATION.search(tag))


def is_of_group(tag: str, blobs: str) -> bool:
    """Whether a curve comes from the callback that stored blobs under this tag."""
    group = blobs.removesuffix(SUFFIX)
    return tag.startswith((f"{group}/", f"{group}_layers/"))
