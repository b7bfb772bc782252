"""The width of a hidden layer, from a method's settings."""

from typing import Any

from purecompose._support.checks import check_number, shown


def check_latent(latent: Any, where: str) -> float:
    """Return a width as given in a setting: an integer of at least 1, or below 1 a fraction.

    Example:
        >>> check_latent(0.25, "mine: width"), check_latent(64.0, "mine: width")
        (0.25, 64.0)
    """
    given = check_number(latent, where, 0, above=True)
    if given > 1 and given != int(given):
        raise ValueError(f"{where}: expected a whole number, or a share below 1, got {shown(latent)}")
    return given


def latent_size(latent: float, full: int) -> int:
    """Return a width given as a number, or below 1 as a fraction of the full one, rounded down; at least 1.

    Example:
        >>> latent_size(8, 100), latent_size(0.29, 100), latent_size(0.1, 4)
        (8, 29, 1)
    """
    # The small number corrects rounding: 0.29 * 100 is 28.999999999999996.
    return max(1, int(latent if latent >= 1 else latent * full + 1e-9))
