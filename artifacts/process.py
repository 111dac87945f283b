"""Which process wrote something, precisely enough to see later that it is gone."""

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from artifacts.canonical import JSON
from artifacts.errors import Corrupt

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Process:
    """`boot` tells one start of the machine from the next, `started` one process from another with
    the same number."""

    pid: int
    host: str
    boot: str
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def may_be_alive(self) -> bool:
        """False if the process is certainly gone. One on another host may always be alive."""
        here = this_process()
        if self.host != here.host:
            return True
        return self.boot == here.boot and self.started == _started(self.pid)

    def to_json(self) -> JSON:
        return asdict(self)

    @staticmethod
    def from_json(value: JSON, what: str) -> "Process":
        """The inverse of `to_json`; Corrupt, naming `what`."""
        fields: Any = value
        if not isinstance(fields, dict) or set(fields) != {"boot", "host", "pid", "started"}:
            raise Corrupt(f"{what}: a process needs the fields boot, host, pid, started")
        texts = all(isinstance(fields[name], str) for name in ("boot", "host", "started"))
        if not texts or not isinstance(fields["pid"], int) or isinstance(fields["pid"], bool):
            raise Corrupt(f"{what}: a process has a field of the wrong kind")
        return Process(**fields)


def this_process() -> Process:
    """The calling process."""
    return Process(pid=os.getpid(), host=socket.gethostname(), boot=_boot(), started=_started(os.getpid()))


def _boot() -> str:
    if _BOOT_ID.exists():
        return _BOOT_ID.read_text(encoding="ascii").strip()
    return str(int(psutil.boot_time()))


def _started(pid: int) -> str:
    """When the process began, as the system counts it; empty if there is no such process."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        return f"{process.create_time():.2f}"
    except psutil.NoSuchProcess:
        return ""
