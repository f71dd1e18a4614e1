"""What a grammar may take before the engine sees it: stack, time and memory of another process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bench.soak.bombs import CHAINS, nested, references, rules
from kvserve.engine.models.hub import find_model
from kvserve.engine.sampling import grammar_backends, grammar_trial
from kvserve.engine.sampling.grammar import SequenceGrammar
from kvserve.engine.sampling.grammar_backends import BackendSource, Matcher, compile_and_try
from kvserve.engine.sampling.grammar_trial import WALL_SECONDS, GrammarTrial
from kvserve.log import RequestError
from kvserve.sampling_params import StructuredOutput
from tests.waiting import WAIT


@pytest.fixture(scope="module")
def trial() -> Iterator[GrammarTrial]:
    path = str(find_model("kvserve/tiny"))
    trial = GrammarTrial(BackendSource(path, False, 512, [0]))
    yield trial
    trial.close()


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_of_rules_overflows_another_stack(trial: GrammarTrial, name: str) -> None:
    """3,000 rules overflowed the engine's."""
    with pytest.raises(RequestError, match=r"structured_outputs.*refer to one another") as refused:
        trial.check(StructuredOutput("grammar", CHAINS[name]))
    assert refused.value.param == "structured_outputs" and refused.value.code == "invalid_grammar"
    trial.check(StructuredOutput("grammar", 'start: "a" | "b"'))


def test_a_chain_of_references_overflows_another_stack(trial: GrammarTrial) -> None:
    """Even one whose depth nobody has counted."""
    with pytest.raises(RequestError, match="refer to one another"):
        trial.check(StructuredOutput("json", json.dumps(references(3000))))


def test_what_people_write_passes(trial: GrammarTrial) -> None:
    trial.check(StructuredOutput("grammar", rules(100, 'r{i}: "y"? r{next}')))
    trial.check(StructuredOutput.parse({"json": references(60)}))
    trial.check(StructuredOutput.parse({"json": nested(25, "anyOf")}))
    trial.check(StructuredOutput.parse({"choice": [f"option number {i}" for i in range(10_000)]}))


@pytest.mark.parametrize(
    "schema",
    [references(1000), nested(1000, "anyOf"), nested(1000, "allOf"), nested(100_000, "items")],
    ids=["$ref", "anyOf", "allOf", "items"],
)
def test_a_deep_schema_is_refused_before(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"guided_json.*128 levels") as refused:
        StructuredOutput.parse({"json": schema}, "guided_json")
    assert refused.value.param == "guided_json"


def test_a_schema_may_refer_to_itself(trial: GrammarTrial) -> None:
    node = {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/node"}, "all": {"$ref": "#"}},
    }
    trial.check(StructuredOutput.parse({"json": {"$defs": {"node": node}, **node}}))


def test_limits_of_time_and_memory() -> None:
    """In a process like the helper's: one that ran tests keeps freed memory to hand out again."""
    program = textwrap.dedent("""
        import os, signal
        from kvserve.engine.sampling.grammar_trial import MEMORY_BYTES, tried

        def spin():
            while True:
                pass

        print(tried(spin))
        print(tried(lambda: bytearray(2 * MEMORY_BYTES).clear()))
        print(tried(lambda: os.kill(os.getpid(), signal.SIGSEGV)))
        print(tried(lambda: None))
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT, check=True
    )
    slow, large, deep, fine = done.stdout.split("\n")[:4]
    assert "1 s" in slow and "memory" in large and "nested" in deep and fine == ""


def test_a_refusal_is_remembered(trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = StructuredOutput("grammar", rules(2999), "guided_grammar")
    for _ in range(2):
        with pytest.raises(RequestError, match="guided_grammar"):
            trial.check(wanted)
        monkeypatch.setattr(GrammarTrial, "_ask", None)


def test_a_helper_that_was_killed_is_started_again(trial: GrammarTrial) -> None:
    trial.check(StructuredOutput("regex", "a+"))
    assert trial._process is not None
    trial._process.kill()
    trial._process.wait()
    trial.check(StructuredOutput("regex", "b+"))


def test_a_helper_that_stands_still_is_replaced(
    trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request with a grammar waited without end."""
    trial.check(StructuredOutput("regex", "c+"))
    stopped, start = trial._process, GrammarTrial._running
    assert stopped is not None
    stopped.send_signal(signal.SIGSTOP)

    def running(own: GrammarTrial) -> subprocess.Popen[str]:
        process = start(own)
        monkeypatch.setattr(
            grammar_trial, "REPLY_SECONDS", 0.1 if process is stopped else 3 * WALL_SECONDS
        )
        return process

    monkeypatch.setattr(GrammarTrial, "_running", running)
    trial.check(StructuredOutput("regex", "d+"))
    assert trial._process is not stopped and stopped.poll() is not None


class Slow:
    """A matcher of llguidance's that is quick for some masks; the clock is ours."""

    now, masks = 0.0, 0

    def deep_copy(self) -> Slow:
        return Slow()

    def compute_bitmask(self) -> bytes:
        Slow.masks += 1
        Slow.now += 0.09 if Slow.masks > 20 or Slow.masks == 3 else 0.001
        return b"\xff" * 4

    def consume_token(self, token_id: int) -> bool:
        return True

    def is_error(self) -> bool:
        return False


def test_a_grammar_whose_masks_become_slow_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern of 125 KB took .1 s a row: 64 rows stopped everybody for 6 s in each step."""
    monkeypatch.setattr(grammar_backends, "thread_time", lambda: Slow.now)

    def compiled() -> Matcher:
        return compile_and_try(lambda _: Matcher(Slow()), StructuredOutput("regex", "a"), 1)

    first, mask = compiled(), np.zeros(1, np.int32)
    grammars = [SequenceGrammar(first.copy(), (None, None), ()) for _ in range(64)]
    for _ in range(3):
        for grammar in grammars:
            grammar.fill(mask)
    assert Slow.now < 1 and all(grammar.failure is not None for grammar in grammars)
    with pytest.raises(ValueError, match="10 ms for each token"):
        compiled()
