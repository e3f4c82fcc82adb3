"""Pages, read again: HTML, and what is fenced in Markdown."""

import re
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Page(HTMLParser):
    """A parser that collects table cells, text, addresses and pictures.

    It requires every tag to be closed in order.
    """

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.rows = []
        self.addresses = []
        self.pictures = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
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

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def markdown_pages():
    """Return the .md files at the top and in docs/."""
    docs = [path for path in sorted(ROOT.glob("docs/**/*.md")) if "_build" not in path.parts]
    return [*sorted(ROOT.glob("*.md")), *docs]


def fenced(path):
    """(language, text) of the fenced blocks of a page in Markdown."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
