"""The page with the pictures of all methods that change images, which stand on the methods' cards."""

import re
from pathlib import Path


__all__ = ["pictures_page"]

CARDS = Path(__file__).parents[1] / "algorithms"
CARD = re.compile(r"# (?P<title>.*?)\n\n(?P<text>.*?)\n\n!\[(?P<caption>.*?)\]\(\.\./(?P<picture>images/.*?)\)", re.S)
HEAD = """# What methods do to images

The photographs come with scikit-learn. [gallery.ipynb](notebooks/gallery.ipynb) is a notebook that applies
the methods, for other settings and images.
"""


def pictures_page() -> str:
    """Return the page: of each card with a picture the title, the first paragraph and the picture with its caption."""
    parts = [HEAD]
    for card in sorted(CARDS.glob("*.md")):
        if found := CARD.match(card.read_text()):
            title, text, caption, picture = found.groups()
            link = f"[Settings, and when to use it](algorithms/{card.name})."
            words = " ".join(caption.split())
            parts.append(f"## {title}\n\n{text} {link}\n\n![{words}]({picture})\n\n<small>{words}.</small>\n")
    return "\n".join(parts)
