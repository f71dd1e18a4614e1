"""Instructions of the loops of a compiled kernel, as the assembler's own tool lists them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^/\*[0-9a-f]{4,}\*/\s+(.*?);")
_BRANCH = re.compile(r"\bBRA\b.*?(\.L_x_\d+)")


def hot_loops(cubin: bytes) -> list[int]:
    """Instructions of a pass of each loop that multiplies matrices, in the order of the code."""
    labels: dict[str, int] = {}
    code: list[str] = []
    loops = []
    for line in map(str.strip, _disassembled(cubin).splitlines()):
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := _INSTRUCTION.match(line):
            code.append(instruction[1])
            back = _BRANCH.search(instruction[1])
            if back and back[1] in labels:  # a label that was seen lies before
                body = code[labels[back[1]] :]
                if any("MMA" in each for each in body):
                    loops.append(len(body))
    return loops


def _disassembled(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-c", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
