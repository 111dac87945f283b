"""A stage must not outlive the DVC that started it: a second run would find it still writing."""

import os
import signal
import threading
import time

import psutil

from reproduce.signals import stopping

STAGE_COMMAND = "tools/stage.sh"
"""What the command line of the shells between DVC and a stage has in it (dvc.yaml)."""

_POLL_SECONDS = 0.25


def watch_starter() -> None:
    """If DVC started this process: send it SIGTERM as soon as DVC is gone, however DVC ended."""
    if "DVC_STAGE" not in os.environ:
        return
    starter = _starter()
    threading.Thread(target=_watch, args=(starter,), name="starter", daemon=True).start()


def _starter() -> psutil.Process | None:
    """The process that runs DVC: the first ancestor that is not a shell of ours; None if it is gone already."""
    try:
        process = psutil.Process().parent()
        while process is not None and any(STAGE_COMMAND in part for part in process.cmdline()):
            process = process.parent()
        # DVC is a Python program or a binary of that name; anything else has adopted an orphan.
        if process is None or not _may_be_dvc(process):
            return None
        return process
    except psutil.NoSuchProcess:
        return None


def _may_be_dvc(process: psutil.Process) -> bool:
    try:
        words = (process.name(), *process.cmdline())
    except psutil.AccessDenied:
        return True
    return any("dvc" in word or "python" in word for word in words)


def _watch(starter: psutil.Process | None) -> None:
    while starter is not None and _alive(starter):
        time.sleep(_POLL_SECONDS)
    # A signal to the whole group has reached this process too; a second one would end it without saving.
    if not stopping.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def _alive(process: psutil.Process) -> bool:
    try:
        # is_running compares the time of creation, so a new process with an old number does not count.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
