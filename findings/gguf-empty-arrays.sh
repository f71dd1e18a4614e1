#!/bin/sh
# gguf 0.19.0: GGUFWriter.add_array of an empty list, of lists, and of numbers beyond 32 bits
# Guess: an array of no elements; arrays in an array; the smallest type that holds the numbers
# Seen: an empty array is not written at all, with no word; GGUFReader's contents() runs inner arrays together; 2^31 is an error of struct, since whole numbers are int32
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q gguf==0.19.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import gguf


def back(values):
    writer = gguf.GGUFWriter("a.gguf", "llama")
    writer.add_array("x.y", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    field = gguf.GGUFReader("a.gguf").fields.get("x.y")
    return "absent" if field is None else field.contents()


seen = [back([]), back([[1, 2], [3]])]
try:
    seen.append(back([2**31]))
except Exception as error:
    seen.append(f"{type(error).__name__}: {error}")
print(version("gguf"), "[], [[1, 2], [3]], [2^31]:", seen)
raise SystemExit(seen[:2] != ["absent", [1, 2, 3]] or not seen[2].startswith("error: "))
PYTHON
