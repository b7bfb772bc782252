"""Settings and a fixture for all tests: one Hypothesis profile, one thread count, the `slow` mark, no pictures."""

import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, settings


# The quick tests try few cases; --slow and -m slow try more.
settings.register_profile("dev", deadline=None, max_examples=6, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("dev"), derandomize=True)
PROFILE = "ci" if os.environ.get("CI") else "dev"
settings.load_profile(PROFILE)

# Results are equal bit for bit only with a fixed number of threads, so the suite fixes one.
torch.set_num_threads(1)

# By default, collections of garbage among thousands of test items take a tenth of the suite's time.
gc.set_threshold(50_000, 20, 20)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--slow") or "slow" in (config.getoption("-m") or ""):
        settings.register_profile("slow", parent=settings.get_profile(PROFILE), max_examples=25)
        settings.load_profile("slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow") or "slow" in (config.getoption("-m") or ""):
        return
    slow = [item for item in items if "slow" in item.keywords]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if "slow" not in item.keywords]
