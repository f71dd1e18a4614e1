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

STRICT = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}{{ tools | tojson }}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' %}
{%- if not loop.first %}{{ raise_exception('a system turn has to be the first') }}{% endif %}
{%- elif m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
<function={{ c.function.name }}>
{% for k, v in c.function.arguments|items %}<parameter={{ k }}>
{{ v if v is string else v | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}{{ raise_exception('an unknown role') }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Refuses a system turn that is not the first, as Qwen 3.5 does; calls in XML."""

GEMMA = """
{%- set first, rest = '', messages %}
{%- if messages[0].role == 'system' %}
{%- set first, rest = messages[0].content + ' // ', messages[1:] %}
{%- endif %}
{%- for m in rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}
{%- set role = 'model' if m.role == 'assistant' else m.role %}<start_of_turn>{{ role }}
{{ (first if loop.first else '') + (m.content | trim) }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
"""As Gemma 3: the first system turn is part of the user's, a later one would be an unknown role."""

NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + GEMMA
)
"""As Gemma 2."""

LLAMA31 = """
{%- set sys = '' %}
{%- if messages[0].role == 'system' %}
{%- set sys, messages = messages[0].content, messages[1:] %}
{%- endif %}<|start_header_id|>system<|end_header_id|>

A preamble. {{ tools | tojson if tools else '' }}{{ sys }}<|eot_id|>
{%- for m in messages %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('only one call') }}{% endif %}
{%- set f = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|eot_id|>
{%- else %}
{%- set role = 'ipython' if m.role == 'tool' else m.role -%}
<|start_header_id|>{{ role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
"""The first system turn has a preamble; any role has a turn."""

COLLECTS = """
{%- for m in messages if m.role == 'system' %}{{ m.content }}

{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<User>{{ m.content }}
{%- elif m.role == 'assistant' %}<Assistant>{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments }}{% endfor %}
{%- elif m.role == 'tool' %}<Result>{{ m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<Assistant>{% endif %}"""
"""As DeepSeek V3: all system turns come first."""

CHATML = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

ALTERNATES = """
{%- set rest = messages %}
{%- if messages[0].role == 'system' %}
{%- set sys, rest = messages[0].content, messages[1:] %}
{%- endif %}
{%- set ns = namespace(i=0) %}
{%- for m in rest if not (m.tool_calls or m.role == 'tool') %}
{%- if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}
{%- set ns.i = ns.i + 1 %}
{%- endfor %}
{%- for m in rest %}
{%- if m.role == 'user' %}[INST]
{%- if loop.last and sys is defined %}{{ sys + ' // ' }}{% endif %}{{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS][
{%- for c in m.tool_calls %}
{{- '{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}}
{%- if not loop.last %}, {% endif %}
{%- endfor %}]</s>
{%- elif m.role == 'assistant' %}{{ m.content }}</s>
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- else %}{{ raise_exception('only user and assistant') }}
{%- endif %}
{%- endfor %}"""
"""As Mistral 7B v0.3: roles alternate, the system turn is beside a user's that is the last."""

IN_PLACE = """
{%- for m in messages %}
{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]
{%- elif m.role == 'assistant' %}{{ m.content }}</s>
{%- else %}{{ raise_exception('only user, system and assistant') }}
{%- endif %}
{%- endfor %}"""
"""As Mistral Small 3."""

REPLACES = """
{%- set ns = namespace(sys='') %}
{%- for m in messages if m.role == 'system' %}{% set ns.sys = m.content %}{% endfor %}{{ ns.sys }}
{%- for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}<reply>"""
"""As DeepSeek R1's distillates: the last system turn instead of the first."""

NO_TOOLS = CHATML + "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
"""What is asked beside tools is none the less found."""

ANY_ROLE = GEMMA.replace("raise_exception('alternate')", "''")
"""The first system turn is part of the user's, a later one an unknown role, and none is refused."""

CHOOSY = """
{%- set ns = namespace(sys='', last='') %}
{%- for t in tools %}{{ '// ' + t.description + t.name + (t.parameters.properties | tojson) }}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'system' %}{% set ns.sys = m.content %}
{%- elif m.role == 'user' %}<user>{{ ns.sys + m.content }}{% set ns.sys = '' %}
{%- elif m.role == 'tool' %}
{%- if ns.last not in ('tool', 'call') %}{{ raise_exception('a result without a call') }}{% endif %}
## {{ m.tool_call_id }}: {{ m.content }}
{%- elif not (m.content or m.tool_calls) %}{{ raise_exception('an empty turn') }}
{%- else %}<assistant>{{ m.content }}
{%- for c in m.tool_calls or [] %}<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id -}}
<|tool_call_argument_begin|>{% raw %}{{% endraw %}
{%- for k, v in c.function.arguments.items() %}{{ '"' + k + '": "' + v + '"' }}
{%- if not loop.last %}, {% endif %}{% endfor %}}<|tool_call_end|><|tool_calls_section_end|>
{%- endfor %}
{%- endif %}
{%- set ns.last = 'call' if m.tool_calls else m.role %}
{%- endfor %}"""
"""Wants what single templates do: functions alone as tools (Apertus), a list without any (Command
R), ids with names (Kimi), texts as arguments, no empty turn (Ministral), no result without a call
(Devstral), and a user's turn behind a system's."""

NEMO = """
{%- set ns = namespace(i=0) %}
{%- for m in messages if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}
{%- set ns.i = ns.i + 1 %}
{%- endfor %}
{%- for m in messages %}
{%- if m.tool_calls %}[TOOL_CALLS]
{%- for c in m.tool_calls %}
{%- if c.id | length < 9 %}{{ raise_exception('ids have length 9') }}{% endif %}
{{- c.function | tojson }}{% endfor %}</s>
{%- else %}[{{ m.role }}]{{ m.content }}{% endif %}
{%- endfor %}"""
"""As Mistral Nemo: content beside calls is left out, and would be a second turn on its own."""
