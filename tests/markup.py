"""Contents of HTML, for tests."""

import html.parser


HOSTILE = "</pre><script>alert('x')</script><img src=\"http://evil.test/a.png\" onerror='alert(1)'>&amp;\x00\x1b[31m"
VOID = {"meta", "link", "img", "source", "br", "wbr"}


class Checker(html.parser.HTMLParser):
    """A parser that collects a page's contents, and raises if elements are not nested correctly."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(text: str) -> Checker:
    """Return the contents of HTML; fails if elements are not nested correctly."""
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    return checker
