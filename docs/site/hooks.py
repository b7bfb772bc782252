"""Hooks of MkDocs: pages from files outside docs/, generated pages, and links that hold on the site.

The documents are written for a reader of the repository: links lead to its files, and are often named after them. On
the site each of those files is a page, so that the site is complete in itself, and such a link is named after the
heading to which it leads.
"""

import logging
import posixpath
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from docstring_coverage import coverage
from markdown.extensions.toc import slugify
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pictures import pictures_page
from reference import linked, pages as reference_pages, pages_of_names


LOG = logging.getLogger("mkdocs.hooks")
ROOT = Path(__file__).parents[2]
# Documents outside docs/, by their pages.
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
}
BOOSTS = {
    **dict.fromkeys(("pictures", "features", "decisions", "changelog", "matrix", "quality"), 1),
    "algorithms/training_metrics": 1,
    "coming_from": 2,
    "algorithms/": 3,
    "gallery/": 1,
    "": 5,
}
"""What a match in a page counts in the search, by the first of these with which its path begins: less for pages that
mention many things, and for those of one program or method."""
LINK = re.compile(r"(\]\()([^)\s]+)")
NAMED_AFTER_FILE = re.compile(r"\[[\w/]+\.md\](?=\(([\w/.]+\.md)(?:#([\w-]+))?\))")
PICTURE = re.compile(r'<img [^>]*?src="([^":]+\.svg)"[^>]*>')
FENCE = re.compile(r"^( *)```.*?^\1```$", re.M | re.S)
METHOD = re.compile(r'(<h2 id="[\w.]+\.(\w+\.)\w+" class="doc doc-heading">\s*<span class="[^"]*doc-function-name">)')
LANGUAGES = {".py": "python", ".sh": "sh"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation: the methods by their groups, and the modules of the API."""
    text = (ROOT / "docs" / "algorithms.md").read_text()
    for group in re.split(r"^## ", text, flags=re.M)[1:]:
        cards = re.findall(r"^\| \[.*?\]\((algorithms/\w+\.md)\)", group, re.M)
        if cards:
            _section(config, "Methods").append({group.partition("\n")[0]: cards})
    _section(config, "API").extend({title: path} for path, (title, _) in reference_pages().items())
    return config


def on_pre_build(*, config: MkDocsConfig) -> None:
    """Refuse public names whose docstrings lack arguments or errors, and too few examples."""
    del config
    if not find_spec("ruff"):
        raise PluginError("the reference needs ruff, which wraps signatures: pip install -e '.[docs]'")
    found = coverage()
    if found.faults:
        raise PluginError("\n".join(["docstrings:", *found.faults]))
    LOG.info(found)


def _section(config: MkDocsConfig, title: str) -> list:
    (section,) = [entry[title] for entry in config.nav or () if title in entry]
    return section


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the documents outside docs/, the sources that documents link to, and the reference."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    generated = {"pictures.md": pictures_page(), **{page: text for page, (_, text) in reference_pages().items()}}
    for page, text in generated.items():
        files.append(File.generated(config, page, content=text))
    for page, text in pages_of_names().items():
        file = File.generated(config, page, content=text)
        file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    for file in list(files.documentation_pages()):
        for link in _links(file.content_string):
            path = ROOT / (target := _target(link, file.src_uri))
            if path.is_file() and path.suffix in LANGUAGES and not files.get_file_from_path(_page_of(target)):
                source = File.generated(config, _page_of(target), content=_source(path))
                source.inclusion = InclusionLevel.NOT_IN_NAV
                files.append(source)
    return files


def _source(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    front = f"---\ntitle: {name}\nsearch: {{exclude: true}}\n---\n\n# {name}\n"
    return f"{front}\n````{LANGUAGES[path.suffix]}\n{path.read_text()}````\n"


def _links(text: str) -> list[str]:
    return [link for _, link in LINK.findall(FENCE.sub("", text)) if "://" not in link and not link.startswith("#")]


def _target(link: str, page: str) -> str:
    """Return the path in the repository to which a link of a page leads."""
    written_in = {page: source for source, page in OUTSIDE.items()}.get(page, f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(written_in), link.partition("#")[0]))


def _page_of(path: str) -> str:
    """Return the page or the file of the site for a path in the repository."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    is_page = path.startswith("docs/") and posixpath.splitext(path)[1] not in LANGUAGES
    return path.removeprefix("docs/") if is_page else f"source/{path}.md"


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository into links to pages, and drop the marks of code blocks."""
    uri = page.file.src_uri

    def moved(match: re.Match[str]) -> str:
        link = match[2]
        if "://" in link or link.startswith("#"):
            return match[0]
        _, mark, anchor = link.partition("#")
        return match[1] + posixpath.relpath(_page_of(_target(link, uri)), posixpath.dirname(uri) or ".") + mark + anchor

    if uri.startswith(("reference/", "source/")):
        return markdown
    boost = next(number for beginning, number in BOOSTS.items() if uri.startswith(beginning))
    page.meta.setdefault("search", {"boost": boost})
    markdown = _outside_code(markdown, lambda text: NAMED_AFTER_FILE.sub(lambda one: _named(one, uri), text))
    if page.parent is None:
        page.meta.setdefault("hide", ["navigation"])  # a tab of one page
    return _outside_code(markdown, lambda text: _names_linked(LINK.sub(moved, text)))


def _named(link: re.Match[str], page: str) -> str:
    """Return the name of a link: the heading to which it leads, without what follows a colon or is in parentheses."""
    path = ROOT / _target(link[1], page)
    headings = re.findall(r"^#+ (.*)", path.read_text() if path.is_file() else "", re.M)
    found = next((name for name in headings if link[2] in (None, slugify(name, "-"))), None)
    return link[0] if found is None else "[" + re.split(r": | \(", found)[0] + "]"


def _names_linked(text: str) -> str:
    """Link the names of the package to the reference, except in headings."""
    return "\n".join(line if line.startswith("#") else linked(line, has_short_names=False) for line in text.split("\n"))


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Change a text except in its code blocks; of `sh run` only the language remains."""
    result, end = [], 0
    for match in FENCE.finditer(markdown):
        result += [change(markdown[end : match.start()]), re.sub(r"\A( *```\w+) .*", r"\1", match[0])]
        end = match.end()
    return "".join([*result, change(markdown[end:])])


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put drawn pictures into the page itself, and the name of the class into the headings of its methods.

    So the text of pictures can be selected, and they follow the theme of the page; the search finds `State.create`.
    """

    def placed(match: re.Match[str]) -> str:
        path = ROOT / "docs" / posixpath.dirname(page.file.src_uri) / match[1]
        drawn = path.read_text() if path.is_file() else ""
        return drawn if 'class="drawn' in drawn else match[0]

    return METHOD.sub(r"\1\2", PICTURE.sub(placed, html))


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Refuse scripts, styles, fonts and pictures of other hosts."""
    if found := re.findall(r"<(?:script|img|link)\b[^>]*?(?:src|href)=\"?https?:[^\" >]*", output):
        raise PluginError(f"{page.file.src_uri}: the page loads files from other hosts: {', '.join(found)}")
    return output
