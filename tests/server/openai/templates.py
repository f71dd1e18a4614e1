"""Chat templates in the manner of those of well-known families; written for these tests."""

from __future__ import annotations

QWEN = """
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}<|im_start|>assistant
{{ m.content }}
{%- for c in m.tool_calls %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""ChatML, arguments as objects, calls in Hermes' form."""

LLAMA = """
{%- if tools %}<s>system {{ tools | tojson }}</s>{% endif %}
{%- for m in messages %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('only one call at once') }}{% endif %}
{%- set f = m.tool_calls[0].function %}<s>assistant
{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}</s>
{%- else %}<s>{{ m.role }}
{{ m.content }}</s>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<s>assistant
{% endif %}"""
"""One bare JSON object for a call; content beside it is left out."""

DEEPSEEK = """
{%- for m in messages %}
{%- if m.role == 'user' %}<User>{{ m.content }}
{%- elif m.role == 'assistant' and m.content is none %}<Assistant><｜tool▁calls▁begin｜>
{%- for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.type + '<｜tool▁sep｜>' + c.function.name }}
```json
{{ '' + c.function.arguments }}
```<｜tool▁call▁end｜>
{%- endfor %}<｜tool▁calls▁end｜></s>
{%- elif m.role == 'assistant' %}<Assistant>{{ m.content }}</s>
{%- elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<Assistant><think>
{% endif %}"""
"""Calls only where content is none, arguments as text."""

MISTRAL = """
{%- set ns = namespace(role='assistant') %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if ns.role == 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined %}[TOOL_CALLS][
{%- for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}
{{- '{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}
{{- ', "id": "' + c.id + '"}' }}
{%- if not loop.last %}, {% endif %}
{%- endfor %}]</s>
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }} {{ m.content }}[/TOOL_RESULTS]
{%- elif m.role == 'assistant' %}{{ m.content + '</s>' }}
{%- else %}{{ raise_exception('only user, assistant and tool') }}
{%- endif %}
{%- set ns.role = m.role %}
{%- endfor %}"""
"""Ids of nine characters, roles that alternate, no system."""

HARMONY = """<|start|>system<|message|>You answer.<|end|>
{%- if messages[0].role == 'system' or tools %}<|start|>developer<|message|>
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for t in tools or [] %}
type {{ t.function.name }}{% endfor %}<|end|>
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>
{%- elif m.role == 'tool' %}<|start|>functions.{{ m.name }}<|message|>{{ m.content }}<|end|>
{%- elif 'tool_calls' in m %}
{%- if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}
{%- if m.content or m.thinking %}<|start|>assistant<|channel|>analysis<|message|>
{{- m.content or m.thinking }}<|end|>{% endif %}
{%- set f = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ f.name -}}
<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
"""Channels; a message's first call alone, later system messages not at all."""

PLAIN = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"""
"""Neither tools nor calls."""

PARTS = """{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}
{%- endfor %}<assistant>"""
"""Content is a list of parts."""

UNKNOWN = QWEN.replace("<tool_call>", "<<call").replace("</tool_call>", "call>>")
"""Calls in a form that no parser knows."""
