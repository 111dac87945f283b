"""Token shards: written in order, read as one sequence."""

from collections.abc import Sequence as Listed
from pathlib import Path
from typing import Any, BinaryIO, Protocol, overload

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from data_pipeline.errors import CorruptDataError
from data_pipeline.manifest import Shard, TokenType

TOKENS_PER_SHARD = 1 << 26


def token_type(vocabulary: int) -> TokenType:
    """The narrowest type that holds the ids 0 to `vocabulary - 1`."""
    if vocabulary <= 1 << 8:
        return "uint8"
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def stored_type(name: TokenType) -> np.dtype[Any]:
    """The NumPy type of a stored token: little-endian on every machine."""
    return np.dtype(name).newbyteorder("<")


class ShardWriter:
    """Writes tokens to `<split>-00000.bin` and so on in `directory`, at most TOKENS_PER_SHARD in
    each."""

    def __init__(self, directory: Path, split: str, dtype: TokenType) -> None:
        self._directory = directory
        self._split = split
        self._dtype = stored_type(dtype)
        self._shards: list[Shard] = []
        self._file: BinaryIO | None = None
        self._digest = blake3()
        self._tokens = 0

    def write(self, ids: NDArray[np.uint32]) -> None:
        """Append token ids (1-D), which must fit the type."""
        while len(ids):
            if self._file is None:
                self._file = (self._directory / self._name).open("xb")
            part = ids[: TOKENS_PER_SHARD - self._tokens]
            data = part.astype(self._dtype).tobytes()
            self._file.write(data)
            self._digest.update(data)
            self._tokens += len(part)
            ids = ids[len(part) :]
            if self._tokens == TOKENS_PER_SHARD:
                self._end_shard()

    def close(self) -> tuple[Shard, ...]:
        """End the last shard; return all of them."""
        if self._file is not None:
            self._end_shard()
        return tuple(self._shards)

    @property
    def _name(self) -> str:
        return f"{self._split}-{len(self._shards):05d}.bin"

    def _end_shard(self) -> None:
        assert self._file is not None
        self._file.close()
        self._shards.append(Shard(file=self._name, tokens=self._tokens, blake3=self._digest.hexdigest()))
        self._file, self._digest, self._tokens = None, blake3(), 0


class TokenSequence(Protocol):
    """What the sampling order needs of tokens."""

    def __len__(self) -> int: ...

    def read(self, start: int, out: NDArray[Any]) -> None: ...


class Tokens:
    """Several 1-D integer arrays (memory-mapped shards) as one read-only sequence of token ids."""

    def __init__(self, parts: Listed[NDArray[Any]]) -> None:
        self._parts = tuple(parts)
        self._ends = tuple(np.cumsum([len(part) for part in self._parts], dtype=np.int64).tolist())

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, out: NDArray[Any]) -> None:
        """Copy the tokens from `start` on into `out` (1-D, any integer type that holds every id),
        filling it.

        Raises IndexError where the sequence ends before `out` is full.
        """
        stop = start + len(out)
        if start < 0 or stop > len(self):
            raise IndexError(f"expected tokens within 0 to {len(self)}, asked for {start} to {stop}")
        begin = 0
        for part, end in zip(self._parts, self._ends, strict=True):
            low, high = max(start, begin), min(stop, end)
            if low < high:
                np.copyto(
                    out[low - start : high - start],
                    part[low - begin : high - begin],
                    casting="unsafe",
                )
            begin = end

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> NDArray[np.uint32]: ...

    def __getitem__(self, index: int | slice) -> int | NDArray[np.uint32]:
        """One id, or a fresh uint32 array of a slice with step 1."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise IndexError(f"expected a slice with step 1, found step {step}")
            out = np.empty(max(0, stop - start), np.uint32)
            self.read(start, out)
            return out
        position = range(len(self))[index]
        return int(self[position : position + 1][0])


def open_shard(directory: Path, shard: Shard, dtype: TokenType, vocabulary: int) -> NDArray[Any]:
    """Memory-map a shard read-only, once its size, its hash and the range of its ids are verified.

    Raises CorruptDataError, naming the file.
    """
    path = directory / shard.file
    expected, found = shard.tokens * stored_type(dtype).itemsize, path.stat().st_size
    if found != expected:
        raise CorruptDataError(f"{path}: expected {expected} bytes, found {found}: prepare the dataset again")
    # A plain view of the mapping: slices of np.memmap cost more.
    tokens: NDArray[Any] = np.memmap(path, dtype=stored_type(dtype), mode="r").view(np.ndarray)
    digest = blake3(tokens.view(np.uint8).data, max_threads=blake3.AUTO).hexdigest()
    if digest != shard.blake3:
        raise CorruptDataError(f"{path}: expected BLAKE3 {shard.blake3}, found {digest}: prepare the dataset again")
    if (largest := int(tokens.max())) >= vocabulary:
        raise CorruptDataError(f"{path}: expected ids below {vocabulary}, found {largest}: prepare the dataset again")
    return tokens
