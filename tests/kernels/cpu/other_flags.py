"""A pytest plug-in: compiled kernels are built with further flags, those of ``$FURTHER_FLAGS``."""

from __future__ import annotations

import os

from kvserve.kernels import build

build._FLAGS = (*build._FLAGS, *os.environ["FURTHER_FLAGS"].split())
