"""Machine code of compiled kernels: which registers a ``wgmma`` in flight reads, and who writes them too early."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"


def instructions(cubin: bytes) -> list[tuple[str, str]]:
    """(opcode, operands) of each instruction; labels as ("label", name)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([DISASSEMBLER, "-c", file.name], capture_output=True, text=True, check=True).stdout
    found = []
    for line in re.sub(r"/\*[0-9a-f]+\*/", "", text).splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            found.append(("label", label.group(1)))
        elif code := re.match(r"\s*(?:@!?U?P\w+ )?([A-Z][\w.]+)\s*(.*?);", line):
            found.append((code.group(1), code.group(2)))
    return found


def loops(code: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Bodies of the innermost loops with a ``wgmma``."""
    places = {operands: i for i, (opcode, operands) in enumerate(code) if opcode == "label"}
    bodies = []
    for i, (opcode, operands) in enumerate(code):
        target = re.search(r"\.L_x_\d+", operands) if opcode.startswith("BRA") else None
        if target and places.get(target.group(), i) < i:
            body = code[places[target.group()] : i]
            if any(op.startswith("HGMMA") for op, _ in body) and not any(op.startswith("BRA") for op, _ in body):
                bodies.append(body)
    return bodies


def overwritten(body: list[tuple[str, str]]) -> list[str]:
    """Instructions of a loop that write a register of a ``wgmma`` that may not be over, in rounds after each other.

    Groups end in order, and ``WARPGROUP.DEPBAR.LE gsb0, n`` leaves n of them in flight.
    """
    flying: list[set[int]] = []
    open_group: set[int] = set()
    wrong = []
    for opcode, operands in body * 3:
        if opcode.startswith("HGMMA"):
            columns = int(re.search(r"x(\d+)x", opcode + operands).group(1))  # pyright: ignore[reportOptionalMemberAccess]
            result, *weights = (int(r) for r in re.findall(r"\bR(\d+)", operands.split("gdesc")[0]))
            open_group |= set(range(result, result + columns // 2))
            open_group |= {r + i for r in weights for i in range(4)}
            if "gsb0" in operands:
                flying, open_group = [*flying, open_group], set()
        elif opcode.startswith("WARPGROUP.DEPBAR"):
            left = int(operands.split(",")[1], 16)
            flying = flying[-left:] if left else []
        elif written(opcode, operands) & set().union(*flying, open_group):
            wrong.append(f"{opcode} {operands}")
    return wrong


def written(opcode: str, operands: str) -> set[int]:
    """General registers that an instruction writes."""
    without = ("ST", "RED", "LDGSTS", "BAR", "WARP", "ISETP", "FSETP", "PLOP3", "LDGDEPBAR", "DEPBAR", "label")
    target = re.match(r"(?:P\w+, )?R(\d+)\b", operands)
    if target is None or opcode.startswith(without):
        return set()
    width = 4 if ".128" in opcode else 2 if ".64" in opcode or ".WIDE" in opcode else 1
    first = int(target.group(1))
    return set(range(first, first + width))
