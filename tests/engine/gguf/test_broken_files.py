"""Files that are cut, or that lie about themselves: one line, and no memory for what they claim."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvserve.engine.gguf.reader import read_gguf
from kvserve.engine.gguf.tensors import GgufTensors
from kvserve.engine.gguf.tokenizer import gguf_tokenizer
from kvserve.log import ConfigError
from tests.checkpoints import read_spec, write_checkpoint
from tests.gguf_files import write_gguf

MUCH = 2**60
U32, TEXT, ARRAY = 4, 8, 9


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], kind: int = 0, start: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, start)


def array(kind: int, count: int) -> bytes:
    return struct.pack("<IQ", kind, count)


def file_of(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    num_keys: int | None = None,
    num_tensors: int | None = None,
    version: int = 3,
) -> bytes:
    """A file with these entries and 256 bytes of tensors, and perhaps with other counts."""
    counts = len(tensors) if num_tensors is None else num_tensors
    counts_of_keys = len(keys) if num_keys is None else num_keys
    table = struct.pack("<4sIQQ", b"GGUF", version, counts, counts_of_keys)
    table += b"".join([*keys, *tensors])
    return table + bytes(-len(table) % 32) + bytes(256)


NAME = key("general.architecture", TEXT, text("llama"))
WHOLE = file_of([NAME], [tensor("a", [8, 8])])
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot mmap an empty file"),
    "something else": (b'{"model": 1}', "is no GGUF file: it begins with b'{\"mo'"),
    "cut in the magic": (WHOLE[:3], "passes its end"),
    "cut in the counts": (WHOLE[:20], "1 tensors do not fit in it"),
    "cut in a key": (WHOLE[:40], "passes its end"),
    "cut in the table of tensors": (WHOLE[:90], "do not fit in it|passes its end"),
    "cut in the tensors": (WHOLE[:-1], "tensor a passes its end"),
    "version 1": (file_of(version=1), "version 1; kvserve reads GGUF 2 and 3"),
    "other byte order": (file_of(version=0x03000000), "its bytes are in the other order"),
    "many tensors": (file_of(num_tensors=MUCH), "tensors do not fit in it"),
    "many keys": (file_of(num_keys=MUCH), "keys do not fit in it"),
    "a key of 4 GB": (file_of([text(b"", 2**32)]), "text of 4,294,967,296 bytes .* passes its end"),
    "a text of 4 GB": (file_of([key("a", TEXT, text(b"", 2**32))]), "passes its end"),
    "the longest text": (file_of([key("a", TEXT, text(b"", 2**64 - 1))]), "passes its end"),
    "many texts": (file_of([key("a", ARRAY, array(TEXT, MUCH))]), "texts of a do not fit in it"),
    "many numbers": (file_of([key("a", ARRAY, array(U32, MUCH))]), "numbers of a do not fit in it"),
    "arrays of arrays": (file_of([key("a", ARRAY, array(ARRAY, 1))]), "a is an array of type 9"),
    "no such type of key": (file_of([key("a", 99, b"")]), "a is of type 99"),
    "a key twice": (file_of([NAME, NAME]), "general.architecture is there twice"),
    "a tensor twice": (file_of([], [tensor("a", [8])] * 2), "tensor a is there twice"),
    "no dimensions": (file_of([], [tensor("a", [])]), "tensor a has 0 dimensions"),
    "nine dimensions": (file_of([], [tensor("a", [1] * 9)]), "tensor a has 9 dimensions"),
    "no numbers": (file_of([], [tensor("a", [8, 0])]), r"tensor a has shape \(0, 8\)"),
    "2 ** 120 numbers": (file_of([], [tensor("a", [MUCH, MUCH])]), "tensor a passes its end"),
    "half a block": (file_of([], [tensor("a", [16], 8)]), r"has shape \(16,\) in Q8_0"),
    "overlap": (
        file_of([], [tensor("a", [32]), tensor("b", [8], 0, 96)]),
        "tensor b begins inside",
    ),
    "not aligned": (file_of([], [tensor("a", [8], 0, 4)]), "tensor a .* is not aligned"),
    "behind the end": (file_of([], [tensor("a", [8], 0, 2**40)]), "tensor a passes its end"),
    "a far start": (file_of([], [tensor("a", [8], 0, 2**64 - 32)]), "tensor a passes its end"),
    "no such type": (file_of([], [tensor("a", [8], 99)]), "in ggml type 99, which the installed"),
    "no dequantisation": (file_of([], [tensor("a", [256], 15)]), "in Q8_K, which gguf does not"),
    "no alignment": (
        file_of([key("general.alignment", U32, bytes(4))], [tensor("a", [8])]),
        "general.alignment is 0",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused(case: str, tmp_path: Path) -> None:
    content, message = BROKEN[case]
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(ConfigError, match=message) as error:
        read_gguf(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(file) in str(error.value) and "\n" not in str(error.value)
    assert peak < 2**24


def test_the_file_that_they_are_made_of_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(WHOLE)
    found = read_gguf(file)
    assert found.metadata == {"general.architecture": "llama"}
    assert found.tensors["a"].shape == (8, 8)


def test_whatever_the_bytes_say(tmp_path: Path) -> None:
    """A few bytes of the header and tables changed at random: refused or read, nothing else."""

    def facts(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(n) for n in range(128)])
        writer.add_token_types([1] * 120 + [3] * 8)
        writer.add_bos_token_id(0)
        writer.add_sampling_temp(0.5)
        writer.add_sliding_window_pattern([True, False, True])

    directory = write_checkpoint("llama", tmp_path / "model")
    file = write_gguf(directory, tmp_path / "model.gguf", "llama", facts=facts)
    whole = file.read_bytes()
    header = min(t.start for t in read_gguf(file).tensors.values())
    chance = random.Random(0)
    refused = 0
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(chance.choice((1, 2, 8))):
            content[chance.randrange(8, header)] = chance.choice(
                (0, 1, 9, 255, chance.randrange(256))
            )
        file.write_bytes(content)
        try:
            read_spec(file)
            GgufTensors(file)
            gguf_tokenizer(str(file))
        except ConfigError:
            refused += 1
    assert 40 < refused < 400
