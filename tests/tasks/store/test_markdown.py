"""Text in Markdown: whatever it holds, what a reader sees is that text, and a terminal obeys nothing in it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlcore.tasks.store.markdown import code, code_cell, excerpt, on_terminal, plain
from tests.markup import ATTACK, READ, assert_is_text, read_markdown

TEXTS = st.text(alphabet="ab <>&;#`*_[]()|\\~!-+.:/\n\"'", max_size=30) | st.sampled_from(
    ["&lt;", "&amp;lt;", "\\&lt;"]
)


def test_names_are_no_markdown() -> None:
    assert plain("a_b *c*\n# d <i> & e") == r"a\_b \*c\* \# d &lt;i&gt; &amp; e"
    assert code("a`b\nc") == "`` a`b c ``"
    assert code("a``b") == "``` a``b ```"
    assert code_cell("a|b") == r"`a\|b`"
    assert plain("a\x1b[2Jb\x00") == "a\ufffd\\[2Jb\ufffd"


def test_an_excerpt_is_the_beginning_of_a_text() -> None:
    assert excerpt("x" * 160) == "x" * 160
    assert excerpt("x" * 161) == "x" * 159 + "…"
    assert excerpt("<" * 161) == "&lt;" * 159 + "…"  # cut before it is escaped


def test_an_attack_is_text_in_a_line_and_in_a_table() -> None:
    for write in (plain, code):
        assert_is_text(f"said: {write(ATTACK)}\n", count=1)
    for write in (plain, code_cell):
        assert_is_text(f"| a | b |\n|---|---|\n| {write(ATTACK)} | {write(ATTACK)} |\n", count=2)


@given(TEXTS)
def test_a_reader_and_a_terminal_see_the_text_itself(text: str) -> None:
    line = " ".join(text.split())
    assert on_terminal(plain(text)) == line
    assert read_markdown(f"x{plain(text)}x\n").text == f"x{line}x"
    if line:
        assert read_markdown(f"x{code(text)}x\n").text == f"x{line}x"


def test_what_is_read_is_the_attack_without_its_control_character() -> None:
    assert ATTACK.replace("\x1b", "\ufffd") == READ
