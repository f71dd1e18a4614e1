"""``python -m kvserve.kernels.cpu.prebuild``: compiles every kernel into the package.

For images without a compiler: one library for each level of CPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from kvserve.entry_format import FORMATS
from kvserve.kernels.cpu import levels
from kvserve.kernels.cpu.build import PREBUILT, BuildError, defines_of, prebuild

_NAMES = (
    *("calls", "centre_scores", "decode_inputs", "elementwise", "fitted_remainder", "linear"),
    *("linear_levels",),
    *("move_kv", "moved_entries", "paged_attention", "quantized_entries", "query_log"),
    *("remainder", "slot_mapping", "store_kv", "top_places", "window_scores"),
)


def libraries() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every library that the package loads: a source, and the compiler's defines."""
    yield from ((name, ()) for name in _NAMES)
    for form in FORMATS.values():
        yield "paged_attention", defines_of(form.key, form.value)


def main() -> int:
    found = levels.of_this_machine()
    if not found:
        print("this kind of machine has no levels; kernels are compiled at first use")
        return 1
    for level in found:
        for name, defines in libraries():
            try:
                library = prebuild(name, defines, level)
            except (BuildError, OSError) as error:
                print(f"{name} for {level}: {error}", file=sys.stderr)
                return 1
            print(f"{level}: {library.relative_to(PREBUILT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
