"""A text that tries to be more than text, and Markdown as a reader sees it."""

from __future__ import annotations

from html.parser import HTMLParser

from markdown_it import MarkdownIt

ATTACK = "</td><script>alert(1)</script><img src=x> ![p](//e/p.png) [l](//e) **b** _i_ ~~s~~ | # h &lt; \\* \x1b[2J"
READ = ATTACK.replace("\x1b", "\ufffd")
_OURS = {"h1", "h2", "h3", "p", "strong", "code", "table", "thead", "tbody", "tr", "th", "td", "ul", "li"}


class Reading(HTMLParser):
    """The words of a page and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.tags = "", set[str]()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def read_markdown(page: str) -> Reading:
    """Markdown with tables and HTML in it, as a page shows it."""
    reading = Reading()
    reading.feed(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(page))
    reading.text = reading.text.strip()
    return reading


def assert_is_text(page: str, *, count: int) -> None:
    """The attack stands in a page, so many times, as text; all tags are ours."""
    reading = read_markdown(page)
    assert reading.tags <= _OURS
    assert reading.text.count(READ) == count, reading.text
    assert "\x1b" not in page
