"""Pages, read again: HTML, and what is fenced in Markdown."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path


class Page(HTMLParser):
    """A parser that collects table cells, text, addresses and pictures.

    It requires every tag to be closed in order.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.addresses: list[str | None] = []
        self.pictures: list[str | None] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [
            v for key, v in attrs if key in ("src", "href") and not (v or "").startswith("data:")
        ]
        if tag == "img":
            self.pictures.append(dict(attrs)["src"])
        if tag not in ("img", "meta", "link", "br"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def fenced(path: Path) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks of a page in Markdown."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
