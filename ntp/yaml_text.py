"""YAML text to plain values, with the two habits of PyYAML that surprise a user of a configuration removed.

`3e-4` is a number (YAML 1.1 asks for `3.0e-4`), and a key given twice is an error (PyYAML keeps the last).
Every mistake is a ConfigError of one line that names the file or option it was found in.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from ntp.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """SafeLoader that knows exponents without a point and refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key.value!r} given twice", problem_mark=key.start_mark
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def load_mapping(path: str | Path) -> dict[str, Any]:
    """The mapping in the YAML file at `path`; an empty file is an empty mapping. Raises ConfigError."""
    if not str(path):
        raise ConfigError("no config is named: expected the path of a file, found ''")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read config {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"config {str(path)!r} is not UTF-8 text: {error.reason}") from None
    value = load_value(text, f"config {str(path)!r}")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"config {str(path)!r}: expected sections at the top, found {str(value)[:60]!r}")
    return cast("dict[str, Any]", value)


def load_value(text: str, origin: str) -> Any:
    """The value of YAML `text`; `origin` names it in the ConfigError that bad text raises."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1} column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{origin}{where}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a timestamp such as 2026-99-99
        raise ConfigError(f"{origin}: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{origin}: nested too deeply") from None


def line_of(text: str, keys: Sequence[str | int]) -> int:
    """Line (from 1) of the deepest node on the path `keys` in YAML `text`; 0 where there is none."""
    node = yaml.compose(text, Loader=_Loader)
    line = 0
    for key in keys:
        if isinstance(node, yaml.MappingNode):
            pairs = {entry.value: (entry, value) for entry, value in node.value}
            entry, node = pairs.get(key, (None, None))
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            entry = node = node.value[key]
        else:
            entry = None
        if entry is None:
            break
        line = entry.start_mark.line + 1
    return line


def to_json(tree: dict[str, Any]) -> str:
    """JSON text of a loaded tree. What JSON has no type for (dates) becomes a string.

    Raises ConfigError for a tree that contains itself or has keys that JSON cannot hold.
    """
    try:
        return json.dumps(tree, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"config is not a plain tree of values: {error}") from None
