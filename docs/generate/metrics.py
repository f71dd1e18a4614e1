"""``reference/metrics.md``: every series of ``GET /metrics``, taken from its registry."""

from __future__ import annotations

from docs.generate.markdown import table
from kvserve.server.state.server_state import ServerState

_INTRO = """\
# Metrics

`GET /metrics` has these series in Prometheus' text format. Those of the engine carry the labels
`model_name` and `engine` (the replica). A series with a name under *also as* comes a second time
under vLLM's name, unless `--no-vllm-metrics` is given. [Deploy](../deploy.md#watch-it) has a
dashboard over them.
"""


def page(state: ServerState) -> str:
    """The page: a row for each family."""
    state.metrics.observe_http("/health", "GET", 200, 0.0)
    families = list(state.metrics.collect())
    mirrored = {family.name for family in families if family.name.startswith("vllm:")}
    rows = []
    for family in families:
        if family.name in mirrored:
            continue
        name = family.name + ("_total" if family.type == "counter" else "")
        twin = "vllm:" + family.name.removeprefix("kvserve:")
        also = name.replace("kvserve:", "vllm:", 1) if twin in mirrored else ""
        labels = {label for sample in family.samples for label in sample.labels}
        more = sorted(labels - {"model_name", "engine", "le"})
        rows.append(
            [
                f"`{name}`",
                family.type,
                family.documentation + ".",
                ", ".join(f"`{label}`" for label in more),
                f"`{also}`" if also else "",
            ]
        )
    head = ["series", "kind", "meaning", "further labels", "also as"]
    return "\n".join([_INTRO, table(head, rows)])
