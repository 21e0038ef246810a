"""One safetensors file: its header, tensors read one by one, and a file that is written piece by piece.

    8 bytes   length n of the header, little-endian
    n bytes   JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}, and "__metadata__"
    the rest  the tensors, without holes; offsets count from here

The package safetensors writes a file from tensors that are all in memory, and reads by mapping it: mapped pages count
as memory, and a file that is cut off meanwhile kills the process (SIGBUS). Here both take one tensor, or a part of one,
and a short file is an error. What is written is byte for byte what ``safetensors.torch.save_file`` writes.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Layout = tuple[torch.dtype, tuple[int, ...]]
"""What has to be known of a tensor before it is there."""

#: In the order of safetensors' enumeration, which is also that of the tensors in a file, from the end.
_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_NAME_OF = {dtype: name for name, dtype in _DTYPES.items()}
_RANK = {dtype: rank for rank, dtype in enumerate(_DTYPES.values())}
_HEADER_LIMIT = 100_000_000  # safetensors' own
_PIECE = 1 << 26


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor is in its file; ``begin`` counts from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        return nbytes(self.dtype, self.shape)


def nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Size of a tensor."""
    return dtype.itemsize * math.prod(shape)


# -------------------------------------------------------------------------------------------------------------- reading


def read_header(path: Path) -> dict[str, Entry]:
    """Name -> where it is, in the order of the header.

    Raises:
        ValueError: not a whole safetensors file: says what is wrong with it.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            if start == b"version ":
                raise _damaged(path, "a Git LFS pointer in place of the file", "run `git lfs pull`")
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(size - 8, _HEADER_LIMIT):
                raise _damaged(path, f"{size} bytes do not hold its header")
            text = file.read(length)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from error
    try:
        header = json.loads(text, object_pairs_hook=_without_duplicates)
        metadata = header.pop("__metadata__", None)
        del metadata
        entries = {name: _entry(name, value, 8 + length) for name, value in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"its header: {error}") from error
    at = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if entry.begin != at:
            raise _damaged(path, f"{name} begins at byte {entry.begin}, the tensor before it ends at {at}")
        at += entry.nbytes
    if at != size:
        raise _damaged(path, f"{size} bytes, its header announces {at}")
    return entries


def _damaged(path: Path, why: str, way_out: str = "download or export it again") -> ValueError:
    return ValueError(f"{path} is damaged ({why}); {way_out}")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)} is there twice")
    return found


def _entry(name: str, value: dict[str, Any], data: int) -> Entry:
    if not name or any(ord(c) < 32 for c in name):
        raise ValueError(f"{name!r} is no name of a tensor")
    dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in _DTYPES:
        raise ValueError(f"{name} has dtype {dtype!r}, which is not known here")
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, begin, end)):
        raise ValueError(f"{name} has shape {shape} and offsets {[begin, end]}")
    entry = Entry(_DTYPES[dtype], tuple(shape), data + begin)
    if end - begin != entry.nbytes:
        raise ValueError(f"{name} takes {entry.nbytes} bytes, its offsets are {[begin, end]}")
    return entry


def read(path: Path, entry: Entry, index: int | None = None) -> Tensor:
    """One tensor, or its ``[index]`` alone: fresh, on the CPU.

    Raises:
        ValueError: the file ends before the tensor does, or cannot be read.
        IndexError: there is no ``[index]``.
    """
    shape, begin = entry.shape, entry.begin
    if index is not None:
        if not shape or not 0 <= index < shape[0]:
            raise IndexError(f"{path}: a tensor of shape {list(shape)} has no [{index}]")
        shape = shape[1:]
        begin += index * nbytes(entry.dtype, shape)
    return _read_bytes(path, begin, nbytes(entry.dtype, shape)).view(entry.dtype).view(shape)


def read_pieces(path: Path, entry: Entry) -> Iterator[tuple[int, Tensor]]:
    """(byte offset, uint8 [n]) of a tensor, a little at a time."""
    for at in range(0, entry.nbytes, _PIECE):
        yield at, _read_bytes(path, entry.begin + at, min(_PIECE, entry.nbytes - at))


def _read_bytes(path: Path, begin: int, count: int) -> Tensor:
    data = torch.empty(count, dtype=torch.uint8, device="cpu")
    view = memoryview(data.numpy())  # pyright: ignore[reportArgumentType]  numpy's arrays are buffers
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(begin)
            while view:
                got = file.readinto(view)
                if not got:
                    raise _damaged(path, "it became shorter while it was read")
                view = view[got:]
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from error
    return data


# -------------------------------------------------------------------------------------------------------------- writing


class FileWriter:
    """A new safetensors file whose tensors come in any order, in pieces, and from several threads.

    Args:
        path: must not exist.
        layouts: every tensor that the file will hold.

    Raises:
        OSError: from the system.
    """

    def __init__(self, path: Path, layouts: Mapping[str, Layout]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._place: dict[str, tuple[int, int]] = {}  # name -> (offset, bytes)
        at = 0
        for name in sorted(layouts, key=lambda n: (-_RANK[layouts[n][0]], n)):  # widest dtype first: all are aligned
            dtype, shape = layouts[name]
            size = nbytes(dtype, shape)
            header[name] = {"dtype": _NAME_OF[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
            self._place[name] = at, size
            at += size
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._data, self._left, self._lock = 8 + len(text), at, threading.Lock()
        self._layouts = layouts
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        self._file = os.open(path, flags, 0o666)
        try:
            self._write(len(text).to_bytes(8, "little") + text, 0)
            os.ftruncate(self._file, self._data + at)  # a limit on the size of files shows here
        except BaseException:
            os.close(self._file)
            raise

    def write(self, name: str, tensor: Tensor, at: int = 0) -> None:
        """Write a tensor, or a part of it that begins ``at`` bytes after its start."""
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        place, size = self._place[name]
        assert at + data.numel() <= size, f"{name}: {data.numel()} bytes at {at} of {size}"
        assert tensor.dtype in (self._layouts[name][0], torch.uint8), f"{name} is {tensor.dtype}"
        self._write(memoryview(data.numpy()), self._data + place + at)  # pyright: ignore[reportArgumentType]
        with self._lock:
            self._left -= data.numel()

    def _write(self, data: bytes | memoryview, at: int) -> None:
        while data:
            written = os.pwrite(self._file, data, at)
            data, at = data[written:], at + written

    def finish(self) -> None:
        """Have the system put everything on the disk, and close the file."""
        assert self._left == 0, f"{self._left} bytes were not written, or some twice"
        try:
            os.fsync(self._file)
        finally:
            self.close()

    def close(self) -> None:
        """Close the file as it is."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
