"""The help of every command: whole sentences, an example that can be typed; and the answers to mistyped words."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from dataloader.cli import main
from dataloader.cli.base import WRONG_MOST


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with the words that name it."""
    yield path, command
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            found = command.get_command(ctx, name)
            assert found
            yield from commands(found, (*path, name))


ALL = dict(commands(main))


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_no_help_is_cut_and_each_has_an_example(path: tuple[str, ...]) -> None:
    text = CliRunner().invoke(main, [*path, "--help"], terminal_width=80).output
    assert "..." not in text.replace("]...", "")  # click's mark of an argument that may come again
    assert "\nExample" in text
    examples = getattr(ALL[path], "examples", ())
    assert all(f"  {line}\n" in text for line in examples)


EXAMPLES = [(path, line) for path, command in ALL.items() for line in getattr(command, "examples", ())]


@pytest.mark.parametrize(("path", "line"), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_each_example_is_one_of_its_command_and_is_understood(path: tuple[str, ...], line: str) -> None:
    words = shlex.split(line.replace('"$(', "").replace(')"', ""))
    words = words[words.index("dataloader") + 1 :]
    assert words[: len(path)] == list(path)
    parse(main, words)


def parse(command: click.Command, words: list[str], parent: click.Context | None = None) -> None:
    """Let click parse the words, through all groups, without a run."""
    ctx = command.make_context(command.name or "", words, parent)
    if isinstance(command, click.Group):
        rest = [*ctx._protected_args, *ctx.args]
        name, found, args = command.resolve_command(ctx, rest)
        assert name
        assert found
        parse(found, args, ctx)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("stauts", "status"),
        ("trigerr noop", "trigger"),
        ("schedule lst", "list"),
        ("errors nots", "note"),
        ("backfill lst", "list"),
        ("limit lits", "list"),
        ("jobs --statsu dead", "--status"),
        ("jobs --status quued", "queued"),
        ("trigger noop --agrs {}", "--args"),
        ("completion bsh", "bash"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_right_one(words: str, meant: str) -> None:
    result = CliRunner().invoke(main, words.split())
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert "id you mean" in last
    assert repr(meant) in last.partition("id you mean")[2]


def test_a_word_like_no_other_gets_no_suggestion() -> None:
    result = CliRunner().invoke(main, ["xyzzy"])
    assert result.exit_code == 2
    assert "Did you mean" not in result.stderr


@pytest.mark.parametrize("words", [["password=hunter2-canary"], ["jobs", "--status", "api_key=hunter2-canary"]])
def test_an_answer_shows_no_secret_and_is_bounded(words: list[str]) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "hunter2-canary" not in result.stderr
    long = CliRunner().invoke(main, [*words[:-1], words[-1] + " x" * 100_000])
    assert long.exit_code == 2
    assert len(long.stderr) < WRONG_MOST + 500
