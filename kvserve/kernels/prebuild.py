"""``python -m kvserve.kernels.prebuild``: compiles every kernel into the package.

For images without a compiler: one library for each level of CPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from kvserve.entry_format import FORMATS
from kvserve.kernels.build import (
    PREBUILT,
    WIDE,
    BuildError,
    defines_of,
    levels_of_this_machine,
    prebuild,
)


def libraries() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every library that the package loads: a source, and the compiler's defines."""
    sources = Path(__file__).parent.glob("*/*.cpp")
    yield from ((name, ()) for name in sorted(source.stem for source in sources))
    defines = {defines_of(form.key, form.value) for form in FORMATS.values()}
    yield from (("paged_attention", each) for each in (*sorted(defines), WIDE[True]))


def main() -> int:
    found = levels_of_this_machine()
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
