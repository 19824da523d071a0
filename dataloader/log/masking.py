"""Masking: `masked` removes secrets from log lines, error texts, journals and API answers.

`masked` knows a secret by its name (`password`, `api_key`), by its place in a text (the userinfo of a URL,
`token=...`, `Bearer ...`), by its form (tokens of known services), or by its value: the configured passwords, the
variables of the environment with a secret's name, and the secret arguments of the running job. A value counts where it
stands as a whole word, and from SHORTEST characters on: a shorter one, such as "etl", is a part of other data.

The names and forms are those of gitleaks (config/gitleaks.toml) and detect-secrets (plugins/keyword.py).
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar, overload
from urllib.parse import quote, quote_plus, unquote

from dataloader.config import SECRETS, SOURCES, WEBHOOK_SECRETS

MASK = "***"
TEXT_LIMIT = 1_000_000  # characters; a longer text is cut in its middle to this length, then masked
DEPTH_LIMIT = 100  # levels; a value nested deeper is masked unseen
SHORTEST = 8  # characters of a secret that is masked by its value
LINES_MOST = 200  # of one secret that are masked by themselves
SHORT = 200  # characters of a text that may come again
SHORTEST_NUMBER = 6  # digits; shorter numbers are years, ports and counts
# Names of secrets. No lowercase letter follows, so `secretary` and `tokenizer` are other words.
_NAMES = (
    r"(?:(?:pass(?:wor[dt]|wd|[-_]?phrase|code)|pwd|secret|token|credential|cookie|signature)s?|парол[ья]|authorization|bearer|"
    r"(?<![a-z0-9])jwt|sess(?:ion)?[-_]?id|connect\.sid|auth\.user\.info|"
    r"(?:aes|api|app|application|access|account|auth|client|db|database|[de][en]cryption|fernet|functions|hmac|license|"
    r"mac|master|private|priv|secret|service|shared|signing|ssh|storage|subscription)[-_]?keys?|(?<=\.)(?:access|api|secret)\.key|account\.key\.[\w.]{1,80})"
    r"(?-i:(?![a-z]))"
)
# A name that ends so is that of a fact about a secret.
_FACTS = (
    r"(?![\w-]{0,30}?(?:[-_]|(?-i:(?=[A-Z])))(?:age|alg(?:o(?:rithm)?)?|at|banner|column|count|days|dir|enabled|exists|expir[a-z]*|expires?_?in|"
    r"field|file|format|hint|hours|in|is_set|len|length|limit|max|min|name|path|policy|prefix|required|rotation|sec|seconds|size|"
    r"status|style|ttl|type|until|ur[il]|usage|used|version)(?:[^\w-]|\Z))"
)
_SECRET = f"(?:{_NAMES}){_FACTS}"
# Short words are names of secrets as a whole or at the end of a name only.
_NAME = re.compile(
    rf"{_SECRET}|(?:^|[^a-z]|(?-i:(?=[A-Z])))(?:pass|auth|pin|otp|sas|sig|keypass)$|dsn$|conninfo|"
    r"conn(?:ection)?[-_]?str|(?:database|db|webhook)[-_]?ur[il]$",
    re.IGNORECASE,
)
_COUNT = re.compile("(?:token|key)s?$", re.IGNORECASE)  # a number of this name is an amount or an id, not a secret
_OF_AMOUNT = re.compile(r"(?:token|key)s\W{1,12}\Z", re.IGNORECASE)  # the name of an amount in a text, up to its value
_AMOUNT = re.compile(r"""["'\\\[({]*\d{1,12}["'\\\])}.;:]*(?:</\S*)?""")
# Every repetition is bounded or possessive, so that the time of a search grows with the text's length only. A cut may
# have shortened the text in a secret, so each expression also matches at the end of the text.
_LOGIN = re.compile(r":(?=(//[^\s:/@]{0,200}+:))")  # a URL's password may begin here, also inside another password
_WORD = re.compile(r"\S*+")
_CUT = re.compile(r"(?!\d{1,5}+(?:[^\w%@+~=-]|\Z))\S{1,300}+\Z")  # a password cut by the end of the text, and no port
_USER = re.compile(r"(https?://)[^\s:/@?#]{1,300}+@", re.IGNORECASE)  # a user without a password is a token
_BASIC = re.compile(r"(basic\s{1,3})([a-z0-9+/]{8,1000}+)={0,2}", re.IGNORECASE)
_BEARER = re.compile(r"(bearer\s{1,3})(?=[a-z_.~+/=-]{0,40}\d)[\w.~+/=-]{8,}+", re.IGNORECASE)  # a word has no digit
_PEM = re.compile(r"(PRIVATE KEY(?: BLOCK)?-----|Private-Lines: \d{1,3})[^-]{1,20000}+(?:-|\Z)")
_JWK = re.compile(r"""(\\{0,8}["'](?:d|p|q|dp|dq|qi|k)\\{0,8}["']\s{0,3}:\s{0,3}\\{0,8}["'])[\w-]{10,}+""")
_JWK_MEMBERS = frozenset({"d", "p", "q", "dp", "dq", "qi", "k"})  # of a private or a symmetric key
# A key in a query: letters and digits without a separator, so no name, date or UUID.
_QUERY = re.compile(
    r"([?&](?:key|code|appid)=)(?=[a-z]{0,40}+\d)(?=\d{0,40}+[a-z])[a-z0-9]{20,}+[\w.~%-]*+", re.IGNORECASE
)
# A quoted value of a header ends with the quote, another one with the line.
_HEADER = re.compile(
    r"((?:authorization|cookie)\\{0,4}[\"']?\s{0,3}[=:]\s{0,3})(?:(\\{0,4}[\"'])[^\r\n\"'\\]++|[^\r\n\"'\\][^\r\n]*+)",
    re.IGNORECASE,
)
_FIRST = "(?=[abcdefjlmpstп])"  # the first letters of _NAMES rule out most places at little cost
_FLAG = re.compile(rf"--((?:(?!--)[\w-]){{0,30}}?{_FIRST}{_NAMES}[\w-]{{0,30}}+)(\s{{1,3}})[^\s-]\S*+", re.IGNORECASE)
_SET = re.compile(  # set NAME VALUE: a value of words alone is an English sentence
    rf"\b(set(?:x|env)?\s{{1,3}}[\w.-]{{0,30}}?{_FIRST}{_SECRET}[\w-]{{0,30}}+\s{{1,3}})"
    r"(?=\S{0,100}\d)(?=\S{0,100}[a-z])\S++",
    re.IGNORECASE,
)
_LOGIN_FLAGS = ("-u", "-U", "--user", "--proxy-user")
_NO_LOGIN = r"(?:\d{1,5}|\S{1,100}\.py):\d{1,5}(?!\S)"  # a user and a group, or a line of Python
_LOGIN_FLAG = re.compile(  # of curl
    rf"(?<!\S)((?:-[uU](?!rl|ser)[ =]{{0,3}}|--(?:proxy-)?user[ =]{{1,3}})(?!{_NO_LOGIN}|:/)[^\s:=]{{0,100}}+:)\S++"
)
_ORACLE = re.compile(
    r"(:thin:[\w$#]{1,30}+/)[^\s@]{1,100}+(?=@)|((?<![\w/])[\w$#]{1,30}+/)[^\s/@]{1,100}+(?=@//)", re.IGNORECASE
)
# Passwords of commands, .netrc, .pgpass and YAML.
_PLACED = re.compile(
    r"""(sshpass\s{1,3}-p\s{0,3}|machine\s{1,9}\S{1,100}\s{1,9}login\s{1,9}\S{1,100}\s{1,9}password\s{1,9}|"""
    r"""(?:\b(?:login|mongo[a-z]{0,7}|cqlsh)\b[^\n;|&]{0,200}?\s-p(?!\s{1,3}\d{1,5}(?:\s|\Z))|"""
    r"""(?:\bsqlcmd|\bbcp|\bipmitool|zip)\b[^\n;|&]{0,200}?\s-P|"""
    r"""redis-cli\b[^\n;|&]{0,200}?\s-a|\bldap[a-z]{3,9}\b[^\n;|&]{0,200}?\s-w|"""
    r"""-(?:store|key)pass|-pass(?:in|out)|(?<!\S)--?pass(?:word)?(?!\s{1,3}\d(?!\S))|"""
    r"""\bcurl\b[^\n;|&]{0,200}?\s-b(?=\s{1,3}["']?[^\s=;"']{1,100}+=)|\brequirepass|\bmasterauth)\s{1,3}|"""
    r"""\bcurl\b[^\n;|&]{0,200}?\s(?:-E|--cert)\s{1,3}[^\s:]{1,200}+:|"""
    r"""(?<![\w/])https?\s[^\n;|&]{0,200}?-a\s{1,3}[^\s:]{1,100}+:|--from-literal[= ][\w.-]{1,100}+=|"""
    r"""\bAUTH\s{1,3}(?:[\w.@-]{1,100}\s{1,3})?(?!S?CRAM-|DIGEST-|X?OAUTH)(?=[^\s)]{0,100}\d)(?=[^\s)]{0,100}[A-Za-z])|"""
    r"""\b(?:SETUSER\s{1,3}\S{1,100}\s[^\n]{0,200}?|user\s{1,3}\S{1,100}\s{1,3}on\s{1,3})>(?=\S)|"""
    r"""(?:\b(?:mysqli?|pg)_connect|\bnew\s{1,3}(?:PDO|mysqli))\([^,\n]{1,200},[^,\n]{1,100},\s{0,3}(?=["'])|"""
    r"""\b(?:sqlplus|sqlldr|impdp|expdp)\s[^\n;|&/]{0,100}\w/|"""
    r"""(?:mysql|mariadb|\b7z)[^\n;|&]{0,200}?\s-p(?=\S)|user(?:name)?: {1,3}\S{1,100}\n {0,40}pass: {1,3}|"""
    r"""(?<![^\s"'])[\w.*-]{1,100}+:(?:\d?[56]43[23]|(?<=\*:)\*):[^\s:]{1,63}+:[^\s:]{1,63}+:)"""
    r"""("[^"\n]{1,300}+"|'[^'\n]{1,300}+'|(?:\)*+[^\s)]++)+)"""
)
# Each match has one of these; most texts have none, and `sql` alone would be in many.
_PLACES = (" -p", " -P", " -a ", " -w ", " -b ", " -E ", "--cert ", "machine", "pass: ", "432:", "433:", "*:*:",
           "sqlplus", "sqlldr", "pdp ", "pass ", "-pass", "masterauth", "from-literal", "SETUSER ", " on >",
           "AUTH ", "_connect(", " PDO(", " mysqli(")  # fmt: skip
_PAIR = re.compile(
    rf"""((?:{_FIRST}{_SECRET}[\w-]{{0,30}}+\\{{0,8}}["']?]?"""
    r"""(?:(?:\s{0,3}|[ \t]{4,40})(?:=>|[=:]|%3[ad]|>(?=[^<\s]{1,300}</))|"""
    r"""(?<=["']),\s{0,3}(?=["'][^"'\n]{0,300}["']\s{0,3}[])])(?!["'][a-z_]{1,40}["'\s])|"""
    r"""(?:(?<=["']),?\s{1,40}|\n\s{1,40}|</name>\s{0,40}<)\\{0,8}["']?value\\{0,8}["']?\s{0,3}[=:>])|"""
    r"""(?:(?<![a-z])|(?<=\\[nrt]))(?:pass|pin|otp|sas|sig)(?:\\{0,8}["']\s{0,3}:|\s{0,3}=|%3d)|"""
    r"""(?:(?<![a-z0-9])_|[?&]|(?-i:(?<=[A-Z])_(?=AUTH)))auth\s{0,3}="""
    r"""(?!\s{0,3}["']?(?:true|false|yes|no|on|off|login|plain|none|basic|[01])(?![^\s"'&,;.)}]))|"""
    r"""(?<![a-z])auth\\{0,8}["']\s{0,3}:|(?:(?-i:_PASS)|(?:db|user)_pass):)\s{0,3}|"""
    r"""(?:password|(?-i:SECRET))[\s(]{1,3}(?=[en]?')|"""  # this and the next are SQL
    r"""(?:(?-i:IDENTIFIED)|user\s{1,3}(?!is\s)\S{1,100}\s{1,3}identified)\s{1,3}by\s{1,3}(?=\\{0,8}['"]))"""
    r"""(?:[|>][+-]?\n\s{1,40}[^\n]++|"{3}[^"]{0,5000}+"{3}|[bruen]?'(?:[^'\\]|\\.){0,5000}+(?:'|\Z)|[bru]?"(?:[^"\\]|\\.){0,5000}+(?:"|\Z)|"""
    r"""\\{1,8}["'].{0,5000}?(?:\\{1,8}["']|\Z)|\[[^]]{0,5000}+]?|\{[^}]{0,5000}+}?|"""
    r"""(?:[^\s,;&\\]|\\(?!n[\w.-]{1,60}\s{0,3}(?:=|:\s)))++)""",  # an escaped new line begins another name
    re.IGNORECASE | re.DOTALL,
)
_SIGN = re.compile("""[:='"]|--|%3|</|set|SET""")  # each pair of a name and a value has one of these
# Every name in _SECRET and _PAIR contains one of these words; most texts contain none, and need no search.
_WORDS = ("pass", "pwd", "secret", "token", "auth", "cookie", "credential", "bearer", "jwt", "key", "sess",
          "signature", "sig", "otp", "pin", "sas", "identified", "private-", "kty", "connect.sid")  # fmt: skip
# The forms of tokens: how each begins, and the rest of it, of 20 characters or more (AWS: 16). For searches see TOKENS.
_FORMS = {
    "dl_": r"(?=[a-z\d_-]{0,30}[A-Z])[\w-]{30,}",  # ours, or most of one; an index has no capital letter
    "AKIA": "[A-Z0-9]{16}", "ASIA": "[A-Z0-9]{16}", "LTAI": "[A-Za-z0-9]{20}", "AIza": r"[\w-]{35}",
    "GOCSPX-": r"[\w-]{28}", "ya29.": r"[\w-]{20,}",
    "ghp_": "[A-Za-z0-9]{36}", "gho_": "[A-Za-z0-9]{36}", "ghu_": "[A-Za-z0-9]{36}",
    "ghs_": "[A-Za-z0-9]{36}", "ghr_": "[A-Za-z0-9]{36}", "github_pat_": r"\w{22,}", "glpat-": r"[\w-]{20,}",
    "glrt-": r"(?=[\w-]{0,40}\d)[\w-]{20,}", "whsec_": "[A-Za-z0-9+/=]{24,}", "ATATT3": r"[\w=-]{40,}",
    "sq0": r"(?:atp|csp)-(?=[\w-]{0,40}\d)[\w-]{22,}", "glc_eyJ": "[A-Za-z0-9+/=]{29,}",
    "sntrys_eyJ": r"[\w+/=-]{29,}", "dp.pt.": "[A-Za-z0-9]{40,}", "NRAK-": "[A-Z0-9]{27}",
    "hooks.zapier.com/": r"hooks/catch/\d+/\w{5,}", "ATCTT3": r"[\w=-]{40,}", "SCRAM-SHA-256$": r"\d+:[\w+/=:$]{20,}",
    "re_": r"(?=\w{0,20}\d)[A-Za-z0-9]{8}_[A-Za-z0-9]{24}", "fc-": "[a-f0-9]{32}", "1//0": r"[\w-]{30,}",
    "v1.0-": "[a-f0-9]{24}-[a-f0-9]{100,}", "sb_secret_": r"[\w-]{22,}", "t1.9euelZ": r"[\w.+/=-]{50,}",
    "xkeysib-": "[a-f0-9]{64}-[A-Za-z0-9]{16}", "discord.com/api/webhooks/": r"\d+/[\w-]{20,}",
    "discordapp.com/api/webhooks/": r"\d+/[\w-]{20,}", "webhook.office.com/": r"[\w@/-]{20,}",
    "glptt-": "[0-9a-f]{40}", "xox": r"[abeoprs]-[\w-]{18,}", "xapp-": r"\d-[\w-]{20,}",
    "hooks.slack.com/": r"[\w/+]{20,}", "sk_live_": "[A-Za-z0-9]{20,}", "sk_test_": "[A-Za-z0-9]{20,}",
    "rk_live_": "[A-Za-z0-9]{20,}", "sk-": r"(?=[\w-]{0,40}\d)[\w-]{32,}", "SG.": r"[\w-]{16,}\.[\w-]{16,}",
    "npm_": "[A-Za-z0-9]{36}", "pypi-": r"[\w-]{50,}", "hf_": "[A-Za-z]{34}", "dapi": "[a-f0-9]{32}",
    "dop_v1_": "[a-f0-9]{64}", "hvs.": r"[\w-]{24,}", "shpat_": "[a-fA-F0-9]{32}",
    "glsa_": "[A-Za-z0-9]{32}_[A-Fa-f0-9]{8}",
    "AGE-SECRET-KEY-1": "[A-Z0-9]{58}", "PMAK-": r"[a-f0-9]{24}-[a-f0-9]{34}", "lin_api_": "[A-Za-z0-9]{40}",
    "eyJ": r"[\w-]{10,2000}+\.[\w-]{10,}(?:\.[\w-]*)?", ":AA": r"[\w-]{33}",  # a JWT; the token of a Telegram bot
    "SK": "[a-f0-9]{32}", "hvb.": r"[\w-]{100,}", "dckr_pat_": r"[\w-]{27}", "figd_": r"[\w-]{40}",
    ".atlasv1.": r"[\w=-]{60,}", "gloas-": "[a-f0-9]{64}", "pul-": "[a-f0-9]{40}", "sbp_": "[a-f0-9]{40}",
    "dt0c01.": r"[A-Z0-9]{24}\.[A-Z0-9]{64}", "tskey-": r"[a-z]+-\w+-\w{20,}", "ops_eyJ": "[A-Za-z0-9+/=]{200,}",
    **dict.fromkeys(
        ("doo_v1_", "dor_v1_", "shpss_", "shpca_", "shppa_", "sntryu_", "rubygems_", "bkua_", "sqp_", "squ_", "gldt-",
         "glft-", "glsoat-", "glimt-", "glagent-", "gsk_", "pplx-", "xai-", "ntn_", "pscale_tkn_", "pscale_pw_", "AKCp",
         "r8_", "glcbt-", "tvly-", "tvly-dev-", "jina_", "pcsk_", "nvapi-", "sk_org_", "rnd_", "phx_", "dckr_oat_",
         "ATBB", "secret_", "vercel_blob_rw_", "cfut_", "lin_oauth_", "apify_api_", "PMAT-", "fo1_", "fm2_", "shpua_",
         "wandb_v1_", "csk-", "AQVN", "y0_AgAAAA", "EAAG", "CFPAT-",
         "CLOJARS_", "tfp_", "pnu_", "EZAK", "sha256~", "lsv2_pt_", "lsv2_sk_"),
        r"(?=[a-zA-Z_-]{0,40}\d)[A-Za-z0-9_-]{0,3}[A-Za-z0-9]{20,}",
    ),
}  # fmt: skip
_INNER = {":AA": r"(?<=\d{6})", ".atlasv1.": r"(?<=\w)"}  # forms within a word; each other one begins a word
_FORM = re.compile(
    "|".join(
        [
            f"(?<![A-Za-z0-9])(?:{'|'.join(re.escape(a) + rest for a, rest in _FORMS.items() if a not in _INNER)})",
            *(before + re.escape(begin) + _FORMS[begin] for begin, before in _INNER.items()),
        ]
    )
)
# Airtable, Mailchimp, Mailgun, Azure
_HEX = re.compile(
    r"\b(?:pat[A-Za-z0-9]{14}\.[a-f0-9]{64}|[a-f0-9]{32}-us\d\d?|(?<!-)key-[a-f0-9]{32}|\w{3}\dQ~[\w~.-]{31,34})\b"
)
_RUN = re.compile(r"\S{20}")  # no token is shorter
# For sql/search.sql, so that no search matches a secret: a regular expression of what masking takes for a token.
TOKENS = "|".join(
    ("" if begin in _INNER else "(?<![a-z0-9])") + re.escape(begin.lower())
    for begin in _FORMS
    if begin not in ("dl_", "AKIA", "ASIA")
)
TOKENS = rf"(akia|asia)[a-z0-9]{{16}}|dl_[\w-]{{30}}|({TOKENS})[\w.+/=~:$-]{{20}}"
TOKEN_WORDS = [begin.lower() for begin in _FORMS]
_SCHEME = re.compile(r"(?:bearer|basic|token)\s+(\S+)", re.IGNORECASE)
_USERINFO = re.compile(r"://[^\s:/@]{0,200}+:([^\s@/]{1,300}+)@")
_ESCAPE = re.compile("%[0-9A-F]{2}")
T = TypeVar("T")
_configured: frozenset[str] = frozenset()
_of_job: frozenset[str] = frozenset()
_known: tuple[tuple[str, re.Pattern[str]], ...] = ()
_learned = 0  # how often `_known` has changed
_PLAIN = frozenset({int, float, bool, type(None)})


@overload
def masked(value: str) -> str: ...
@overload
def masked(value: T) -> T: ...
def masked(value: Any) -> Any:
    """A copy of `value` without secrets: of a text, or of a structure of dicts, lists and (named) tuples.

    Any other value comes back unchanged. A text over TEXT_LIMIT is cut in its middle. The secret arguments of a job, a
    dict under the name `args`, are masked everywhere in the dict around them.
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
        if isinstance(value.get("value"), str) and is_secret(value.get("name"), ""):
            value = {**value, "value": MASK}  # an entry of a list of variables or headers
        if "kty" in value:
            value = {**value, **dict.fromkeys(_JWK_MEMBERS & value.keys(), MASK)}
        shown = {
            masked_text(name) if type(name) is str else _masked(name, 0): MASK
            if is_secret(name, item)
            else item
            if type(item) in _PLAIN
            else _masked(item, depth - 1)
            for name, item in value.items()
        }
        own = _known_as(_secrets_in(args, 0)) if isinstance(args := value.get("args"), dict) else ()
        return _without(shown, own) if own else shown
    items = [_masked(item, depth - 1) for item in value]
    for at, item in enumerate(value[:-1]):  # the value behind a flag: ["--password", "x"], ["-u", "name:x"]
        if isinstance(item, str) and isinstance(value[at + 1], str) and item.startswith("-"):
            if is_secret(item.lstrip("-"), ""):
                items[at + 1] = MASK
            elif item in _LOGIN_FLAGS and ":" in value[at + 1] and not re.match(_NO_LOGIN, value[at + 1]):
                items[at + 1] = masked_text(value[at + 1].split(":", 1)[0]) + f":{MASK}"
    return items if isinstance(value, list) else getattr(value, "_make", tuple)(items)


def without_known(value: Any) -> Any:
    """A copy of a progress without the secrets that are known by value; `masked` removes the others when it is shown.

    Lists of jobs show progress without the args that tell a job's own secrets, so these secrets go before it is stored.
    """
    return _without(value, _known)


def _without(value: Any, secrets: Iterable[tuple[str, re.Pattern[str]]]) -> Any:
    if isinstance(value, str):
        for secret, pattern in secrets:
            if secret in value:
                value = pattern.sub(MASK, value)
        return value
    if isinstance(value, dict):
        return {_without(name, secrets): _without(item, secrets) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return getattr(value, "_make", type(value))(_without(item, secrets) for item in value)
    return value


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
    text = _without(text, _known)
    if _RUN.search(text):
        text = _HEX.sub(MASK, _FORM.sub(MASK, text) if any(begin in text for begin in _FORMS) else text)
    if "://" in text:
        text = _USER.sub(rf"\g<1>{MASK}@", _urls_masked(text))
    if _SIGN.search(text):
        text = _named_masked(text)
    if any(part in text for part in _PLACES):
        text = _PLACED.sub(rf"\g<1>{MASK}", text)
    if "-u" in text or "-U" in text:
        text = _LOGIN_FLAG.sub(rf"\g<1>{MASK}", text)
    if " " in text and ("earer " in text or "BEARER " in text):
        text = _BEARER.sub(rf"\g<1>{MASK}", text)
    if "asic " in text or "BASIC " in text:
        text = _BASIC.sub(lambda match: f"{match[1]}{MASK}" if _is_login(match[2]) else match[0], text)
    if "key=" in text or "code=" in text or "appid=" in text:
        text = _QUERY.sub(rf"\g<1>{MASK}", text)
    if "@//" in text or ":thin:" in text:
        text = _ORACLE.sub(rf"\g<1>\g<2>{MASK}", text)
    return text


def _is_login(text: str) -> bool:
    """Whether a text is the base64 of NAME:PASSWORD."""
    with suppress(ValueError):
        return ":" in b64decode(text + "==").decode()
    return False


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
    if "PRIVATE KEY" in text or "Private-Lines" in text:
        text = _PEM.sub(rf"\g<1>{MASK}", text)
    text = _PAIR.sub(_pair_masked, _HEADER.sub(rf"\g<1>\g<2>{MASK}", text))
    if "kty" in text:
        text = _JWK.sub(rf"\g<1>{MASK}", text)
    if "set" in text or "SET" in text:
        text = _SET.sub(rf"\g<1>{MASK}", text)
    if "--" not in text:
        return text
    return _FLAG.sub(lambda match: f"--{match[1]}{match[2]}{MASK}" if _has_secret_name(match[1]) else match[0], text)


def _pair_masked(pair: re.Match[str]) -> str:
    name, value = pair[1], pair[0][len(pair[1]) :]
    is_amount = _AMOUNT.fullmatch(value) and _OF_AMOUNT.search(name)
    return pair[0] if is_amount else name + MASK


def clipped(text: str, limit: int) -> str:
    """The first and the last half of `limit` characters, without the two words at the cut."""
    head, tail = text[: limit // 2], text[-limit // 2 :]
    head, tail = head.rsplit(None, 1)[0], tail.split(None, 1)[-1]
    return f"{head}\n[... {len(text) - len(head) - len(tail)} characters ...]\n{tail}"


def is_secret(name: object, value: object) -> bool:
    """True when a value of this name is to be masked."""
    if not isinstance(name, str) or value is None or isinstance(value, bool) or not _has_secret_name(name[:200]):
        return False
    return not (isinstance(value, int | float) and _COUNT.search(name))


@lru_cache(maxsize=2_048)
def _has_secret_name(name: str) -> bool:
    return _NAME.search(name) is not None


def learn_configured(settings: object) -> None:
    """From now on mask these settings' SecretStr values and the environment's secrets wherever they occur."""
    global _configured
    given = [*_of_settings(settings).values()]
    for name, value in os.environ.items():
        is_path = value.startswith("/")  # CREDENTIALS_DIRECTORY, TOKEN_FILE
        if not is_path and (is_secret(name, value) or name.startswith((WEBHOOK_SECRETS, SOURCES, SECRETS))):
            given.append(value)
    for cluster in getattr(settings, "dl_engines", {}).values():
        given += _secrets_in(cluster.secrets, 0)
    _configured = frozenset(secret for text in given for secret in _passwords(text))
    _remember()


def too_short(settings: object) -> list[str]:
    """The settings whose secret is too short to be masked by its value."""
    given = _of_settings(settings).items()
    return [name for name, text in given if any(0 < len(secret) < SHORTEST for secret in _passwords(text))]


def _of_settings(settings: object) -> dict[str, str]:
    given = vars(settings).items()
    return {name: value.get_secret_value() for name, value in given if hasattr(value, "get_secret_value")}


def learn_job(args: Mapping[str, Any]) -> None:
    """Mask the secret arguments of a starting job, and the passwords in its URLs, until the next call."""
    global _of_job
    before, _of_job = _of_job, frozenset(_secrets_in(args, 0))
    if _of_job != before:
        _remember()


def learn_secret(text: str) -> None:
    """From now on mask this text, and a password in it, wherever they occur."""
    global _configured
    if not (new := frozenset(_passwords(text))) <= _configured:
        _configured |= new
        _remember()


def _remember() -> None:
    global _known, _learned
    _known = _known_as(_configured | _of_job)
    _learned += 1
    _masked_again.cache_clear()


def _known_as(secrets: Iterable[str]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    """The forms of these secrets, each with its pattern as a whole word; the longest first, for one may be part of
    another. Escapes of URLs, JSON and terminals are no part of a word."""
    forms = sorted({form for secret in secrets for form in _forms(secret)}, key=len, reverse=True)
    begin = r"(?:(?<![^\W_])|(?<=%[0-9A-Fa-f]{2})|(?<=\\[a-z])|(?<=[0-9;\[][0-9]m))"
    ends = {True: (begin, r"(?![^\W_])"), False: ("", "")}
    return tuple(
        (form, re.compile(ends[form[0].isalnum()][0] + re.escape(form) + ends[form[-1].isalnum()][1])) for form in forms
    )


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
        if is_named or is_within:
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
    if "\n" in secret:  # the log of a run is masked line by line
        forms |= set(map(str.strip, secret.splitlines()[:LINES_MOST]))
    return {form for form in forms if len(form) >= SHORTEST}
