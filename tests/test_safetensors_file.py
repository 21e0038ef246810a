"""Contract under test: files are byte for byte those of the package safetensors, in any order of writing, and what is
read is what it reads; a damaged file is refused by its header, and one that shrinks later by the read."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from quads_qat import safetensors_file
from quads_qat.safetensors_file import FileWriter, read, read_header, read_pieces

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int64, torch.bool]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.int16, torch.int32, torch.uint16]
DTYPES += [torch.uint32, torch.uint64, torch.complex64]


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def random(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return data.reshape(-1).view(dtype).view(shape)


def layouts(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


names = st.text(st.characters(min_codepoint=32, exclude_categories=["Cs"]), min_size=1, max_size=8)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
contents = st.dictionaries(
    names.filter(lambda n: n != "__metadata__"), st.tuples(st.sampled_from(DTYPES), shapes), max_size=6
)


@given(contents, st.randoms())
def test_the_bytes_of_save_file(tmp_path_factory: pytest.TempPathFactory, content: dict, order) -> None:
    tensors = {name: random(dtype, shape) for name, (dtype, shape) in content.items()}
    path = tmp_path_factory.mktemp("file") / "x.safetensors"
    writer = FileWriter(path, layouts(tensors))
    parts = [(name, at, at + 3) for name, t in tensors.items() for at in range(0, bytes_of(t).numel(), 3)]
    order.shuffle(parts)
    for name, begin, end in parts:
        writer.write(name, bytes_of(tensors[name])[begin:end], begin)
    writer.finish()
    assert path.read_bytes() == save(tensors, {"format": "pt"})
    header = read_header(path)
    assert header.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = read(path, header[name])
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bytes_of(found), bytes_of(tensor))
        pieces = [piece for _, piece in read_pieces(path, header[name])]
        assert torch.equal(torch.cat([torch.empty(0, dtype=torch.uint8), *pieces]), bytes_of(tensor))
        for i in range(tensor.shape[0] if tensor.ndim else 0):
            assert torch.equal(bytes_of(read(path, header[name], i)), bytes_of(tensor[i]))


def test_pieces_are_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(safetensors_file, "_PIECE", 7)
    tensor = random(torch.bfloat16, (3, 11))
    save_file({"a": tensor, "b": tensor.clone()}, tmp_path / "x.safetensors")
    pieces = dict(read_pieces(tmp_path / "x.safetensors", read_header(tmp_path / "x.safetensors")["b"]))
    assert list(pieces) == list(range(0, 66, 7))
    assert torch.equal(torch.cat(list(pieces.values())), bytes_of(tensor))


def test_an_index_that_is_not_there(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3), "scalar": torch.zeros(())}, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    for name, index in (("a", 2), ("a", -1), ("scalar", 0)):
        with pytest.raises(IndexError, match=rf"has no \[{index}\]"):
            read(tmp_path / "x.safetensors", header[name], index)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    """With a mapped file this would end the process."""
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(1 << 20)}, path)
    entry = read_header(path)["a"]
    os.truncate(path, 1 << 20)
    with pytest.raises(ValueError, match=r"is damaged .it became shorter while it was read.; download"):
        read(path, entry)
    path.unlink()
    with pytest.raises(ValueError, match=r"x\.safetensors: cannot be read .No such file"):
        read(path, entry)


@pytest.mark.parametrize("size", [0, 3, 8, 40])
def test_every_cut_is_seen(size: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(16), "b": torch.ones(3)}, path)
    for length in (size, path.stat().st_size - 1):
        os.truncate(path, length)
        with pytest.raises(ValueError, match="is damaged"):
            read_header(path)
    save_file({"a": torch.zeros(16)}, path)
    with open(path, "ab") as file:
        file.write(b"\0")
    with pytest.raises(ValueError, match="is damaged"):
        read_header(path)


def test_what_is_not_written_is_noticed(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path / "x", {"a": (torch.float32, (4,))})
    writer.write("a", torch.ones(2))
    with pytest.raises(AssertionError, match="8 bytes were not written"):
        writer.finish()
    with pytest.raises(AssertionError, match="16 bytes at 8 of 16"):
        writer.write("a", torch.ones(4), 8)
    writer.close()
    with pytest.raises(FileExistsError):
        FileWriter(tmp_path / "x", {})
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match=r"exists|symbolic"):
        FileWriter(tmp_path / "link", {})
    assert not (tmp_path / "outside").exists()


def test_transposed_and_strided_tensors(tmp_path: Path) -> None:
    tensor = random(torch.bfloat16, (6, 8))
    writer = FileWriter(tmp_path / "x", {"a": (torch.bfloat16, (8, 6)), "b": (torch.bfloat16, (3, 8))})
    writer.write("a", tensor.mT)
    writer.write("b", tensor[::2])
    writer.finish()
    stored = load_file(tmp_path / "x")
    assert torch.equal(bytes_of(stored["a"]), bytes_of(tensor.mT))
    assert torch.equal(bytes_of(stored["b"]), bytes_of(tensor[::2]))
