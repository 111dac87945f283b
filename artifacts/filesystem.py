"""Every call that this package makes to change or read the disk, and nothing else.

Other modules call these functions as `filesystem.name(...)`, so a test can replace each of them and
stop a save at any call.
"""

import ctypes
import fcntl
import os
import resource
import sys
from pathlib import Path

_SYNC_FILE_RANGE_WRITE = 2
# Linux only, and not in `os`.
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def open_new(path: Path, mode: int) -> int:
    """Descriptor of a file that this call creates; FileExistsError if it is there."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)


def open_file_limit() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize


def open_read(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def open_lock(path: Path) -> int:
    """Descriptor of a lock file, created empty where missing."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def write(descriptor: int, data: memoryview) -> int:
    """Writes some of `data` and says how many bytes."""
    return os.write(descriptor, data)


def read(descriptor: int, size: int) -> bytes:
    return os.read(descriptor, size)


def read_into(descriptor: int, target: memoryview) -> int:
    """Reads at most as many bytes as `target` has and says how many; 0 at the end."""
    return os.readv(descriptor, [target])


def start_writeback(descriptor: int) -> None:
    """Lets the medium begin with a file's bytes, where the system can be asked to. Nothing rests on it: `sync` puts
    there what is missing and tells of errors."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, 0, 0, _SYNC_FILE_RANGE_WRITE)


def sync(descriptor: int) -> None:
    """Puts a file's bytes on the medium."""
    # On macOS fsync only reaches the drive's cache.
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is None:
        os.fsync(descriptor)
    else:
        fcntl.fcntl(descriptor, full_sync)


def close(descriptor: int) -> None:
    os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Atomic; replaces `target`."""
    os.replace(source, target)


def unlink(path: Path) -> None:
    os.unlink(path)


def make_directory(path: Path) -> None:
    os.mkdir(path)


def remove_directory(path: Path) -> None:
    os.rmdir(path)


def sync_directory(path: Path) -> None:
    """Puts a folder's entries (creations, renames, removals) on the medium."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_directory(path: Path) -> list[str]:
    """Names in a folder, sorted; empty if there is no such folder."""
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []


def size_of(descriptor: int) -> int:
    return os.fstat(descriptor).st_size


def file_size(path: Path) -> int:
    return os.lstat(path).st_size


def exists(path: Path) -> bool:
    return os.path.lexists(path)


def is_directory(path: Path) -> bool:
    return os.path.isdir(path)


def free_space(path: Path) -> int:
    """Bytes that an unprivileged user may still write on the filesystem of `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def lock_shared(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def lock_exclusive(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_EX)
