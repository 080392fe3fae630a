"""The documentation site: it can be built, every page is in it, every link leads somewhere, and a page loads
nothing from elsewhere.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONFIG = ROOT / "zensical.toml"
LINK = re.compile(r"\]\(([^)\s]+)\)")
LOADS = {"script": "src", "img": "src", "source": "src", "iframe": "src", "link": "href"}
"""What a browser fetches without being asked. A canonical or neighboring page is a link as any other."""
FOR_READERS = {"canonical", "prev", "next", "alternate"}
LEFTOVER = re.compile(r"^\s*(?:\* |\| |#{1,6} |```|\d+\. )", re.MULTILINE)
"""Markdown that GitHub understands and the site has left as it was."""

pytestmark = pytest.mark.skipif(
    find_spec("zensical") is None,
    reason="NOT RUN: the documentation site; zensical is not installed (extra docs)",
)


class Page(HTMLParser):
    """What a page of the site refers to, what can be referred to in it, and its paragraphs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.paragraphs: list[str] = []
        self._is_in_paragraph = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collects it."""
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        address = found.get(LOADS.get(tag, ""), "")
        if address and not FOR_READERS & set(found.get("rel", "").split()):
            self.loads.append(address)
        if tag == "p":
            self._is_in_paragraph = True
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        """A paragraph's."""
        self._is_in_paragraph &= tag != "p"

    def handle_data(self, data: str) -> None:
        """A paragraph's."""
        if self._is_in_paragraph:
            self.paragraphs[-1] += data


class Site:
    """A folder with the built site."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages = {
            path.relative_to(folder).as_posix(): Page(path.read_text(encoding="utf-8"))
            for path in sorted(folder.rglob("*.html"))
            if path.name != "404.html"  # its links begin at the site's root, wherever that will be
        }

    def broken(self, page: str, address: str) -> str | None:
        """What is wrong with an address on a page; None: nothing, or it leads out of the site."""
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            return None
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(parts.path)))
        if not parts.path:
            path = page
        elif (self.folder / path).is_dir():
            path = posixpath.normpath(posixpath.join(path, "index.html"))
        if path.startswith("..") or not (self.folder / path).is_file():
            return f"{page}: {address}: there is no such page"
        is_anchor_there = not parts.fragment or path not in self.pages
        if is_anchor_there or unquote(parts.fragment) in self.pages[path].anchors:
            return None
        return f"{page}: {address}: the page has no such anchor"

    def all_broken(self) -> Iterator[str]:
        """Of all pages."""
        for name, page in self.pages.items():
            for address in (*page.links, *page.loads):
                if (what := self.broken(name, address)) is not None:
                    yield what


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Builds the site whose sources and configuration are in the folder."""
    command = [
        sys.executable,
        "-m",
        "zensical",
        "build",
        "--strict",
        "--config-file",
        str(folder / CONFIG.name),
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def said(result: subprocess.CompletedProcess[str]) -> str:
    """What the build printed, without colors."""
    return re.sub(r"\x1b\[[0-9;]*m", "", result.stdout + result.stderr)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Built as `make docs` does, in a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS, folder / "docs")
    shutil.copy(CONFIG, folder)
    result = build(folder)
    assert result.returncode == 0, said(result)
    return Site(folder / "build" / "site")


def test_every_page_is_in_the_navigation_once_and_in_the_site(site: Site) -> None:
    named = re.findall(r'"([^"]+\.md)"', CONFIG.read_text(encoding="utf-8"))
    assert sorted(named) == sorted(path.name for path in DOCS.glob("*.md"))
    assert set(site.pages) == {
        "index.html" if name == "index.md" else f"{name.removesuffix('.md')}/index.html" for name in named
    }


def test_every_link_and_picture_is_there(site: Site) -> None:
    assert sum(len(page.links) for page in site.pages.values()) > 1000
    assert sum(address.endswith(".png") for page in site.pages.values() for address in page.loads) > 3
    assert not list(site.all_broken())


def test_links_into_the_pages_from_outside_have_their_anchors(site: Site) -> None:
    links = [
        (page.name, address)
        for page in ROOT.glob("*.md")
        for address in LINK.findall(page.read_text(encoding="utf-8"))
        if address.startswith("docs/") and urlsplit(address).path.endswith(".md")
    ]
    assert len(links) > 20
    for name, address in links:
        parts = urlsplit(address)
        page = parts.path.removeprefix("docs/").removesuffix(".md").removesuffix("index")
        anchor = f"#{parts.fragment}" if parts.fragment else ""
        assert site.broken("index.html", f"./{page}{anchor}") is None, f"{name} links to {address}"


def test_a_page_loads_nothing_from_elsewhere(site: Site) -> None:
    for name, page in site.pages.items():
        assert not [address for address in page.loads if urlsplit(address).netloc], name
    styles = "".join(path.read_text(encoding="utf-8") for path in site.folder.rglob("*.css"))
    assert styles
    assert not re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//", styles)


def test_all_markdown_is_understood(site: Site) -> None:
    for name, page in site.pages.items():
        assert not [text for text in page.paragraphs if LEFTOVER.search(text)], name


def test_the_checks_see_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "index.html").write_text(
        '<h2 id="here">a</h2><p>text\n* item</p>', encoding="utf-8"
    )
    (tmp_path / "index.html").write_text(
        '<a href="there/#here"></a><a href="there/#gone"></a><a href="gone/"></a><a href="#gone"></a>'
        '<img src="gone.png"><a href="https://example.com/gone"></a>'
        '<script src="https://example.com/x.js"></script><a href="../gone/"></a>',
        encoding="utf-8",
    )
    site = Site(tmp_path)
    assert [line.split(": ")[1] for line in site.all_broken()] == [
        "there/#gone",
        "gone/",
        "#gone",
        "../gone/",
        "gone.png",
    ]
    assert [urlsplit(address).netloc for address in site.pages["index.html"].loads] == ["", "example.com"]
    assert LEFTOVER.search(site.pages["there/index.html"].paragraphs[0])


def test_a_broken_link_ends_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    shutil.copy(CONFIG, tmp_path)
    (tmp_path / "docs" / "index.md").write_text("# Page\n\n[gone](#nowhere)\n", encoding="utf-8")
    result = build(tmp_path)
    assert result.returncode != 0
    assert "anchor does not exist" in said(result)
