"""A crowd of streams with random disconnects: blocks come back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.real_server import Server
from tests.waiting import WAIT, wait_until

CLIENT = Path(__file__).with_name("crowd_client.py")


@pytest.mark.parametrize("count", [40, 500])
@pytest.mark.slow
def test_a_crowd_comes_and_goes(count: int) -> None:
    patient = ("--read-timeout", f"{WAIT}", "--write-timeout", f"{WAIT}")
    server = Server("--max-num-seqs", "64", "--max-model-len", "512", *patient)
    try:
        command = [sys.executable, str(CLIENT), server.url, str(count)]
        out = subprocess.run(command, stdout=subprocess.PIPE, timeout=WAIT, check=True).stdout
        seen = json.loads(out)
        assert seen["done"] + seen["left"] == count
        assert seen["left"] > count / 10 and not seen["errors"]
        wait_until(server.idle)
        assert server.stats()["num_running"] == server.stats()["num_waiting"] == 0
    finally:
        server.stop()
