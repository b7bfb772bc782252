"""How wide a layer between two others is, as settings of methods say it."""

__all__ = ["latent_size"]


def latent_size(latent: float, full: int) -> int:
    """A width given as a number, or below 1 as a share of the full one, rounded down; at least 1.

    Example:
        >>> latent_size(8, 100), latent_size(0.29, 100), latent_size(0.1, 4)
        (8, 29, 1)
    """
    # 0.29 of 100 is 28.999999999999996.
    return max(1, int(latent if latent >= 1 else latent * full + 1e-9))
