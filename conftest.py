"""Fixtures that all tests share."""

pytest_plugins = ["tests.bases"]
