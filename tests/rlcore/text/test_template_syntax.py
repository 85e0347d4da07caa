from __future__ import annotations

import pytest
from jinja2 import Environment

from rlcore.models.scratch import CHAT_TEMPLATE
from rlcore.text.template_syntax import preserves_text

LOOP = "{% for m in messages %}"
UNCHANGED = [
    CHAT_TEMPLATE,
    LOOP + "{% if m.content %}{{ m.role ~ ': ' ~ m.content }}{% endif %}{% endfor %}",
    "{% set rest = messages[1:] %}{{ messages[0]['content'] + '.' }}{% for m in rest %}"
    "{% if loop.last and m.role == 'user' %}{{ '<' ~ m.content ~ '>' }}{% endif %}{% endfor %}",
    LOOP + "{% if m.content is string and not m.tool_calls %}{{ m.content }}{% endif %}{% endfor %}",
]
OPEN = [
    LOOP + "{{ m.content | trim }}{% endfor %}",
    LOOP + "{{ m.content + m.content | upper }}{% endfor %}",
    LOOP + "{{ m.content }}{% if '</think>' in m.content %}!{% endif %}{% endfor %}",
    LOOP + "{% set text = m.content %}{{ text }}{% endfor %}",
    LOOP + "{{ loop.previtem.content[:2] }}{{ m.content }}{% endfor %}",
    LOOP + "{{ m.items() }}{% endfor %}",
    LOOP + "{{ m.content[0] }}{% endfor %}",
    LOOP + "{{ m.content or 'none' }}{% endfor %}",
    LOOP + "{% if m.content == 'a' %}!{% endif %}{{ m.content }}{% endfor %}",
    LOOP + "{{ m }}{% endfor %}",
    "{{ messages | tojson }}",
    "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
    "{% for key in messages[0] %}{{ messages[0][key] | upper }}{% endfor %}",
    "{% filter upper %}{{ messages[0].content }}{% endfilter %}",
    "{% set box = namespace(m=messages[0]) %}{{ box.m.content | upper }}",
    "{% unknown %}",
]


@pytest.mark.parametrize("template", UNCHANGED)
def test_a_template_that_only_writes_texts_writes_them_as_they_are(template: str) -> None:
    assert preserves_text(template)
    turns = [{"role": role, "content": f"\ue000{place}"} for place, role in enumerate(("system", "assistant", "user"))]
    frame = Environment().from_string(template).render(messages=turns)
    texts = [" </think> {{ 1 }} ", "\n<b>&amp;", "<|im_end|> "]
    given = [turn | {"content": text} for turn, text in zip(turns, texts, strict=True)]
    for place, text in enumerate(texts):
        frame = frame.replace(f"\ue000{place}", text)
    assert Environment().from_string(template).render(messages=given) == frame


@pytest.mark.parametrize("template", OPEN)
def test_a_template_that_may_change_a_text_or_ask_about_it_is_rendered(template: str) -> None:
    assert not preserves_text(template)
