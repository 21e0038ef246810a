"""Two times of a call on a CUDA GPU: as a node of a replayed graph (the device alone), and as called from Python."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

#: Inputs take turns over more bytes than any L2 cache holds, so that each call reads from memory.
ROTATED_BYTES = 160_000_000
MOST_COPIES = 64


@dataclass(frozen=True)
class Times:
    """Medians, in seconds a call.

    Attributes:
        device: of a replayed graph, gaps between its nodes included; None if no graph can hold the call, because it
            waits for the GPU or launches nothing.
        called: of a Python loop, between CUDA events: the device's time or the host's, whichever is longer.
    """

    device: float | None
    called: float


def copies_of(nbytes: int) -> int:
    """How many inputs of ``nbytes`` are to take turns."""
    return min(MOST_COPIES, max(1, -(-ROTATED_BYTES // max(1, nbytes))))


@torch.no_grad()
def in_turn(calls: Mapping[str, Sequence[Call]], rounds: int, *, graphs: bool = True) -> dict[str, Times]:
    """Time implementations against each other: one measurement of each a round, so that clocks meet all of them.

    Args:
        calls: name -> the same call on one input after the other.
        rounds: how many measurements the medians are of.
        graphs: False where the calls launch nothing.
    """
    prepared = {name: _Prepared(sequence, graphs) for name, sequence in calls.items()}
    device: dict[str, list[float]] = {name: [] for name in calls}
    called: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, one in prepared.items():
            called[name].append(one.called())
            if one.graph is not None:
                device[name].append(one.replayed())
    times = {n: Times(statistics.median(device[n]) if device[n] else None, statistics.median(called[n])) for n in calls}
    prepared.clear()
    torch.cuda.empty_cache()  # each graph has a memory pool of its own
    return times


class _Prepared:
    """One implementation, warm and captured."""

    REPLAYS = 5

    def __init__(self, sequence: Sequence[Call], graphs: bool) -> None:
        sequence[0]()  # compile
        once = _between_events(sequence[0])
        # about 5 ms a measurement, and all inputs at least once
        count = max(len(sequence), 3, min(64, int(5e-3 / once)))
        self.loop = [sequence[i % len(sequence)] for i in range(count)]
        self.graph = _captured(self.loop) if graphs and not waits_for_the_gpu(sequence[0]) else None

    def called(self) -> float:
        return _between_events(*self.loop) / len(self.loop)

    def replayed(self) -> float:
        assert self.graph is not None
        replay = self.graph.replay
        # behind a replay that is not timed, so that the first launch does not count
        return _between_events(*[replay] * self.REPLAYS, first=replay) / len(self.loop) / self.REPLAYS


def _between_events(*calls: Call, first: Call = lambda: None) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first()
    start.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def waits_for_the_gpu(call: Call) -> bool:
    """Whether ``call`` synchronizes host and device. To find out by a failed capture would break the allocator."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def _captured(loop: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """The calls of ``loop`` as one graph."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        loop[0]()  # what is made once for a stream is made now
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            results = [call() for call in loop]  # all alive, so that no two calls write to the same, cached memory
        finally:
            graph.capture_end()
    del results
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    return graph
