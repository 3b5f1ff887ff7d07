"""The order of the tests: a long one that comes last would leave all processes but its own without work."""

import pytest

LONG = ("test_readme.py", "test_end_to_end.py", "test_campaign.py", "test_recovery.py", "test_snapshots.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first."""
    items.sort(key=lambda item: item.path.name not in LONG)
