"""Formats of prompts by their names, as chat templates.

What they look like is in their makers' documentation; the wording is our own. Whoever renders them leaves
out the newline after a block and the blanks before one, as transformers does.
"""

FORMATS = {
    "alpaca": """\
{% set told = messages | selectattr('role', 'equalto', 'system') | list %}
{{ (told | last).content | trim if told else '' }}

{% for message in messages if message.role in ('user', 'assistant', 'user_context') %}
{{ '### ' + {'user': 'Instruction', 'assistant': 'Response', 'user_context': 'Input'}[message.role] + ':' }}
{{ message.content | trim -}}
{{ '' if loop.last else '\\n\\n' }}
{%- endfor %}
{% if add_generation_prompt and messages[-1].role != 'assistant' %}
### Response:
{% endif %}
""",
    "chatml": """\
{% for message in messages %}
{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' -}}
{% endif %}
""",
    "exaone": """\
{% if messages[0].role != 'system' %}
{{ '[|system|][|endofturn|]\\n' -}}
{% endif %}
{% for message in messages %}
{% set end = '\\n' if message.role == 'user' else '[|endofturn|]\\n' %}
{{ '[|' ~ message.role ~ '|]' ~ message.content ~ end -}}
{% endfor %}
{% if add_generation_prompt %}
{{ '[|assistant|]' -}}
{% endif %}
""",
    "llama3": """\
{{ bos_token -}}
{% for message in messages %}
{{ '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' -}}
{{ message.content | trim ~ '<|eot_id|>' -}}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{% endif %}
""",
    "mistral": """\
{% set told = messages[0].content ~ '\\n\\n' if messages[0].role == 'system' else '' %}
{{ bos_token -}}
{% for message in (messages[1:] if told else messages) %}
{% set expected = 'assistant' if loop.index0 % 2 else 'user' %}
{% if message.role != expected %}
{{ raise_exception('after a system message, user and assistant take turns: found ' ~ message.role) }}
{% elif message.role == 'user' %}
{{ ' [INST] ' ~ (told if loop.first else '') ~ message.content ~ ' [/INST]' -}}
{% else %}
{{ ' ' ~ message.content ~ eos_token -}}
{% endif %}
{% endfor %}
""",
}
