"""Reading a report page back, for its tests."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Elements, texts and tables of a page."""

    VOID = frozenset({"meta", "img", "br", "link", "input", "hr"})

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self.scripts: list[str] = []
        self._open: list[str] = []
        self._table: str | None = None
        self.feed(html)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.elements.append((tag, given))
        if given.get("id"):
            self.ids.append(given["id"])
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "script":
            self.scripts.append("")
        if tag == "table":
            self._table = given["id"]
            self.tables[self._table] = []
        elif tag == "tr" and self._table is not None:
            self.tables[self._table].append([])
        elif tag in {"td", "th"} and self._table is not None:
            self.tables[self._table][-1].append("")
        elif tag == "small" and self._table is not None:
            self.tables[self._table][-1][-1] += " "

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag in self.VOID:
            return
        assert self._open, tag
        assert self._open.pop() == tag, tag
        if tag == "table":
            self._table = None

    def handle_data(self, data):
        if "script" in self._open:
            self.scripts[-1] += data
            return
        if "style" in self._open:
            return
        self.text += data
        if self._table is not None and self._open[-1] in {"td", "th", "button", "small", "code"}:
            rows = self.tables[self._table]
            if rows and rows[-1]:
                rows[-1][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]
