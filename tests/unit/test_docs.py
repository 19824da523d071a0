"""The documents: an index names each page, every link has a target, no page grows without a bound; the site."""

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dataloader

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
EXAMPLES = sorted((ROOT / "examples").glob("*/*.md"))


def text_of(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    titles = re.findall(r"^#+ (.*)$", text_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *DECISIONS, *EXAMPLES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not link.startswith("http") and not (target.exists() and (not anchor or anchor in anchors(target))):
            wrong.append(link)
    assert not wrong


def test_an_example_and_the_page_about_it_show_the_same_output() -> None:
    example, page = (ROOT / name for name in ("examples/orders/README.md", "docs/ordered.md"))
    (shown,) = re.findall(r"^```text\n(.*?)^```", example.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert shown in page.read_text()


def test_the_documents_stay_short_and_the_readme_leads_to_the_index() -> None:
    """All pages together, and the glossary, which has a line for each word."""
    readme = (ROOT / "README.md").read_text()
    assert "(docs/index.md)" in readme
    assert len(readme.splitlines()) <= 130
    texts = [page.read_text() for page in [*PAGES, *DECISIONS, ROOT / "CHANGELOG.md"]]
    assert sum(len(text.split()) for text in texts) <= 50_000
    assert len(re.findall(r"^- ", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)) <= 40


@pytest.mark.parametrize(("index", "pages"), [("index.md", PAGES[1:]), ("decisions/README.md", DECISIONS)])
def test_an_index_names_every_page(index: str, pages: list[Path]) -> None:
    named = set(re.findall(r"\]\((\S+)\)", (ROOT / "docs" / index).read_text()))
    assert {page.name for page in pages} - named == {Path(index).name}


# On the public index `dataloader` is another project, so no text may install it. `pip uninstall dataloader` is fine.
OTHERS_NAME = re.compile(
    r"(?:pipx?|pip3|poetry|uvx?(?: pip| tool)?) (?:install|add|run)\b[^\n|&;]*[\s'\"]dataloader(?=[\s'\"\[=<>~!),`]|$)"
    r"|(?<![\w./-])dataloader(?:\[(?:embedded|otel|browser|test)\b|\s*[=~>]=\s*\d)|version\([\"']dataloader[\"']\)",
    re.MULTILINE,
)


def published_texts() -> list[Path]:
    """Every text file of the checkout that git tracks, except this one."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    names = listed.stdout.decode().split("\0") if listed.returncode == 0 else []
    files = [ROOT / name for name in names if name] or [path for path in ROOT.rglob("*") if ".venv" not in path.parts]
    kinds = {".md", ".py", ".txt", ".cfg", ".toml", ".conf", ".json", ".html", ".example", ""}
    return [path for path in files if path.suffix in kinds and path.is_file() and path != Path(__file__)]


def test_no_text_installs_the_other_project_of_our_commands_name() -> None:
    texts = published_texts()
    assert {"README.md", "setup.cfg", "Dockerfile", "run", "embedded.py", "traces.md"} <= {path.name for path in texts}
    found = [
        f"{path.relative_to(ROOT)}: {match[0].strip()}"
        for path in texts
        for match in OTHERS_NAME.finditer(path.read_text("utf-8", "replace"))
    ]
    assert not found


def test_the_distribution_says_whose_it_is() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["metadata"]["name"] == "dataloader-farm"
    assert setup["metadata"]["author"]
    assert dataloader.version() == setup["metadata"]["version"], "install this checkout: pip install -e '.[test]'"
    assert (ROOT / "LICENSE").read_text().startswith(f"{setup['metadata']['license']} License")


def test_the_architecture_names_files_that_exist() -> None:
    named = re.findall(r"`((?:[\w*]+/)+[\w.*]*)`", (ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 30
    outside = ("dataloader/", "sql/", "tests/", "docs/", "deploy/", "tools/")
    paths = [name if name.startswith(outside) else f"dataloader/{name}" for name in named]
    assert [path for path in paths if not list(ROOT.glob(path.rstrip("/")))] == []


@pytest.mark.long
def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    """mkdocs fails at a page that is left out, and at a link or an anchor that leads nowhere."""
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    env = os.environ | {"PYTHONPATH": str(ROOT / "tools"), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    built = {page.relative_to(tmp_path).parts[0] for page in tmp_path.glob("*/index.html")}
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"} <= built
    pages = [page for page in tmp_path.rglob("*.html") if 'src="http' in page.read_text("utf-8")]
    assert pages == [], "no page asks another server"
