"""Compiling kernels with NVRTC: no GPU is needed, and compiled code is kept by the content it was made from.

NVRTC's own compute cache can return code that was built with other flags, so it is switched off, and the program's name
carries the hash of everything that decides the code.
"""

import ctypes
import os
from functools import cache
from pathlib import Path

import platformdirs
from blake3 import blake3

from engine.backends.cuda.errors import DeviceUnavailable
from engine.backends.cuda.libraries import packaged_library
from engine.backends.cuda.sources import Unit, headers, source

# Every float operation is one IEEE-754 operation: nothing contracted, approximated or flushed to zero.
OPTIONS = ("--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false", "--std=c++17", "--no-cache")
# The tier prod promises no bits beyond one model of card: its kernels may contract and approximate.
MIXED_OPTIONS = ("--use_fast_math", "--std=c++17", "--no-cache")
COMPUTE_CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)  # those that every kernel is compiled for in the tests
HOPPER = 90
PACKAGE = "nvidia-cuda-nvrtc"
LIBRARY = "libnvrtc.so.13"


class CompileError(Exception):
    """NVRTC refused a kernel: a fault of this program, with the compiler's log."""


@cache
def _library() -> ctypes.CDLL:
    path = Path(packaged_library(PACKAGE, LIBRARY))
    try:
        # The compiler looks for its built-in declarations by bare name: what is loaded already is found.
        beside = path.parent.glob("libnvrtc-builtins.so.*") if path.is_absolute() else []
        for builtins in sorted(beside):
            ctypes.CDLL(str(builtins))
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise DeviceUnavailable(
            f"expected the CUDA run-time compiler {LIBRARY} (NVRTC), found none: {error}. "
            f"Install it with: pip install '{PACKAGE}>=13,<14'"
        ) from error
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def compiler_available() -> bool:
    try:
        _library()
    except DeviceUnavailable:
        return False
    return True


def _check(code: int, what: str) -> None:
    if code:
        raise CompileError(f"{what}: {_library().nvrtcGetErrorString(code).decode()}")


@cache
def compiler_version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return f"{major.value}.{minor.value}"


def _options(unit: Unit, capability: int) -> list[str]:
    macros = [f"-D{name}={value}" for name, value in sorted(unit.macros.items())]
    # The suffix allows Hopper's warpgroup instructions, which no other architecture has.
    suffix = "a" if capability == HOPPER else ""
    options = MIXED_OPTIONS if unit.name.endswith("_mixed") else OPTIONS
    return [f"--gpu-architecture=sm_{capability}{suffix}", *options, *macros]


def content_hash(unit: Unit, capability: int) -> str:
    """BLAKE3 (hex) of all that decides the compiled code: source, headers, options, architecture, compiler."""
    hasher = blake3()
    parts = [compiler_version(), unit.name, source(unit.name), *_options(unit, capability)]
    for name, text in sorted(headers().items()):
        parts += [name, text]
    for part in parts:
        encoded = part.encode()
        hasher.update(len(encoded).to_bytes(8, "little") + encoded)
    return hasher.hexdigest()


def compiled(unit: Unit, capability: int) -> bytes:
    """Machine code (a cubin) of a unit for a compute capability such as 90, from the cache or freshly compiled."""
    digest = content_hash(unit, capability)
    root = os.environ.get("SAMEBITS_CACHE") or platformdirs.user_cache_dir("samebits")
    path = Path(root) / "cuda" / f"{digest}.cubin"
    try:
        content = path.read_bytes()
    except OSError:
        content = b""
    # A file cut short by a crash must not be loaded: the last 32 bytes are the hash of what stands before.
    if len(content) > 32 and blake3(content[:-32]).digest() == content[-32:]:
        return content[:-32]
    cubin = compile_unit(unit, capability)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(cubin + blake3(cubin).digest())
        partial.replace(path)
    except OSError:
        pass  # a cache that cannot be written only costs time
    return cubin


def compile_unit(unit: Unit, capability: int) -> bytes:
    """Compile without looking at the cache. Raises CompileError with the compiler's log."""
    library = _library()
    texts = {name: text.encode() for name, text in headers().items()}
    name = f"{unit.name}-{content_hash(unit, capability)[:32]}.cu"
    program = ctypes.c_void_p()
    _check(
        library.nvrtcCreateProgram(
            ctypes.byref(program),
            source(unit.name).encode(),
            name.encode(),
            len(texts),
            (ctypes.c_char_p * len(texts))(*texts.values()),
            (ctypes.c_char_p * len(texts))(*(n.encode() for n in texts)),
        ),
        "nvrtcCreateProgram",
    )
    try:
        options = [o.encode() for o in _options(unit, capability)]
        code = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if code:
            size = ctypes.c_size_t()
            _check(library.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "nvrtcGetProgramLogSize")
            log = ctypes.create_string_buffer(size.value)
            _check(library.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
            raise CompileError(f"{unit.name} for sm_{capability}:\n{log.value.decode()}")
        size = ctypes.c_size_t()
        _check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        cubin = ctypes.create_string_buffer(size.value)
        _check(library.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return cubin.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
