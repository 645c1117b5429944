"""The ``zoomkv`` command."""

from zoomkv.cli.dispatch import main

__all__ = ["main"]
