"""Room on the disk: checked before a page is written, so that it is written whole or not at all.

A full disk breaks a logger for good, and with it the training that logs its losses there. So a part of the disk, and of
a limit on the size of files, is left to the run's own files.
"""

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

RESERVE = 64 * 2**20
"""Bytes left to the run's own files; on a small disk, a tenth of it."""


def check_room(folder: str | os.PathLike[str], size: int) -> None:
    """Raise an OSError if `size` more bytes in `folder` would leave too little to the run's own files."""
    if not _is_local(folder):
        return
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    disk = shutil.disk_usage(existing)
    reserve = _reserve(disk.total)
    if disk.free - size < reserve:
        left = f"{disk.free / 2**20:.1f} MB are left on the disk, and NormGrad keeps {reserve / 2**20:.1f} MB free"
        raise OSError(errno.ENOSPC, f"{left} for the run's own files. Free some space", str(folder))


def check_room_of_logger(logger: Any, size: int) -> None:
    """Raise an OSError if `size` more bytes would leave too little in the logger's folder, if it has a local one."""
    folder = local_dir(logger)
    if folder is not None:
        check_room(folder, size)


def check_file(path: str | os.PathLike[str], size: int) -> None:
    """Raise an OSError if `size` more bytes cannot be added to this file, or would leave too little of its limit.

    TensorBoard's writer must not find this out: after one failure it fails for good.
    """
    if not _is_local(path):
        return
    with open(path, "ab") as file:
        end = file.tell() + size
    limit = _largest_file()
    if limit is None:
        return
    reserve = _reserve(limit)
    if end > limit - reserve:
        largest = f"a file may have {limit / 2**20:.1f} MB (ulimit -f), and NormGrad keeps {reserve / 2**20:.1f} MB"
        raise OSError(errno.EFBIG, f"{largest} of it free for the run's own values. Raise the limit", str(path))


def _reserve(total: int) -> int:
    return min(RESERVE, total // 10)


def _largest_file() -> int | None:
    """Return the largest size of a file that this process may write; None if there is no limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def is_remote(path: object) -> bool:
    """Return whether this is the address of a remote store."""
    return "://" in str(path)


def local_dir(logger: Any) -> str | None:
    """Return the first folder that the logger names and that is not the address of a remote store."""
    for name in ("log_dir", "save_dir"):
        folder = None
        with suppress(Exception):  # a logger of the user's own may not know it before its run begins
            folder = getattr(logger, name, None)
        if folder and _is_local(folder):
            return os.fsdecode(folder)
    return None


def _is_local(path: object) -> TypeGuard[str | os.PathLike[str]]:
    """Return whether this is a path on a disk; a mock is not, though a `MagicMock` has the methods of one."""
    if not isinstance(path, str | os.PathLike) or type(path).__module__.startswith("unittest."):
        return False
    return not is_remote(path)


def next_log_dir(root: str | os.PathLike[str]) -> str:
    """Return the folder where the next run of Lightning's own loggers would go: `root/lightning_logs/version_3`."""
    logs = Path(os.curdir if is_remote(root) else root, "lightning_logs")
    versions = [path.name.removeprefix("version_") for path in logs.glob("version_*")]
    return str(logs / f"version_{max((int(number) + 1 for number in versions if number.isdigit()), default=0)}")


def film_path(folder: str | os.PathLike[str], tag: str) -> Path:
    """Return where a film is found in our folder: `normgrad/film` is `<folder>/film.webp`."""
    return Path(folder, f"{tag.removeprefix('normgrad/')}.webp")


def files_dir(logger: Any, fallback_dir: str | os.PathLike[str]) -> str:
    """Return the folder `normgrad/` beside the logger's own files; in `fallback_dir` if it has no local folder."""
    return os.path.join(local_dir(logger) or fallback_dir, "normgrad")
