"""An hour of mixed traffic and faults: `make soak`, or `python -m bench.soak --minutes 3`.

A server of the shipped model gets every kind of request, and faults are injected. Writes the
results as JSON; the exit status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.soak.attacks import checks as attack_checks
from bench.soak.attacks import run_attacks
from bench.soak.faulty import write_plug_in
from bench.soak.guests import run_guests
from bench.soak.mixed import MixedAttacks
from bench.soak.report import Check, write_report
from bench.soak.served import Served, resident
from bench.soak.traffic import Traffic, policies

CONTEXT = 2048
FLAGS = (
    *("--model", "kvserve/tiny", "--policy", "snapkv", "--policy.budget", "64"),
    *("--policy.window", "8", "--kv-layout", "head", "--max-model-len", str(CONTEXT)),
    *("--max-num-seqs", "32", "--num-gpu-blocks-override", "12000"),
    *("--max-num-seqs-per-client", "24", "--max-prefill-tokens", "256"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    "--disable-uvicorn-access-log",
)
FLAT_MIB, P99_SECONDS = 64.0, 0.05
_SAMPLE = 5.0


@dataclass
class Watched:
    """What was sampled every few seconds; times are seconds since the start."""

    samples: list[dict[str, float]] = field(default_factory=list)
    fixed_equal: int = 0
    fixed_other: list[str] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    starts: int = 1


class Soak:
    """One server under traffic and faults; the engine is killed only in the first half."""

    def __init__(self, minutes: float, clients: int, seed: int, folder: Path) -> None:
        self.minutes = minutes
        self._clients = clients
        plug_in = write_plug_in(folder / "plug-in")
        path = os.pathsep.join([str(plug_in), str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
        self.served = Served(FLAGS, {"PYTHONPATH": path})
        self._excused_until = 0.0
        self.traffic = Traffic([], CONTEXT, seed, self._is_excused)
        self.attacks = MixedAttacks(CONTEXT, self._is_excused)
        self.watched = Watched()
        self.refused_policies: list[str] = []
        self.health: list[tuple[float, float, int]] = []
        self._expected: list[int] = []
        self._started = 0.0

    def _is_excused(self) -> bool:
        return time.monotonic() < self._excused_until

    async def run(self) -> None:
        """Run the whole soak."""
        await asyncio.to_thread(self.served.start)
        self._expected = await asyncio.to_thread(self.served.fixed_tokens)
        self.traffic._specs[:] = await asyncio.to_thread(self._usable_policies)
        self.blocks = (await asyncio.to_thread(self.served.stats))["blocks_total"]
        self._started = time.monotonic()
        self._point_at(self.served.url)
        attacking = asyncio.ensure_future(asyncio.to_thread(self.attacks.run))
        running = asyncio.ensure_future(self.traffic.run(self._clients))
        watching = asyncio.ensure_future(self._watch())
        probing = asyncio.ensure_future(self._probe())
        try:
            await self._inject()
        finally:
            self.traffic.stop()
            self.attacks.stop()
            for task in (watching, probing):
                task.cancel()
            await asyncio.wait((running, attacking, watching, probing), timeout=180)
        self.idle = await asyncio.to_thread(self.served.idle, 60.0)
        await asyncio.sleep(5)  # an idle engine gives memory back
        self.idle_mib = resident(self.served.engine)
        self.at_end = await asyncio.to_thread(self.served.stats)
        await self._look_at_tokens()
        self.log = self.served.text
        self.status = await asyncio.to_thread(self.served.stop)

    def _usable_policies(self) -> list[dict[str, Any]]:
        """Policies that this server runs; the report names those that it refuses."""
        usable = []
        for spec in policies(CONTEXT):
            body = {"prompt": "Hello " * 20, "max_tokens": 4, "kv_policy": spec}
            answer = httpx.post(f"{self.served.url}/v1/completions", json=body, timeout=120)
            if answer.status_code == 200:
                usable.append(spec)
            else:
                self.refused_policies.append(f"{spec}: {answer.status_code} {answer.text}")
        return usable

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    # ---- faults --------------------------------------------------------------------------------

    async def _inject(self) -> None:
        """Inject the faults. Kills come only in the first half, so that the second half shows how
        the memory of one process grows."""
        total = self.minutes * 60
        plan = [(0.15, self._kill_engine), (0.3, self._stop_engine), (0.4, self._kill_engine)]
        plan += [(0.6, self._stop_engine), (0.8, self._stop_engine)]
        for share, fault in plan:
            await self._wait_until(share * total)
            await fault()
        await self._wait_until(total)

    async def _wait_until(self, seconds: float) -> None:
        while self.elapsed < seconds:
            await asyncio.sleep(0.5)
            if not self.served.alive:
                self.traffic.seen.surprise(f"the server ended: {self.served.text[-1500:]}")
                await self._restart()

    async def _kill_engine(self) -> None:
        """SIGKILL: open requests get an error and the server ends; then start another, as a
        supervisor does."""
        self._excused_until = time.monotonic() + 3600
        os.kill(self.served.engine, signal.SIGKILL)
        status = await asyncio.to_thread(self.served.process.wait, 60)
        self._note("engine killed", f"the server ended with status {status}")
        if status != 1:
            self.traffic.seen.surprise(f"engine killed: exit status {status}")
        await self._restart()

    async def _restart(self) -> None:
        self._excused_until = time.monotonic() + 3600
        self._point_at("")
        await asyncio.to_thread(self.served.start)
        self.watched.starts += 1
        self._point_at(self.served.url)
        await asyncio.sleep(5)  # requests to the old server end
        self._excused_until = 0.0

    def _point_at(self, url: str) -> None:
        self.traffic.url = self.attacks.url = url

    async def _stop_engine(self) -> None:
        """SIGSTOP for five seconds: all requests wait, none is lost."""
        engine = self.served.engine
        os.kill(engine, signal.SIGSTOP)
        await asyncio.sleep(5)
        os.kill(engine, signal.SIGCONT)
        self._note("engine stopped for 5 s", "went on")

    def _note(self, fault: str, result: str) -> None:
        self.watched.faults.append({"at_s": round(self.elapsed), "fault": fault, "result": result})

    # ---- watching ------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_SAMPLE)
            if self._is_excused() or not self.served.alive:
                continue
            with contextlib.suppress(OSError, IndexError, httpx.HTTPError, AssertionError):
                self.watched.samples.append(
                    {
                        "at_s": round(self.elapsed, 1),
                        "start": self.watched.starts,
                        "server_mib": round(resident(self.served.process.pid), 2),
                        "engine_mib": round(resident(self.served.engine), 2),
                        "descriptors": self.served.descriptors(),
                        "load": round(os.getloadavg()[0], 2),
                    }
                )
                await self._look_at_tokens()

    async def _look_at_tokens(self) -> None:
        try:
            found = await asyncio.to_thread(self.served.fixed_tokens)
        except httpx.HTTPError as error:
            if not self._is_excused():
                self.watched.fixed_other.append(f"{round(self.elapsed)} s: {error}")
            return
        if found == self._expected:
            self.watched.fixed_equal += 1
        else:
            self.watched.fixed_other.append(f"{round(self.elapsed)} s: {found}")

    async def _probe(self) -> None:
        """Run the probe, on one server after the other."""
        while True:
            url = self.traffic.url
            if not url:
                await asyncio.sleep(0.2)
                continue
            probe = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "bench.soak.probe", url, stdout=subprocess.PIPE
            )
            try:
                await self._read_probe(probe, url)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    probe.kill()

    async def _read_probe(self, probe: asyncio.subprocess.Process, url: str) -> None:
        assert probe.stdout is not None
        while self.traffic.url == url and (line := await probe.stdout.readline()):
            _, took, status = line.split()
            if not self._is_excused():
                self.health.append((self.elapsed, float(took), int(status)))

    # ---- judging -------------------------------------------------------------------------------

    def checks(self) -> list[Check]:
        """The requirements on a soak, and the values found."""
        seen, watched = self.traffic.seen, self.watched
        half = self.minutes * 30
        late = [each for each in watched.samples if each["at_s"] > half]
        took = sorted(seconds for _, seconds, _ in self.health)
        p99 = took[int(0.99 * (len(took) - 1))] if took else float("nan")
        back = self.at_end["blocks_free"] + self.at_end["blocks_cached"]
        checks = [
            Check("no 5xx but the injected ones, no surprise", 0, len(seen.surprises), "=="),
            Check("5xx and broken connections of attacks", 0, len(self.attacks.wrong), "=="),
            Check("tokens of the fixed request that differ", 0, len(watched.fixed_other), "=="),
            Check("blocks that are not back", 0, self.at_end["blocks_total"] - back, "=="),
            Check("exit status after SIGTERM", 0, self.status, "=="),
            Check("p99 of /health, s", P99_SECONDS, round(p99, 4), "<="),
        ]
        last = [each for each in watched.samples if each["start"] == watched.starts]
        above = round(self.idle_mib - min(each["engine_mib"] for each in last), 1)
        checks.append(
            Check("idle engine above its least since its start, MiB", FLAT_MIB, above, "<=")
        )
        grown = round(growth(late, "server_mib"), 1)
        checks.append(Check("growth of server over the last half, MiB", FLAT_MIB, grown, "<="))
        more = growth(late, "descriptors")
        checks.append(Check("growth of descriptors over the last half", 16.0, more, "<="))
        return checks

    def findings(self) -> dict[str, Any]:
        """The rest of the report."""
        seen, watched = self.traffic.seen, self.watched
        took = sorted(seconds for _, seconds, _ in self.health) or [float("nan")]
        loads = [each["load"] for each in watched.samples] or [float("nan")]
        return {
            "minutes": self.minutes,
            "clients": self._clients,
            "requests": sum(seen.answers.values()),
            "answers": dict(sorted(seen.answers.items())),
            "tokens_of_whole_answers": seen.tokens,
            "streams_cut": seen.cut_streams,
            "surprises": seen.surprises + self.attacks.wrong,
            "mixed_attacks": {name: dict(all) for name, all in self.attacks.answers.items()},
            "fixed_request_equal": watched.fixed_equal,
            "fixed_request_other": watched.fixed_other,
            "policies_refused_at_start": self.refused_policies,
            "faults": watched.faults,
            "injected_by_a_plug_in": dict(seen.injected),
            "health_s": {
                "looks": len(self.health),
                "median": statistics.median(took),
                "p99": took[int(0.99 * (len(took) - 1))],
                "longest": took[-1],
            },
            "load_average": {"median": statistics.median(loads), "most": max(loads)},
            "cores": os.cpu_count(),
            "tracebacks_in_the_log": self.log.count("Traceback"),
            "samples": watched.samples,
        }


def growth(samples: list[dict[str, float]], name: str) -> float:
    """From the median of the first fifth to that of the last; attacks take memory for seconds."""
    values = [each[name] for each in samples]
    fifth = max(len(values) // 5, 1)
    return statistics.median(values[-fifth:]) - statistics.median(values[:fifth]) if values else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-guests", action="store_true", help="leave out servers of their own")
    parser.add_argument("--save-result", type=Path, help="JSON file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvserve-soak-") as folder:
        soak = Soak(args.minutes, args.clients, args.seed, Path(folder))
        asyncio.run(soak.run())
    guests = [] if args.no_guests else run_guests()
    checks = soak.checks()
    failed = sum("FAILED" in guest["result"] for guest in guests)
    checks.append(Check("faults on servers of their own that went wrong", 0, failed, "=="))
    attacks = [] if args.no_guests else run_attacks()
    checks += attack_checks(attacks) if attacks else []
    found = {**soak.findings(), "guests": guests, "attacks": attacks}
    write_report(checks, found, args.save_result)
    sys.stdout.write(json.dumps([check.row() for check in checks], indent=2) + "\n")
    return 0 if all(check.holds for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
