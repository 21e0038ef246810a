"""Lists of module names, short: ``model.layers.0-27.mlp.experts.0-127.up_proj`` for 3584 of them.

A word that would be read as ranges (a ModuleDict's key "1-2") is written with a backslash before it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable

_N = r"(?:0|[1-9]\d*)"
_NUMBER, _RANGES = re.compile(_N), re.compile(rf"{_N}(?:-{_N})?(?:,{_N}(?:-{_N})?)*")
_ESCAPED = re.compile(rf"\\+{_RANGES.pattern}")
_MOST = 10**7
"""Names in a list: no model has more, and a damaged file must not fill the memory."""


def shortened(names: Iterable[str]) -> tuple[str, ...]:
    """Names that differ in numbers alone as one, in the order in which they come.

    >>> shortened(["layers.0.q", "layers.1.q", "layers.3.q", "head"])
    ('layers.0-1,3.q', 'head')
    """
    alike: dict[tuple[str | None, ...], set[tuple[int, ...]]] = {}
    for name in names:
        parts = name.split(".")
        frame = tuple(None if _NUMBER.fullmatch(part) else _escaped(part) for part in parts)
        alike.setdefault(frame, set()).add(tuple(int(part) for part in parts if _NUMBER.fullmatch(part)))
    return tuple(
        ".".join(next(ranges) if part is None else part for part in frame)
        for frame, numbers in alike.items()
        for ranges in map(iter, _products(numbers))
    )


def _products(numbers: set[tuple[int, ...]]) -> tuple[tuple[str, ...], ...]:
    """Tuples of numbers, all of one length, as products of ranges."""
    if numbers == {()}:
        return ((),)
    rest: dict[int, set[tuple[int, ...]]] = {}
    for first, *others in numbers:
        rest.setdefault(first, set()).add(tuple(others))
    firsts: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for first in sorted(rest):
        firsts.setdefault(_products(rest[first]), []).append(first)
    return tuple((_ranges(of), *others) for products, of in firsts.items() for others in products)


def _ranges(numbers: list[int]) -> str:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        first = runs.pop()[0] if runs and runs[-1][1] == number - 1 else number
        runs.append((first, number))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def listed(short: tuple[str, ...]) -> str:
    """The first three of them, and how many more there are, for a message; "" if there are none."""
    return ", ".join(short[:3]) + (f" and {len(short) - 3} more" if len(short) > 3 else "")


def expanded(short: Collection[str]) -> list[str]:
    """Undo :func:`shortened`.

    Raises:
        ValueError: more names than any model has.

    >>> expanded(["layers.0-1,3.q", "head"])
    ['layers.0.q', 'layers.1.q', 'layers.3.q', 'head']
    """
    names = [[_runs(part) for part in name.split(".")] for name in short]
    sizes = (math.prod(sum(last - first + 1 for first, last in runs) for runs in parts if runs) for parts in names)
    if sum(sizes) > _MOST:
        raise ValueError(f"more than {_MOST:,} names")
    found = []
    for name, parts in zip(short, names, strict=True):
        choices = zip(name.split("."), parts, strict=True)
        words = ([_unescaped(part)] if not runs else _numbers(runs) for part, runs in choices)
        found += map(".".join, itertools.product(*words))
    return found


def pattern(short: str) -> str:
    """What ``convert`` takes (``include=``, ``exclude=``) for the names that one of a list stands for, and no others.

    >>> print(pattern("layers.0-1,3.q"))
    re:layers[.](?:0|1|3)[.]q$
    """
    parts = [(part, _numbers(_runs(part))) for part in short.split(".")]
    words = (f"(?:{'|'.join(numbers)})" if numbers else re.escape(_unescaped(part)) for part, numbers in parts)
    return f"re:{'[.]'.join(words)}$"


def _escaped(word: str) -> str:
    return f"\\{word}" if _RANGES.fullmatch(word) or _ESCAPED.fullmatch(word) else word


def _unescaped(word: str) -> str:
    return word[1:] if _ESCAPED.fullmatch(word) else word


def _runs(part: str) -> list[tuple[int, int]]:
    """(first, last) of each run of numbers; [] if the part is a word."""
    if not _RANGES.fullmatch(part):
        return []
    runs = (run.partition("-") for run in part.split(","))
    return [(int(first), int(last or first)) for first, _, last in runs]


def _numbers(runs: list[tuple[int, int]]) -> list[str]:
    return [str(number) for first, last in runs for number in range(first, last + 1)]
