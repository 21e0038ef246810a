"""The shards of a checkpoint, laid out before they are made, and made by several workers.

A unit is what is read, made and written in one go. Its tensors' names, dtypes and shapes are known before, so every one
has its place in a file, and units can be made in any order and at once. In memory is one unit for each worker.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quads_qat import checkpoint_io
from quads_qat.checkpoint_io import Reader
from quads_qat.config import require_integer
from quads_qat.record import FileRecord, file_record, is_complete
from quads_qat.resume import JOURNAL, Destination, open_destination
from quads_qat.safetensors_file import FileWriter, Layout, nbytes

Piece = tuple[str, int, Tensor]
"""Name of a tensor, offset in bytes, that part of it."""


@dataclass(frozen=True, eq=False)
class Unit:
    """What is read, made and written in one go.

    Attributes:
        layouts: the tensors it makes.
        source_bytes: what it reads.
        make: yields (name, offset in bytes, that part of the tensor).
        not_finite: names of tensors of the source that were found to hold NaN or inf; fills up while it is made.
    """

    layouts: dict[str, Layout]
    source_bytes: int
    make: Callable[[], Iterator[Piece]]
    not_finite: set[str] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        """What it writes."""
        return sum(nbytes(*layout) for layout in self.layouts.values())


_LOOKED_AT = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def is_finite(tensor: Tensor) -> bool:
    """Whether it holds neither NaN nor inf; not looked for in floats of 8 bits and less."""
    if tensor.dtype not in _LOOKED_AT or tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)  # one pass; both are NaN if there is one
    return bool(torch.isfinite(low) & torch.isfinite(high))


def copied(reader: Reader, name: str, *, look: bool = False, cast: torch.dtype | None = None) -> Unit:
    """A tensor as it is in the source, or ``cast``. ``look``: whether it holds NaN or inf."""
    entry, not_finite = reader.entry(name), set[str]()
    dtype = cast or entry.dtype

    def make() -> Iterator[Piece]:
        for at, piece in reader.pieces(name):
            part = piece.view(entry.dtype).to(dtype)
            if look and not is_finite(part):
                not_finite.add(name)
            yield name, at // entry.dtype.itemsize * dtype.itemsize, part.view(torch.uint8)

    return Unit({name: (dtype, entry.shape)}, entry.nbytes, make, not_finite)


@dataclass(frozen=True, eq=False)
class Shard:
    """One file of the result."""

    file: str
    units: list[Unit]

    @property
    def layouts(self) -> dict[str, Layout]:
        """Every tensor in it."""
        return {name: layout for unit in self.units for name, layout in unit.layouts.items()}

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return sum(unit.nbytes for unit in self.units)


def pack(units: Iterable[Unit], shard_bytes: int) -> list[Shard]:
    """Fill shards in order; a unit is never divided, so a scale group is in one file.

    Raises:
        TypeError, ValueError: ``shard_bytes`` is no integer >= 1; two units make a tensor of the same name.
    """
    require_integer("a checkpoint", "shard_bytes", shard_bytes, 1)
    filled: list[list[Unit]] = [[]]
    size, seen = 0, set()
    for unit in units:
        if filled[-1] and size + unit.nbytes > shard_bytes:
            filled.append([])
            size = 0
        filled[-1].append(unit)
        size += unit.nbytes
        if twice := seen.intersection(unit.layouts):
            raise ValueError(f"{twice.pop()} would be written twice")
        seen.update(unit.layouts)
    return [Shard(file, units) for file, units in zip(_files(len(filled)), filled, strict=True)]


def _files(count: int) -> list[str]:
    if count == 1:
        return [checkpoint_io.SINGLE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _index(shards: Mapping[str, Mapping[str, Layout]]) -> str:
    weight_map = {name: file for file, layouts in shards.items() for name in layouts}
    total = sum(nbytes(*layout) for layouts in shards.values() for layout in layouts.values())
    return checkpoint_io.json_text({"metadata": {"total_size": total}, "weight_map": weight_map})


class Progress:
    """Counts bytes of the source."""

    def __init__(self, report: Callable[[int, int], None] | None, total: int) -> None:
        self._report, self._total, self._done = report, total, 0

    def add(self, count: int) -> None:
        """``count`` more bytes were handled."""
        self._done += count
        if self._report is not None:
            self._report(min(self._done, self._total), self._total)

    def end(self) -> None:
        """Everything was, file headers included."""
        self.add(self._total - self._done)


def write_checkpoint(
    path: str | Path,
    job: dict[str, Any],
    shards: list[Shard],
    reader: Reader,
    files: Mapping[str, dict[str, Any]],
    *,
    workers: int | None,
    progress: Callable[[int, int], None] | None,
    prepare: Callable[[Destination], None] | None = None,
    left_behind: Iterable[str] = (),
) -> bool:
    """Make a checkpoint directory from another one, or continue to, or see that it is there.

    Args:
        path: a directory that is not there, is empty, or holds the same job, finished or not.
        job: what is made, as JSON: all that the bytes depend on, besides the source and the layout of the shards.
        shards: what is written.
        reader: the source; what belongs to it besides weights and config.json is copied.
        files: name -> JSON; config.json last.
        workers: threads; None: one for each CPU core, at most 8.
        progress: called with (done, total) bytes of the source.
        prepare: called before the first unit is made.
        left_behind: files of the source that are not copied.

    Returns:
        Whether anything was written; False where the checkpoint was there, whole.

    Raises:
        ValueError: ``path`` is the source, holds something else, is being written by another process, has too little
            space, or cannot be written.
    """
    path, companions = Path(path), checkpoint_io.companions(reader.path)
    checkpoint_io.require_apart(reader.path, path)
    for file in left_behind:
        companions.pop(file, None)
    job = job | {"source": _source(reader), "shards": digest([[shard.file, sorted(shard.layouts)] for shard in shards])}
    if not os.path.lexists(path / JOURNAL) and is_complete(path, job):
        return False

    def check_space(finished: Mapping[str, FileRecord]) -> None:
        needed = sum(shard.nbytes for shard in shards if shard.file not in finished)
        require_space(path, needed + sum(companions.values()))

    with open_destination(path, job, check_space) as directory:
        if prepare is not None:
            prepare(directory)
        write_shards(directory, shards, workers or _cores(), Progress(progress, reader.nbytes()))
        for file in companions:
            directory.copy(reader.path / file, file)
        directory.write_record()
        for file, content in files.items():
            directory.write_text(file, checkpoint_io.json_text(content))
    return True


def _source(reader: Reader) -> str:
    """Changes with every file that the result is made from."""
    files = [(reader.path / name).stat() for name in ("config.json", *reader.files)]
    return digest([*reader.files, *([file.st_size, file.st_mtime_ns] for file in files)])


def digest(value: Any) -> str:
    """A short one of JSON and tensors, to tell jobs apart."""
    return hashlib.sha256(json.dumps(value, default=Tensor.tolist).encode()).hexdigest()[:16]


def _cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 8)


def require_space(destination: Path, needed: int) -> None:
    """Raise ValueError if the disk of ``destination`` has fewer free bytes than ``needed``."""
    folder = destination.absolute()
    while not folder.is_dir():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(f"{destination}: needs about {_size(needed)}, {_size(free)} are free there; make room")


def _size(count: int) -> str:
    """Bytes in the largest unit that leaves a digit before the point.

    >>> _size(512), _size(131_072), _size(59_850_000_000)
    ('512 bytes', '131.1 kB', '59.9 GB')
    """
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 1000)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def write_shards(destination: Destination, shards: list[Shard], workers: int, progress: Progress) -> None:
    """Make the shards that are not finished yet, and the index where there are several.

    Raises:
        OSError: from the system; finished shards are in the journal.
    """
    todo = [shard for shard in shards if shard.file not in destination.finished]
    progress.add(sum(unit.source_bytes for shard in shards if shard not in todo for unit in shard.units))
    threads = torch.get_num_threads()
    each = max(1, threads // workers)  # several units at once use the cores better than several threads in one
    pool = ThreadPoolExecutor(workers, "quads_qat", initializer=torch.set_num_threads, initargs=(each,))
    try:
        _run(pool, destination, todo, 2 * workers, progress)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
    progress.end()
    if len(shards) > 1:
        destination.write_text(checkpoint_io.INDEX, _index({shard.file: shard.layouts for shard in shards}))


def _run(pool: ThreadPoolExecutor, destination: Destination, todo: list[Shard], ahead: int, progress: Progress) -> None:
    """Units in order, as many at once as there are workers; a shard is finished when its last unit is."""
    pending: dict[Future[None], tuple[Shard, Unit | None]] = {}
    left = {shard.file: len(shard.units) for shard in todo}
    writers: dict[str, FileWriter] = {}

    def settle(limit: int) -> None:
        while len(pending) > limit:
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                shard, unit = pending.pop(future)
                future.result()
                if unit is None:
                    continue
                progress.add(unit.source_bytes)
                left[shard.file] -= 1
                if left[shard.file] == 0:
                    finishing = pool.submit(_finish, destination, writers.pop(shard.file), shard)
                    pending[finishing] = shard, None

    try:
        for shard in todo:
            writers[shard.file] = FileWriter(destination.temporary(shard.file), shard.layouts)
            for unit in shard.units:
                pending[pool.submit(_make, unit, writers[shard.file])] = shard, unit
                settle(ahead)
        settle(0)
    finally:
        for future, (_, unit) in pending.items():
            if unit is not None:  # a shard that has all its units is finished even now
                future.cancel()
        wait(pending)
        for writer in writers.values():
            writer.close()


@torch.no_grad()
def _make(unit: Unit, writer: FileWriter) -> None:
    for name, at, tensor in unit.make():
        writer.write(name, tensor, at)


def _finish(destination: Destination, writer: FileWriter, shard: Shard) -> None:
    writer.finish()
    destination.finish_shard(shard.file, {name for unit in shard.units for name in unit.not_finite})


# -------------------------------------------------------------------------------------------------- tensors that come


def write_stream(
    directory: Path, layouts: Mapping[str, Layout], tensors: Iterable[tuple[str, Tensor]], shard_bytes: int
) -> dict[str, FileRecord]:
    """Write tensors as they come, in the order of ``layouts``, into shards with an index; none is held.

    Returns:
        File -> size and SHA-256 of every shard.
    """
    shards: list[dict[str, Layout]] = [{}]
    size = 0
    for name, layout in layouts.items():
        if shards[-1] and size + nbytes(*layout) > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = layout
        size += nbytes(*layout)
    named = dict(zip(_files(len(shards)), shards, strict=True))
    records, stream = {}, iter(tensors)
    for file, inside in named.items():
        writer = FileWriter(directory / file, inside)
        try:
            for expected in inside:
                name, tensor = next(stream)
                if name != expected:
                    raise ValueError(
                        f"{name} came in the place of {expected}; its model was changed while it was written"
                    )
                writer.write(name, tensor)
            writer.finish()
        finally:
            writer.close()
        records[file] = file_record(directory / file)
    if (left := next(stream, None)) is not None:
        raise ValueError(f"{left[0]} was not announced; its model was changed while it was written")
    if len(named) > 1:
        (directory / checkpoint_io.INDEX).write_text(_index(named), "utf-8")
    return records
