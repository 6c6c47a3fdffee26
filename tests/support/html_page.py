"""A parsed HTML page."""

from html.parser import HTMLParser
from pathlib import Path


class Page(HTMLParser):
    """A parsed page: its elements, and its text by section."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, str] = {"": ""}
        self.section = ""
        self.hidden = 0
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.hidden += tag in ("script", "style")
        if tag == "section":
            self.section = dict(attrs)["id"] or ""
            self.sections[self.section] = ""

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in ("script", "style")
        if tag == "section":
            self.section = ""

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.sections[self.section] += f"{data} "

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]
