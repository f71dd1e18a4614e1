"""Tool loops of clients and agents' libraries against a real model, SmolLM2.

It is too small to call tools by itself: the first turn's grammar makes it. The second turn is its
own, after the results of its calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvserve.engine.models.fetched import fetch
from kvserve.log import ConfigError
from tests.acceptance.conftest import RunClient
from tests.server.real_server import Server

pytestmark = pytest.mark.slow
TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call these tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
Write <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""SmolLM2's own writes no calls."""


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    try:
        fetch("smollm2")
    except ConfigError as error:
        pytest.skip(str(error))
    template: Path = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    server = Server(
        *("--model", "smollm2", "--max-model-len", "2048", "--chat-template", str(template))
    )
    yield server
    server.stop()


def test_tool_loops(run_client: RunClient, smollm2: Server) -> None:
    found = run_client("agents_client", smollm2.url, "smollm2")
    assert len(found) == 12
    for name, both in found.items():
        for way, loop in both.items():
            assert "error" not in loop, f"{name}, {way}: {loop['error']}"
            assert loop["calls"] and loop["text"].strip(), (name, way, loop)
        assert both["streamed"] == both["whole"], name
