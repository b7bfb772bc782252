"""The colours of pictures, for light and for dark screens."""

from typing import NamedTuple


class Theme(NamedTuple):
    """Colours of a picture, with those of its lines in order."""

    back: str
    text: str
    faint: str
    grid: str
    alarm: str
    lines: tuple[str, ...]


# The colours of Okabe and Ito (2008), which people with any colour vision can distinguish; lighter ones on dark.
LIGHT = Theme(
    "#ffffff",
    "#1f2328",
    "#656d76",
    "#e6e8eb",
    "#c0392b",
    ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1f2328"),
)
DARK = Theme(
    "#161b22",
    "#e6edf3",
    "#9198a1",
    "#2a313a",
    "#ff7b72",
    ("#56b4e9", "#e69f00", "#2fc59a", "#e29bc4", "#f0e442", "#d55e00", "#e6edf3"),
)
