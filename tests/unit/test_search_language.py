"""The language of the search box: what a text asks for, and what is said of one that asks for nothing."""

import json
from contextlib import suppress
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloader.queue.reports import search
from dataloader.queue.reports.search import Range, WrongSearch, parsed, unfinished

ID = "01890a5d-ac96-774b-bcce-b302099a8057"


@pytest.mark.parametrize(
    ("text", "fields", "words"),
    [
        ("", {}, ()),
        ("  \t", {}, ()),
        ("load CSV", {}, ("load", "csv")),
        ('"May sale" x', {}, ("may sale", "x")),
        ('say "a \\"b\\" \\\\"', {}, ("say", 'a "b" \\')),
        ("status:dead", {"status": "dead"}, ()),
        ("STATUS:dead Key:A", {"status": "dead", "lock_key": "A"}, ()),
        ('lock_key:"a b" lock_key:"a b"', {"lock_key": "a b"}, ()),
        ('task:"x:y" z', {"task": "x:y"}, ("z",)),
        ("key:orders:17", {"lock_key": "orders:17"}, ()),
        ("Orders:2026-03-04 order:17", {}, ("orders:2026-03-04", "order:17")),
        ('orders:"a b" http://host/x', {}, ("orders:a b", "http://host/x")),
        ("partition:p producer:q group:g", {"partition_key": "p", "producer": "q", "consumer_group": "g"}, ()),
        ('error_group:"ValueError: row #"', {"error_group": "ValueError: row #"}, ()),
        ("it's foo\"bar", {}, ("it's", 'foo"bar')),
        ("2024-05-01", {}, ("2024-05-01",)),
        ("Ärger", {}, ("Ärger",)),
    ],
)
def test_words_and_fields(text: str, fields: dict[str, str], words: tuple[str, ...]) -> None:
    found = parsed(text)
    assert (dict(found.fields), found.words) == (fields, words)


@pytest.mark.parametrize(
    ("text", "documents"),
    [
        ("args.date:2024-05-01", [{"date": "2024-05-01"}]),
        ("args.n:5", [{"n": "5"}, {"n": 5}]),
        ("args.n:-1.50", [{"n": "-1.50"}, {"n": -1.5}]),
        ('args.n:"5"', [{"n": "5"}]),
        ("args.n:007", [{"n": "007"}]),
        ("args.a.b:true", [{"a": {"b": "true"}}, {"a": {"b": True}}]),
        ('args."a.b".c:null', [{"a.b": {"c": "null"}}, {"a.b": {"c": None}}]),
        ("args.a.x:p args.a.y:q", [{"a": {"x": "p", "y": "q"}}]),
        ("args.max_tokens:100", [{"max_tokens": 100}]),
    ],
)
def test_arguments_are_documents(text: str, documents: list[Any]) -> None:
    assert list(map(json.loads, parsed(text).args)) == documents


def test_an_id_or_its_beginning() -> None:
    whole = UUID(ID)
    for text in (ID, ID.upper(), whole.hex, f"id:{ID}"):
        assert parsed(text).ids == Range(whole, whole)
    for text in ("01890a5d-", "01890a5d-ac96", "id:0", "id:01890a5dac96", "id:01890a5d-ac96-774b-b"):
        ids = parsed(text).ids
        assert ids.first <= whole <= ids.last
    assert parsed("20240501").ids is None
    assert parsed("20240501").like_id == "20240501"
    assert parsed('"01890a5d-ac96"').words == ("01890a5d-ac96",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sttus:dead", "is status meant?"),
        ("status:dead since:1d", "since is a filter beside a search"),
        ("state:dead", 'use quotes: "state:dead"'),
        ("status:", "status:value"),
        ("status:cancelled", "a status is one of queued"),
        ("task:a task:b", "task stands twice"),
        ('"open', "the quote in"),
        ('task:"a"b', "a space come behind it"),
        ("args:5", "args.date:5"),
        ("args.password:x", "masked"),
        ("args.db.api_key:x", "masked"),
        ("args.tokens.pin:1234", "masked"),  # an object of this name is masked, and a number of it is an amount
        ("args.tokens.is_set:true", "masked"),
        ("args.a:1 args.a:2", "stands twice"),
        ("args.a:1 args.a.b:2", "lies within"),
        ("args.a.b:1 args.a:2", "holds another"),
        ("id:xyz", "first characters"),
        ("id:01-890", "dashes"),
        (f"{ID} id:02", "names two"),
        (" ".join("abcdefghi"), "at most 8 words"),
        ("x" * 513, "at most 512"),
        ("a\x00b", "control character"),
        ("args.a:1 args.b:1 args.c:1 args.d:1 args.e:1", "at most 4"),
    ],
)
def test_a_wrong_search_says_what_would_be_right(text: str, words: str) -> None:
    with pytest.raises(WrongSearch) as refusal:
        parsed(text)
    assert words in str(refusal.value)


@given(st.text(max_size=60))
def test_any_text_is_a_search_or_refused(text: str) -> None:
    with suppress(WrongSearch):
        search.parameters(parsed(text))
    unfinished(text)


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=40))
def test_a_quoted_value_comes_back(value: str) -> None:
    assert parsed(f"task:{search.quoted(value)}").fields == {"task": value}


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("lo", ("", None, "lo")),
        ("status:dead lo", ("status:dead ", None, "lo")),
        ("task:lo", ("", "task", "lo")),
        ('x key:"a b', ("x ", "lock_key", "a b")),
        ('"a b', ("", None, "a b")),
        ("a ", None),
        ("", None),
    ],
)
def test_the_last_term_is_completed_unless_a_space_ends_it(text: str, last: tuple[str, str | None, str] | None) -> None:
    assert unfinished(text) == last
