"""A page taken apart by the standard library's parser, which forgives as browsers do."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "br"}
# Elements whose end tags HTML lets pages leave out, and what ends them.
CLOSED_BY = {
    "th": {"th", "td", "tr", "thead", "tbody"},
    "td": {"th", "td", "tr", "tbody"},
    "tr": {"tr", "tbody"},
}


@dataclass
class Element:
    tag: str
    attributes: dict
    children: list = field(default_factory=list)
    texts: list = field(default_factory=list)

    def all(self, *tags):
        for child in self.children:
            if not tags or child.tag in tags:
                yield child
            yield from child.all(*tags)

    @property
    def text(self):
        """All text in it, in order, without the space around it."""
        parts = [part if isinstance(part, str) else part.text for part in self.texts]
        return " ".join(" ".join(parts).split())


class _Parser(HTMLParser):
    def __init__(self):
        super().__init__()
        self.root = Element("", {})
        self.open = [self.root]

    def handle_starttag(self, tag, attrs):
        while tag in CLOSED_BY.get(self.open[-1].tag, ()):
            self.open.pop()
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        self.open[-1].texts.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag in [element.tag for element in self.open]:
            while self.open.pop().tag != tag:
                pass

    def handle_data(self, data):
        self.open[-1].texts.append(data)


def parse(page):
    parser = _Parser()
    parser.feed(page)
    parser.close()
    return parser.root


def rows_of(table):
    """The rows of a table as text, headings first."""
    return [[cell.text for cell in row.all("th", "td")] for row in table.all("tr")]
