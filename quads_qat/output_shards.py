"""The shards of a checkpoint, laid out before they are made, and made by several workers.

A unit is what is read, made and written in one go. Its tensors' names, dtypes and shapes are known before, so every one
has its place in a file, and units can be made in any order and at once. In memory is one unit for each worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from quads_qat import checkpoint_io
from quads_qat.resume import Destination
from quads_qat.safetensors_file import FileWriter, Layout, nbytes


@dataclass(frozen=True, eq=False)
class Unit:
    """What is read, made and written in one go.

    Attributes:
        layouts: the tensors it makes.
        source_bytes: what it reads.
        make: yields (name, offset in bytes, that part of the tensor).
    """

    layouts: dict[str, Layout]
    source_bytes: int
    make: Callable[[], Iterator[tuple[str, int, Tensor]]]

    @property
    def nbytes(self) -> int:
        """What it writes."""
        return sum(nbytes(*layout) for layout in self.layouts.values())


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
        ValueError: two units make a tensor of the same name.
    """
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
    if len(filled) == 1:
        return [Shard(checkpoint_io.SINGLE, filled[0])]
    return [Shard(f"model-{i + 1:05d}-of-{len(filled):05d}.safetensors", units) for i, units in enumerate(filled)]


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
        weight_map = {name: shard.file for shard in shards for name in shard.layouts}
        index = {"metadata": {"total_size": sum(shard.nbytes for shard in shards)}, "weight_map": weight_map}
        destination.write_text(checkpoint_io.INDEX, checkpoint_io.json_text(index))


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
    destination.finish_shard(shard.file)
