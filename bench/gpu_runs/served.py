"""The README's first minutes on a GPU: a server, an answer whose cache shrinks, and its end.

    python -m bench.gpu_runs.served FILE [--model M] [--smoke]

Needs kvserve's server: fastapi (with opentelemetry-api, which it imports), uvicorn, httptools,
pydantic, msgspec, pyzmq, orjson, llguidance, prometheus-client; as wheels on a machine without a
package index.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from bench.machine import ROOT, write_json
from bench.soak.served import Served

_ALIKE = 40
"""Characters that all answers to one question have to begin with."""
_FLAGS = "--policy", "kara", "--kv-cache-dtype", "k8v4"


def measured(model: str, at_once: int) -> dict[str, Any]:
    """What the server did, step by step."""
    found: dict[str, Any] = {"model": model}
    server, began = Served(["--model", model, *_FLAGS]), time.monotonic()
    server.start(150.0)  # ends at once if the process does
    found["start_s"] = time.monotonic() - began
    chain = json.loads((ROOT / "examples" / "chain.json").read_text()) | {"model": model}

    def ask(**changes: Any) -> httpx.Response:
        url = f"{server.url}/v1/chat/completions"
        return httpx.post(url, json=chain | {"temperature": 0} | changes, timeout=120.0)

    try:
        answer = ask().raise_for_status().json()
        found["ends_with"] = answer["choices"][0]["message"]["content"][-80:]
        found["kv_cache_details"] = answer["usage"]["kv_cache_details"]
        wrong = ask(max_tokens=-1)
        found["wrong_request"] = [wrong.status_code, wrong.json()["error"]["message"]]
        with ThreadPoolExecutor(at_once) as pool:
            began = time.monotonic()
            answers = list(pool.map(lambda _: ask().json(), range(at_once)))
        tokens = sum(each["usage"]["completion_tokens"] for each in answers)
        found["at_once"], found["output_tok_s"] = at_once, tokens / (time.monotonic() - began)
        texts = [each["choices"][0]["message"]["content"] for each in (answer, *answers)]
        found["same_answers"] = sum(text == texts[0] for text in texts[1:])
        # A GPU's sums depend on the batch, so that answers part sooner or later.
        found["same_beginnings"] = sum(text[:_ALIKE] == texts[0][:_ALIKE] for text in texts[1:])
        found["idle_again"] = server.idle(10.0)
        found["blocks_released_total"] = server.stats()["blocks_released_total"]
    finally:
        found["status"] = server.stop()
        found["log"] = server.text[-3000:]
    released = found["kv_cache_details"]["blocks_released"] > 0 and found["idle_again"]
    alike = found["same_beginnings"] == at_once
    found["right"] = released and alike and wrong.status_code == 400 and found["status"] == 0
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="a server on this GPU")
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="kvserve/tiny-long", metavar="M")
    parser.add_argument("--smoke", action="store_true", help="few requests")
    args = parser.parse_args()
    found = measured(args.model, 2 if args.smoke else 64)
    write_json(args.file, found)
    return int(not found["right"])


if __name__ == "__main__":
    raise SystemExit(main())
