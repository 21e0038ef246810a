"""Flat byte buckets: many small tensors as one message between processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from quads_qat.config import require_integer

Entry = tuple[str, torch.dtype, tuple[int, ...], int]
"""(name, dtype, shape, byte offset) of a tensor in a bucket."""

_ALIGNMENT = 16


def bucketed(
    stream: Iterable[tuple[str, Tensor]], bucket_bytes: int = 256 << 20
) -> Iterator[tuple[list[Entry], Tensor]]:
    """Pack a weight stream into flat uint8 buckets for one broadcast each; :func:`unbucketed` undoes it.

    Tensors are copied as they come, so no more than one bucket is in memory beside the stream's own; delete yours
    before asking for the next. The entries follow from names, dtypes and shapes alone: who has ``export_metadata`` gets
    them from ``bucketed(((n, torch.empty(s, dtype=d, device="meta")) for n, d, s in metadata), bucket_bytes)``.

    Args:
        stream: (name, tensor) pairs, all on one device.
        bucket_bytes: a bucket is yielded before it would exceed this; one larger tensor gets a bucket of its own.

    Yields:
        (entries, bucket): entries are (name, dtype, shape, byte offset), bucket is uint8 [bytes], fresh; offsets are
        multiples of 16.

    Raises:
        TypeError, ValueError: ``bucket_bytes`` is no integer >= 1.

    >>> [(entries, bucket)] = bucketed([("a", torch.ones(3)), ("b", torch.ones(2, 2))], 64)
    >>> entries[1], bucket.numel()
    (('b', torch.float32, (2, 2), 16), 32)
    """
    require_integer("bucketed", "bucket_bytes", bucket_bytes, 1)
    entries: list[Entry] = []
    bucket, size = torch.empty(0, dtype=torch.uint8, device="cpu"), 0
    for name, tensor in stream:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)  # a strided [N] cannot be viewed as bytes
        padded = flat.numel() + -flat.numel() % _ALIGNMENT
        if entries and size + padded > bucket.numel():
            yield entries, bucket[:size]
            entries, size = [], 0
        if not entries:
            del bucket
            bucket = torch.empty(max(bucket_bytes, padded), dtype=torch.uint8, device=flat.device)
        entries.append((name, tensor.dtype, tuple(tensor.shape), size))
        bucket[size : size + flat.numel()] = flat
        bucket[size + flat.numel() : size + padded] = 0
        size += padded
        del flat, tensor
    if entries:
        yield entries, bucket[:size]


def unbucketed(buckets: Iterable[tuple[Sequence[Entry], Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The (name, tensor) pairs of received buckets: views into them, so no copies.

    Args:
        buckets: (entries, bucket) as :func:`bucketed` yields them, on any device.

    Raises:
        ValueError: a bucket that is not flat bytes, or is too short for its entries.
    """
    for entries, bucket in buckets:
        if bucket.dtype != torch.uint8 or bucket.ndim != 1:
            raise ValueError(f"unbucketed: a bucket must be uint8 [bytes], got {bucket.dtype} {list(bucket.shape)}")
        for name, dtype, shape, offset in entries:
            part = bucket[offset : offset + torch.Size(shape).numel() * dtype.itemsize]
            if part.numel() != torch.Size(shape).numel() * dtype.itemsize:
                raise ValueError(
                    f"unbucketed: {name} needs bytes up to {offset + torch.Size(shape).numel() * dtype.itemsize}, the "
                    f"bucket has {bucket.numel()}; receive all of it"
                )
            aligned = part.storage_offset() % dtype.itemsize == 0
            yield name, (part if aligned else part.clone()).view(dtype).view(shape)
