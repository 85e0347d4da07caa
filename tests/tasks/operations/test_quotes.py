"""Quotes of rows in other texts: escaped, reformatted, in part, and shared with rows that stay."""

from __future__ import annotations

import html
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.tasks.operations.quotes import QUOTE, REDACTED, Quotes, quotes_of, redacted, redacted_text
from rlcore.tasks.store.markdown import plain

TEXT = 'Zoë Quennell, born in "Łódź" & living at 17 Larch_Road,\nasks: is 3 < 4?'
LETTERS = st.characters(categories=("Lu", "Ll", "Nd"))


def _nested(text: str) -> str:
    return json.dumps({"attributes": {"inputs": json.dumps({"prompt": text})}})


@pytest.mark.parametrize(
    "form", [str, str.upper, json.dumps, html.escape, plain, repr, _nested], ids=lambda form: form.__name__
)
def test_a_text_is_found_in_every_form_in_which_pages_and_databases_have_it(form: object) -> None:
    assert callable(form)
    assert quotes_of([TEXT]).are_in(f"before {form(TEXT)} after")


@given(text=st.text(LETTERS, min_size=60, max_size=90), start=st.integers(0, 30), size=st.integers(QUOTE, 30))
def test_any_part_of_that_many_letters_is_found(text: str, start: int, size: int) -> None:
    assert quotes_of([text]).are_in(f"… {text[start : start + size]}!")


def test_a_part_that_a_remaining_row_has_identifies_nobody() -> None:
    template = "Answer the following question in one sentence: "
    found = quotes_of([template + "where does Zoë Quennell live?"]).without(
        [[template + "what is the capital of France?"]]
    )
    assert not found.are_in(template)
    assert found.are_in("question in one sentence: where does Zoë Quennell live?")
    assert "quennell" in found.words
    assert "sentence" not in found.words


def test_a_short_text_is_found_as_a_whole_unless_a_remaining_row_has_it() -> None:
    short = quotes_of(["Call 555 0199"])
    assert short.are_in('{"prompt": "call 555-0199"}')
    assert not short.are_in("recall 555 01990")
    assert not short.without([["call 555 0199!"]]).are_in("Call 555 0199")


def test_a_text_that_identifies_nobody_is_found_nowhere() -> None:
    assert not quotes_of(["7", "yes"]).are_in("7 yes")
    assert not quotes_of([]).are_in(TEXT)


def test_a_quote_is_found_across_the_pieces_of_a_long_text() -> None:
    filler = "lorem " * 700_000
    assert quotes_of([TEXT]).are_in(f"{filler[:4_194_290]}{TEXT}{filler}")


@pytest.fixture
def quotes() -> Quotes:
    return quotes_of([TEXT])


def test_json_keeps_everything_but_the_quotes_also_inside_of_its_texts(quotes: Quotes) -> None:
    document = json.loads(_nested(TEXT)) | {"iteration": 3}
    kept = json.loads(redacted_text(json.dumps(document), quotes))
    assert kept["iteration"] == 3
    assert json.loads(kept["attributes"]["inputs"]) == {"prompt": REDACTED}
    assert redacted({"other": ["text", 1.0, None]}, quotes) == {"other": ["text", 1.0, None]}


def test_a_quote_over_several_texts_of_a_document_leaves_nothing_of_it(quotes: Quotes) -> None:
    words = TEXT.split()
    assert json.loads(redacted_text(json.dumps(words), quotes)) == REDACTED
    assert redacted_text(f"no JSON: {TEXT}", quotes) == REDACTED
