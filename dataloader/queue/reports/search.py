"""PURE: the language of the search box: words, and fields such as `status:dead`, `args.date:2024-05-01`, `key:"a b"`.

A job must match all terms; a word is a part of a task, queue or key, or an id. Masked values cannot be searched.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import UUID

from dataloader.log import masking
from dataloader.queue.fields import FILTERS
from dataloader.queue.job import STATUSES

LENGTH = 512  # characters of a search
WORDS = 8
ARGS = 4  # each may have two meanings, which are all tried
# The name of each field in a search, and its name in filters.
FIELDS = {
    "status": "status",
    "task": "task",
    "queue": "queue",
    "key": "lock_key",
    "partition": "partition_key",
    "producer": "producer",
    "group": "consumer_group",
}
FIELDS |= {name: name for name in (*FILTERS, "error_group") if name not in FIELDS.values()}
_ALIASES = FIELDS | {name: name for name in FIELDS.values()}
_TERM = re.compile(
    r'(?:(?P<name>[A-Za-z_]\w*(?:\.(?:"(?:[^"\\]|\\.)*"|[^\s:."]+))*):)?(?P<value>"(?:[^"\\]|\\.)*"(?=\s|$)|[^\s"]\S*|)'
)
_PART = re.compile(r'\."((?:[^"\\]|\\.)*)"|\.([^."]+)')
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,30})(?:\.[0-9]{1,30})?")
_ID = re.compile("[0-9a-f]{8}(?:-[0-9a-f]{0,4}){1,3}(?:-[0-9a-f]{0,12})?|[0-9a-f]{32}")
_LIKE_ID = re.compile("[0-9a-f]{8,31}")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_CAPITALS = str.maketrans({chr(code): chr(code + 32) for code in range(ord("A"), ord("Z") + 1)})


class WrongSearch(ValueError):
    """The search is not valid; the text has the valid form."""


class Range(NamedTuple):
    """The ids of jobs that begin with some characters: from the first to the last of them."""

    first: UUID
    last: UUID


@dataclass(frozen=True, slots=True)
class Search:
    """The conditions of a search; `like_id` is a word that may be a part of an id, or of a text."""

    fields: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    ids: Range | None = None
    like_id: str | None = None

    @property
    def near(self) -> Range | None:
        """The ids that this search may name; None: it names none."""
        return self.ids or (beginning(self.like_id) if self.like_id else None)


NOTHING = Search()


@lru_cache(maxsize=256)
def parsed(text: str | None) -> Search:
    """The search of this text; raises WrongSearch."""
    if text is None or not text.strip():
        return NOTHING
    if len(text) > LENGTH:
        raise WrongSearch(f"a search should have at most {LENGTH} characters, not {len(text):,}")
    if _CONTROL.search(text):
        raise WrongSearch("a search should have no control character and no lone surrogate in it")
    fields: dict[str, str] = {}
    words: list[str] = []
    args: dict[tuple[str, ...], list[str]] = {}  # by its path the values that an argument may have, as JSON
    ids = like_id = None
    for name, value in _terms(text):
        kind, plain, is_quoted = name and name.lower(), _plain(value), value.startswith('"')
        if kind and kind != "id" and kind not in _ALIASES and not kind.startswith("args."):
            if meant := _meant(name or "", plain):
                raise WrongSearch(meant)
            kind, plain = None, f"{name}:{plain}"  # a part of a key, such as orders:17
        if kind is None:
            word = lowered(plain)
            if not is_quoted and _ID.fullmatch(word):
                kind = "id"
            elif not is_quoted and _LIKE_ID.fullmatch(word) and like_id is None:
                like_id = word
            elif word.strip():
                words.append(word)
        if kind == "id":
            if ids is not None:
                raise WrongSearch("a job has one id, and this search names two")
            ids = beginning(lowered(plain))
        elif kind and kind.startswith("args."):
            path, meanings = _argument(name[4:] if name else "", value)
            if path in args:
                raise WrongSearch(f"{name} stands twice, and an argument has one value: leave one of them out")
            args[path] = meanings
        elif kind:
            known = _ALIASES[kind]
            if known == "status" and plain not in STATUSES:
                raise WrongSearch(f"status:{plain} is none; a status is one of {', '.join(STATUSES)}")
            if fields.setdefault(known, plain) != plain:
                raise WrongSearch(f"{name} stands twice, and a job has one: leave one of them out")
    if len(words) > WORDS:
        raise WrongSearch(f"a search should have at most {WORDS} words: leave some out, or quote a text as one")
    if len(args) > ARGS:
        raise WrongSearch(f"a search should name at most {ARGS} arguments")
    documents = []
    for values in itertools.product(*args.values()) if args else ():
        document: dict[str, Any] = {}
        for path, each in zip(args, values, strict=True):
            _put(document, path, each)
        documents.append(_json(document))
    return Search(fields, tuple(words), tuple(documents), ids, like_id)


def _argument(path: str, value: str) -> tuple[tuple[str, ...], list[str]]:
    """The names that lead to an argument, and its value as JSON: the text, and what that looks like without quotes."""
    parts = tuple(_ESCAPE.sub(r"\1", quoted) if quoted else plain for quoted, plain in _PART.findall(path))
    looks_like = [value] if value in ("true", "false", "null") or _NUMBER.fullmatch(value) else []
    *around, last = parts
    is_masked = any(masking.is_secret(each, {}) for each in around)
    meanings = [
        each
        for each in [json.dumps(_plain(value)), *looks_like]
        if not is_masked and not masking.is_secret(last, "" if each == "null" else json.loads(each))
    ]
    if not meanings:
        raise WrongSearch(f"args{path} is masked everywhere, so no search finds its value: search for another")
    return parts, meanings


def _terms(text: str) -> Iterator[tuple[str | None, str]]:
    """The name, or None, and the value of each term."""
    at, text = 0, text.strip()
    while at < len(text):
        match = _TERM.match(text, at)
        assert match is not None  # noqa: S101  it may be empty
        name, value = match["name"], match["value"]
        if not value:
            rest = text[at:]
            if name is not None and not rest[len(name) + 1 :].startswith('"'):
                raise WrongSearch(f"{name}: lacks its value; write it without a space, as {name}:value")
            raise WrongSearch(
                f"the quote in {rest[:40]} should end, and a space come behind it:"
                ' write "a text", and \\" for a quote in it'
            )
        yield name, value
        at = match.end()
        at += len(text[at:]) - len(text[at:].lstrip())


def _meant(name: str, value: str) -> str:
    """The advice for a name that is like a field's; "" for one that is a text."""
    if name.lower() == "args":
        return f"args needs the name of an argument: args.date:{value}"
    text = f'For the text itself use quotes: "{name}:{value}"'
    if name.lower() in ("since", "until"):
        return f"{name} is a filter beside a search, as in `dataloader jobs --since 1d`, and no field. {text}"
    similar = get_close_matches(name.lower(), [*FIELDS, "args", "id"], 1, 0.7)
    return f"{name} is no field, is {similar[0]} meant? {text}" if similar else ""


def _plain(value: str) -> str:
    return _ESCAPE.sub(r"\1", value[1:-1]) if value.startswith('"') else value


def _put(document: dict[str, Any], parts: tuple[str, ...], value: str) -> None:
    for part in parts[:-1]:
        inner = document.setdefault(part, {})
        if not isinstance(inner, dict):
            raise WrongSearch(f"args.{'.'.join(parts)} lies within another argument of this search, which is a value")
        document = inner
    if parts[-1] in document:
        raise WrongSearch(f"args.{'.'.join(parts)} holds another argument of this search, so it has no value itself")
    document[parts[-1]] = value


def _json(value: Any) -> str:
    """The document; its values are JSON already."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {_json(item)}" for name, item in value.items()) + "}"
    return str(value)


def beginning(text: str) -> Range:
    """The ids that begin with these characters; raises WrongSearch."""
    digits = text.replace("-", "")
    if not digits or len(digits) > 32 or not re.fullmatch("[0-9a-f]+", digits):
        raise WrongSearch(f"id:{text[:40]} should be a job's id or its first characters, such as id:01890a5d-ac96")
    last = UUID(digits.ljust(32, "f"))
    if not str(last).startswith(text) and text != digits:
        raise WrongSearch(f"id:{text[:40]} should have its dashes as in 01890a5d-ac96-774b-bcce-b302099a8057")
    return Range(UUID(digits.ljust(32, "0")), last)


def lowered(text: str) -> str:
    """The text with small letters for A to Z, as lower() with the collation C makes of it."""
    return text.translate(_CAPITALS)


def parameters(search: Search) -> dict[str, Any]:
    """The parameters of the conditions `found` in search.sql, where an id follows U+0001 and texts newlines."""
    ids, near, like_id = search.ids, search.near, search.like_id
    digits = like_id or ""
    dashed = str(UUID(digits.ljust(32, "0")))[: len(digits) + sum(len(digits) > place for place in (8, 12, 16, 20))]
    return {
        "patterns": list(map(pattern, search.words)) or None,
        "like_id": [f"%\n%{like_id}%", f"\x01{dashed}%", f"\x01%{like_id}\n%"] if like_id else None,
        "args": list(search.args) or None,
        "id_from": ids and ids.first,
        "id_to": ids and ids.last,
        "near_from": near and near.first,
        "near_to": near and near.last,
    }


def pattern(part: str) -> str:
    """The pattern of LIKE for this part of a text."""
    return "%" + re.sub(r"[\\%_]", r"\\\g<0>", part) + "%"


def quoted(value: str) -> str:
    """The value as a search has it: in quotes where it would be read as something else."""
    is_plain = value and not _CONTROL.search(value) and re.fullmatch(r'[^\s":\\]+', value)
    return value if is_plain else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


class Unfinished(NamedTuple):
    """The last term of a search that is being typed: what stands before it, its field or None, its text so far."""

    before: str
    name: str | None
    part: str


def unfinished(text: str) -> Unfinished | None:
    """The term that the text ends with; None where it ends with a space, or between two terms."""
    at, quoted_ = 0, False
    for place, character in enumerate(text):
        if character == '"' and text[place - 1 : place] != "\\":
            quoted_ = not quoted_
        elif character.isspace() and not quoted_:
            at = place + 1
    term = text[at:]
    name, colon, value = term.partition(":")
    if not term or _CONTROL.search(text) or len(text) > LENGTH:
        return None
    field = _ALIASES.get(name.lower()) if colon else None
    part = (value if field else term).removeprefix('"').removesuffix('"')
    return Unfinished(text[:at], field, _ESCAPE.sub(r"\1", part))
