"""Chat templates in the shapes of Qwen's, Llama's and Mistral's, with the control tokens of the small tokenizer."""

from __future__ import annotations

import copy

from rlcore.text.tokenization import ChatTokenizer

_PLAIN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
HERMES = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n"
    "Write <tool_call>{...}</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% elif m.tool_calls %}<|im_start|>assistant\n{{ m.content }}"
    '{% for c in m.tool_calls %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% else %}" + _PLAIN + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% if tools %}<|im_start|>system\nEnvironment: ipython{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|im_end|>"
    "{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>ipython\n{{ m.content | tojson }}<|im_end|>"
    '{% elif m.tool_calls %}<|im_start|>assistant\n{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|im_end|>'
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}[TOOL_CALLS] [{{ m.tool_calls[0].function | tojson }}]<|im_end|>"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
MISTRAL_CONTROLS = ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]")


def with_template(tokenizer: ChatTokenizer, template: str, *controls: str) -> ChatTokenizer:
    """The tokenizer with another chat template, and with more control tokens."""
    backend = copy.deepcopy(tokenizer.hf_tokenizer)
    backend.chat_template = template
    if controls:
        backend.add_special_tokens({"additional_special_tokens": list(controls)})
    return ChatTokenizer.of(backend, tokenizer.eos_ids)
