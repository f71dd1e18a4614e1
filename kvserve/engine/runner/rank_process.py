"""The process of every rank but the first.

The first rank sends a ``RankStart``, a ``Pool``, and from then on its scheduler's messages and new
policies. A rank answers twice: when it has started, and with the memory it has left once its part
of the model is loaded. If it cannot start, it answers with a ``ConfigError``. A rank exits when the
first rank is gone.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from kvserve.engine.device.shared_group import SharedGroup
from kvserve.engine.models.loader import load_model
from kvserve.engine.policies.base import Policy
from kvserve.engine.runner.model_runner import ModelRunner
from kvserve.engine.runner.plan import EnginePlan
from kvserve.engine.runner.rank import measure, ready_runner
from kvserve.log import ConfigError, configure_logging, logger
from kvserve.scheduler.messages.output import SchedulerOutput

JOINING = "joining"
"""A rank's first answer: it has started, and waits for the other ranks."""
FORGET_SCORES = "forget scores"
"""A message to a rank: no sequence needs the kept scores any more."""


@dataclass(frozen=True)
class RankStart:
    """The first message to a rank."""

    plan: EnginePlan
    rank: int
    size: int
    store: Path
    attention: str
    threads: int
    log_level: int


def main() -> None:
    """Main function of the process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the first rank says when to exit
    from kvserve.engine.device.child import parents_end

    connection = parents_end()
    inbox: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    start: RankStart = inbox.get()
    configure_logging(start.log_level)
    try:
        runner = _build(start, connection, inbox)
        while (message := inbox.get()) is not None:
            if isinstance(message, SchedulerOutput):
                runner.launch(message)
            elif message == FORGET_SCORES:
                runner.batch.kept_scores().forget()
            else:
                policy_id, policy = message
                runner.policies[policy_id] = policy
    except ConfigError as error:
        connection.send(error)
    except Exception:
        logger.exception("tensor-parallel rank %d failed", start.rank)
        sys.exit(1)


def _read(connection: Connection, inbox: SimpleQueue[Any]) -> None:
    """Read messages while the rank computes; end the process when the first rank is gone."""
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        pass
    except Exception:
        logger.exception("a tensor-parallel rank cannot read its messages")
    os._exit(1)


def _build(start: RankStart, connection: Connection, inbox: SimpleQueue[Any]) -> ModelRunner:
    plan = start.plan
    if plan.device == "cuda":
        torch.cuda.set_device(start.rank)
    else:
        torch.set_num_threads(start.threads)
    attention = plan.attention(start.attention)
    connection.send(JOINING)
    group = SharedGroup.join(start.rank, start.size, start.store, plan.device)
    weights = plan.directory, plan.config.model, plan.spec, plan.dtype, plan.device
    model = load_model(*weights, group)
    connection.send(measure(plan, model, attention, group).left)
    return ready_runner(plan, model, attention, inbox.get(), group)


def message_for_ranks(message: SchedulerOutput | tuple[int, Policy] | str) -> bytes:
    """A message without what only the first rank needs: the sampled sequences and their rules."""
    if isinstance(message, SchedulerOutput):
        requests = tuple(
            replace(
                request,
                token_ids=request.token_ids[:0],
                sampling=replace(request.sampling, rules=None, grammar=None),
            )
            for request in message.admitted.requests
        )
        admitted = replace(message.admitted, requests=requests)
        message = replace(message, admitted=admitted, sampled=())
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
