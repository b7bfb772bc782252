"""Questions to runs: what a run did at a batch, where it went wrong, and in what two runs differ."""

__all__: list[str] = []
