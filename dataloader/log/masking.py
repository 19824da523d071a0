"""Masking: `masked` removes secrets from log lines, error texts, journals and API answers.

`masked` knows a secret by its name (`password`, `api_key`), by its place in a text (the userinfo of a URL,
`token=...`, `Bearer ...`), by its form (the service's own tokens), or by its value: the configured passwords, the
variables of the environment with a secret's name, and the secret arguments of the running job.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeVar, overload
from urllib.parse import quote, quote_plus, unquote

from dataloader.config import SOURCES, WEBHOOK_SECRETS

MASK = "***"
TEXT_LIMIT = 1_000_000  # characters; a longer text is cut in its middle to this length, then masked
DEPTH_LIMIT = 100  # levels; a value nested deeper is masked unseen
# A shorter secret is masked by name and place only: a value such as "etl" occurs everywhere.
SHORTEST = 4
SHORTEST_FOUND = 8  # the same for a guess: a variable of the environment, a value inside credentials
LINES_MOST = 200  # of one secret that are masked by themselves
SHORT = 200  # characters of a text that may come again
SHORTEST_NUMBER = 6  # digits; shorter numbers are years, ports and counts
_NAMES = (
    r"pass(?:word|wd|phrase|code)|pwd|secret|token|authorization|cookie|credential|bearer|jwt|"
    r"(?:api|access|private|auth|signing|encryption)[-_]?key"
)
_FIRST = "(?=[abcejpst])"  # the first letters of _NAMES rule out most places at little cost
_NAME = re.compile(rf"{_NAMES}|pass$|^auth$|dsn|conninfo|conn(?:ection)?[-_]?str", re.IGNORECASE)
_COUNT = re.compile("tokens", re.IGNORECASE)  # a number of this name is an amount, not a secret
# Every repetition is bounded or possessive, so that the time of a search grows with the text's length only. A cut may
# have shortened the text in a secret, so each expression also matches at the end of the text.
_LOGIN = re.compile(r":(?=(//[^\s:/@]{0,200}+:))")  # a URL's password may begin here, also inside another password
_WORD = re.compile(r"\S*+")
_CUT = re.compile(r"(?!\d{1,5}+(?:[^\w%@+~=-]|\Z))\S{1,300}+\Z")  # a password cut by the end of the text, and no port
_USER = re.compile(r"(https?://)[^\s:/@?#]{1,300}+@", re.IGNORECASE)  # a user without a password is a token
_OWN = re.compile(r"(?<![A-Za-z0-9])dl_[A-Za-z0-9_-]{30,}+")  # a token of the service, or most of one
_BEARER = re.compile(r"(bearer\s{1,3})(?=[a-z_.~+/=-]{0,40}\d)[\w.~+/=-]{8,}+", re.IGNORECASE)  # a word has no digit
_PEM = re.compile(r"(PRIVATE KEY-----)[^-]{1,20000}+(?:-|\Z)")
# A quoted value of a header ends with the quote, another one with the line.
_HEADER = re.compile(
    r"((?:authorization|cookie)\\{0,4}[\"']?\s{0,3}[=:]\s{0,3})(?:(\\{0,4}[\"'])[^\r\n\"'\\]++|[^\r\n\"'\\][^\r\n]*+)",
    re.IGNORECASE,
)
_FLAG = re.compile(rf"(--(?:(?!--)[\w-]){{0,30}}?{_FIRST}(?:{_NAMES})[\w-]{{0,30}}+\s{{1,3}})[^\s-]\S*+", re.IGNORECASE)
_PAIR = re.compile(
    rf"""({_FIRST}(?:{_NAMES}|pass)[\w-]{{0,30}}+\\{{0,4}}["']?\s{{0,3}}(?:=>|[=:]|%3[ad])\s{{0,3}}|"""
    r"""password\s{1,3}(?=e?'))"""  # the last is SQL
    r"""(?:[brue]?'(?:[^'\\]|\\.){0,5000}+(?:'|\Z)|[bru]?"(?:[^"\\]|\\.){0,5000}+(?:"|\Z)|"""
    r"""\\{1,4}["'].{0,5000}?(?:\\{1,4}["']|\Z)|\[[^]]{0,5000}+]?|\{[^}]{0,5000}+}?|[^\s,;&]++)""",
    re.IGNORECASE | re.DOTALL,
)
# Every name in _NAMES contains one of these words; most texts contain none, and need no search.
_WORDS = ("pass", "pwd", "secret", "token", "auth", "cookie", "credential", "bearer", "jwt", "key")
_SCHEME = re.compile(r"(?:bearer|basic|token)\s+(\S+)", re.IGNORECASE)
_USERINFO = re.compile(r"://[^\s:/@]{0,200}+:([^\s@/]{1,300}+)@")
_ESCAPE = re.compile("%[0-9A-F]{2}")
T = TypeVar("T")
_configured: frozenset[str] = frozenset()
_of_job: frozenset[str] = frozenset()
_known: tuple[str, ...] = ()
_learned = 0  # how often `_known` has changed
_PLAIN = frozenset({int, float, bool, type(None)})


@overload
def masked(value: str) -> str: ...
@overload
def masked(value: T) -> T: ...
def masked(value: Any) -> Any:
    """A copy of `value` without secrets: of a text, or of a structure of dicts, lists and tuples.

    Any other value comes back unchanged. A text over TEXT_LIMIT is cut in its middle.
    """
    return _masked(value, DEPTH_LIMIT)


def _masked(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return masked_text(value)
    if type(value) in _PLAIN:
        return value
    if not isinstance(value, dict | list | tuple):
        return MASK if hasattr(value, "get_secret_value") else value
    if depth == 0:
        return MASK
    if isinstance(value, dict):
        return {
            masked_text(name) if type(name) is str else _masked(name, 0): MASK
            if is_secret(name, item)
            else item
            if type(item) in _PLAIN
            else _masked(item, depth - 1)
            for name, item in value.items()
        }
    items = [_masked(item, depth - 1) for item in value]
    return items if isinstance(value, list) else tuple(items)


def masked_text(text: str) -> str:
    """The text without known secrets and without values in a secret's place."""
    return _masked_again(text, _learned) if len(text) <= SHORT and type(text) is str else _masked_anew(text)


@lru_cache(maxsize=2_048)
def _masked_again(text: str, _: int) -> str:
    """`masked` with a cache for short texts: words, names and identities repeat.

    The number is `_learned`: a text that is masked while another thread learns a secret is masked again.
    """
    return _masked_anew(text)


def _masked_anew(text: str) -> str:
    if len(text) > TEXT_LIMIT:
        text = clipped(text, TEXT_LIMIT)
    for secret in _known:
        if secret in text:
            text = text.replace(secret, MASK)
    if "dl_" in text:
        text = _OWN.sub(MASK, text)
    if "://" in text:
        text = _USER.sub(rf"\g<1>{MASK}@", _urls_masked(text))
    if ":" in text or "=" in text or "--" in text or "'" in text or "%3" in text:
        text = _named_masked(text)
    if " " in text and ("earer " in text or "BEARER " in text):
        text = _BEARER.sub(rf"\g<1>{MASK}", text)
    return text


def _urls_masked(text: str) -> str:
    """The text without the passwords of its URLs: up to the last @ within 300 characters, or to the end of the text.

    A single expression would search these 300 characters for each possible begin of a password; this loop remembers
    the next @.
    """
    parts: list[str] = []
    done = stop = 0
    at, nowhere = -1, len(text) + 1
    for login in _LOGIN.finditer(text):
        begin = login.end(1)
        if login.start() < done:
            continue
        if begin >= stop:
            stop = _WORD.match(text, begin).end()  # type: ignore[union-attr]  # it matches an empty text too
        if at <= begin and (at := text.find("@", begin + 1)) < 0:
            at = nowhere
        if at < (last := min(stop, begin + 301)):
            end = text.rfind("@", at, last)
        elif last == len(text) and _CUT.match(text, begin):
            end = last
        else:
            continue
        parts += text[done:begin], MASK
        done = end
    return "".join(parts) + text[done:]


def _named_masked(text: str) -> str:
    if text.isascii():  # re.IGNORECASE also equates some other letters with ours, `lower` does not
        lowered = text.lower()
        if not any(word in lowered for word in _WORDS):
            return text
    if "PRIVATE KEY" in text:
        text = _PEM.sub(rf"\g<1>{MASK}", text)
    text = _PAIR.sub(rf"\g<1>{MASK}", _HEADER.sub(rf"\g<1>\g<2>{MASK}", text))
    return _FLAG.sub(rf"\g<1>{MASK}", text) if "--" in text else text


def clipped(text: str, limit: int) -> str:
    """The first and the last half of `limit` characters, without the two words at the cut."""
    head, tail = text[: limit // 2], text[-limit // 2 :]
    head, tail = head.rsplit(None, 1)[0], tail.split(None, 1)[-1]
    return f"{head}\n[... {len(text) - len(head) - len(tail)} characters ...]\n{tail}"


def is_secret(name: object, value: object) -> bool:
    """True when a value of this name is to be masked."""
    if not isinstance(name, str) or value is None or not _has_secret_name(name[:200]):
        return False
    return not (isinstance(value, int | float) and _COUNT.search(name))


@lru_cache(maxsize=2_048)
def _has_secret_name(name: str) -> bool:
    return _NAME.search(name) is not None


def learn_configured(settings: object) -> None:
    """From now on mask these settings' SecretStr values and the environment's secrets wherever they occur."""
    global _configured
    given = [value.get_secret_value() for value in vars(settings).values() if hasattr(value, "get_secret_value")]
    for cluster in getattr(settings, "dl_engines", {}).values():
        given += _secrets_in(cluster.secrets, 0)
    _configured = frozenset(
        form for text in given + list(_environment_values()) for secret in _passwords(text) for form in _forms(secret)
    )
    _remember()


def learn_job(args: Mapping[str, Any]) -> None:
    """Mask the secret arguments of a starting job, and the passwords in its URLs, until the next call."""
    global _of_job
    before, _of_job = _of_job, frozenset(form for secret in _secrets_in(args, 0) for form in _forms(secret))
    if _of_job != before:
        _remember()


def _remember() -> None:
    global _known, _learned
    # The longest first, for one secret may be part of another.
    _known = tuple(sorted(_configured | _of_job, key=len, reverse=True))
    _learned += 1
    _masked_again.cache_clear()


def _environment_values() -> Iterator[str]:
    for name, value in os.environ.items():
        is_path = value.startswith("/")  # CREDENTIALS_DIRECTORY, TOKEN_FILE
        is_named = is_secret(name, value) or name.startswith((WEBHOOK_SECRETS, SOURCES))
        if is_named and len(value) >= SHORTEST_FOUND and not is_path:
            yield value


def _passwords(text: str) -> Iterator[str]:
    """The passwords in a DSN, or the credentials in an Authorization; any other text is a secret as a whole."""
    from psycopg import ProgrammingError  # not at the top: a program that asks the API needs no driver
    from psycopg.conninfo import conninfo_to_dict

    if match := _SCHEME.fullmatch(text):
        yield from (text, match[1])
        return
    try:
        parts = conninfo_to_dict(text)
    except (ProgrammingError, UnicodeError):
        yield text
    else:
        yield from (str(parts[name]) for name in ("password", "sslpassword") if parts.get(name))
    if match := _USERINFO.search(text):
        yield match[1]


def _secrets_in(value: Any, depth: int, is_named: bool = False, is_within: bool = False) -> Iterator[str]:
    """The secrets in args. `is_named`: the value has a secret's name; `is_within`: a structure around it has one."""
    if isinstance(value, str):
        if is_named or (is_within and len(value) >= SHORTEST_FOUND):
            yield from _passwords(value)
        elif "://" in value:
            yield from map(unquote, _USERINFO.findall(value))
    elif isinstance(value, Mapping) and depth < DEPTH_LIMIT:
        for name, item in value.items():
            is_secret_item = is_secret(name, item)
            if is_secret_item or type(item) not in _PLAIN:
                yield from _secrets_in(item, depth + 1, is_secret_item, is_named or is_within)
    elif isinstance(value, list) and depth < DEPTH_LIMIT:
        for item in value:
            yield from _secrets_in(item, depth + 1, is_named, is_within)
    elif is_named and type(value) is int and len(str(abs(value))) >= SHORTEST_NUMBER:
        yield str(abs(value))


def _forms(secret: str) -> set[str]:
    """The forms of a secret in texts: plain, in a URL, in JSON, in Python's and in libpq's quotes."""
    encoded = {quote(secret), quote(secret, safe=""), quote_plus(secret), quote_plus(secret, safe="")}
    encoded |= {_ESCAPE.sub(lambda match: match[0].lower(), form) for form in encoded}
    forms = {secret, repr(secret)[1:-1], *encoded}
    forms |= {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
    forms.add(secret.replace("\\", "\\\\").replace("'", "\\'"))
    return {form for form in forms if len(form) >= SHORTEST} | _lines_of(secret)


def _lines_of(secret: str) -> set[str]:
    """The lines of a secret that has several: the log of a run is masked line by line."""
    lines = map(str.strip, secret.splitlines()[:LINES_MOST] if "\n" in secret else ())
    return {line for line in lines if len(line) >= SHORTEST_FOUND}
