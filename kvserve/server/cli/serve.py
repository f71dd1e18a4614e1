"""``kvserve serve``: adds its flags and starts the server."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import NoReturn

from kvserve import __version__
from kvserve.flags import add_flag
from kvserve.log import configure_logging, logger
from kvserve.server.settings.reading import GROUPS, check_policies, read_settings

EXAMPLE = """\
examples:
  kvserve serve kvserve/tiny
  kvserve --model kvserve/tiny --policy kara --policy.window 128 --policy.buffer 16
  kvserve --config server.yaml --port 9000

Every flag may also be an environment variable (--max-num-seqs: KVSERVE_MAX_NUM_SEQS,
--policy.window: KVSERVE_POLICY_WINDOW) or a line of a YAML file (max-num-seqs: 64; policy.window:
128; policy: {name: kara, window: 128}). The command line wins over the environment, the
environment over the file. --policy.FIELD VALUE sets a field of the policy;
`kvserve policies` lists them. Sizes: 32k is 32,000; 32K and 32Ki are 32,768; 2GiB is 2 x 1024^3.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvserve [serve] [MODEL] [FLAGS]"
    parser.epilog = EXAMPLE
    parser.add_argument("model_tag", metavar="MODEL", nargs="?", help="same as --model")
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file with settings"
    )
    for title, settings in GROUPS.items():
        group = parser.add_argument_group(title)
        for item in settings:
            add_flag(item, group)


def run(args: argparse.Namespace) -> int:
    config, settings = read_settings(args)
    configure_logging(settings.log_level)
    # Logged before the imports below: loading torch alone takes seconds.
    logger.info("kvserve %s starts with %s (pid %d)", __version__, config.model.model, os.getpid())
    if "VLLM_API_KEY" in os.environ and not (settings.api_key or settings.api_key_file):
        logger.warning("VLLM_API_KEY is not read: anybody may ask; set KVSERVE_API_KEY")
    signal.signal(signal.SIGTERM, _leave)
    from kvserve.engine.models.hub import local_model

    # What is no model's name is refused before the engine's process loads torch.
    local_model(config.model.model, load_format=config.model.load_format)
    check_policies(config.compression)
    from kvserve.server.cli.runner import serve

    return serve(config, settings)


def _leave(*_: object) -> NoReturn:
    """Exit at once on a SIGTERM that comes before the server runs: there is nothing to drain."""
    logger.info("stopped before anything was loaded")
    sys.exit(0)
