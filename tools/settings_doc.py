"""docs/settings.md and .env.example, made from the settings' own declarations: `python tools/settings_doc.py`.

For developers: a test compares the files with what is made here.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from dataloader.config import Settings

# The first setting of each group, and the group's title.
GROUPS = {
    "app_host": "The service",
    "log_path": "Logs",
    "pg_host": "Databases",
    "workers_json": "Workers and jobs",
    "dl_pipelines": "Pipelines and files",
    "ollama_api_url": "Language models",
    "dl_url": "The command line and the Python client",
}

MARKDOWN_HEAD = """\
# Settings

Read at the start (by `workers` also on SIGHUP) from the environment and from a file `.env` in the working folder; the
environment wins, an empty variable counts as unset. A wrong value stops the start with a line that names the variable
and what would be right. `dataloader check` shows the settings in effect, without secrets, and tries what they lead to.

Made from `dataloader/config.py` by `python tools/settings_doc.py`.
"""
ENV_HEAD = """\
# Copy to .env, remove the # before the settings you change. The values are the defaults; docs/settings.md says more.
# Made from dataloader/config.py by `python tools/settings_doc.py`.
"""


def markdown() -> str:
    """docs/settings.md: a list per group."""
    lines = [MARKDOWN_HEAD]
    for name, schema in _settings():
        if name in GROUPS:
            lines += [] if name == next(iter(GROUPS)) else [""]
            lines += [f"## {GROUPS[name]}", ""]
        default = _default(schema)
        facts = [fact for fact in (_type(schema), f"`{default}`" if default else "") if fact not in ("", "text")]
        shown = f" ({'; '.join(facts)})" if facts else ""
        lines.append(f"- `{name.upper()}`{shown}: {schema['description']}")
    return "\n".join(lines) + "\n"


def dotenv() -> str:
    """.env.example: every setting as a comment with its default."""
    lines = [ENV_HEAD.rstrip()]
    for name, schema in _settings():
        if name in GROUPS:
            lines += ["", f"# --- {GROUPS[name]} ---"]
        default = _default(schema)
        quote = "'" if '"' in default else '"'
        shown = f"{quote}{default}{quote}" if " " in default else default
        lines += ["", f"# {schema['description'].replace('`', '')}", f"#{name.upper()}={shown}"]
    return "\n".join(lines) + "\n"


def _settings() -> Iterator[tuple[str, dict[str, Any]]]:
    said = sentences()
    for name, schema in Settings.model_json_schema()["properties"].items():
        yield name, schema | {"description": said[name]}


def sentences() -> dict[str, str]:
    """The sentence below each setting in the source: reading them at each start would cost 20 ms."""
    (declared,) = ast.parse(inspect.getsource(Settings)).body
    assert isinstance(declared, ast.ClassDef)
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(text.value).split())
        for field, text in pairwise(declared.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _default(schema: dict[str, Any]) -> str:
    default = schema.get("default")
    if default is None or default == []:
        return ""
    return default if isinstance(default, str) else json.dumps(default)


def _type(schema: dict[str, Any]) -> str:
    """The kind of value that a person writes, with its bounds."""
    schema = next((part for part in schema.get("anyOf", []) if part["type"] != "null"), schema)
    if schema["type"] in ("integer", "number"):
        return ("integer" if schema["type"] == "integer" else "number") + _bounds(schema)
    if schema.get("items") == {"type": "string"}:
        return "text, with commas"
    named = {"path": "folder", "password": "text, secret"}.get(schema.get("format", ""))
    return named or {"boolean": "boolean", "array": "JSON", "object": "JSON"}.get(schema["type"], "text")


def _bounds(schema: dict[str, Any]) -> str:
    above, least, most = (schema.get(key) for key in ("exclusiveMinimum", "minimum", "maximum"))
    if above is not None:
        return f" above {above:g}, up to {most:g}"
    return f", {least} to {most}" if most is not None else f", {least} or more"


def main() -> None:
    """Write both files into the project's folder, the working folder."""
    Path("docs/settings.md").write_text(markdown(), "utf-8")
    Path(".env.example").write_text(dotenv(), "utf-8")


if __name__ == "__main__":
    main()
