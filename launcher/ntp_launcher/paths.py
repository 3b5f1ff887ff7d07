"""Types for options that name files and folders: an empty name, which would mean this folder, is refused."""

import argparse
from pathlib import Path


def path_name(text: str) -> str:
    """The path of something, there or not."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, found ''")
    return text


def folder_name(text: str) -> str:
    """The path of a folder, there or not."""
    path = Path(path_name(text))
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a file, expected a folder")
    return text
