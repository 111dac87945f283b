"""CUDA graphs on PyCUDA's streams, through the driver's own functions: a step is recorded once and replayed."""

import ctypes
from collections.abc import Callable
from typing import Any

from engine.backends.cuda.errors import DeviceLost

RELAXED = 2  # capture mode: other calls of the process may allocate meanwhile


class Graph:
    """What `record` queues on `stream`, as one launch. Everything it uses must outlive the graph."""

    def __init__(self, stream: Any, record: Callable[[], None]) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._stream = ctypes.c_void_p(stream.handle)
        self._check(self._driver.cuStreamBeginCapture_v2(self._stream, RELAXED), "beginning a capture")
        graph = ctypes.c_void_p()
        try:
            record()
        finally:
            code = self._driver.cuStreamEndCapture(self._stream, ctypes.byref(graph))
        self._check(code, "ending a capture")
        self._graph = graph
        self._executable = ctypes.c_void_p()
        code = self._driver.cuGraphInstantiateWithFlags(
            ctypes.byref(self._executable), self._graph, ctypes.c_ulonglong(0)
        )
        self._check(code, "instantiating a graph")

    def launch(self) -> None:
        self._check(self._driver.cuGraphLaunch(self._executable, self._stream), "launching a graph")

    def close(self) -> None:
        self._driver.cuGraphExecDestroy(self._executable)
        self._driver.cuGraphDestroy(self._graph)

    def _check(self, code: int, what: str) -> None:
        if code:
            raise DeviceLost(f"the CUDA driver failed with error {code} while {what}. What was saved before is whole")
