"""Reading of results; caches get their present names."""

import json
import re
from pathlib import Path
from typing import Any

from kvcache_plugins.registry import RENAMED_CACHES


# Until then `gear` was transform coding, and `gear-t*` and `gear-c*` were its presets
RENAMED_AT = "2026-11-28T17:24"
_OLD_NAME = re.compile(r"(?<![\w-])(infinigen-gear|gear-t\d+|gear-c\d+|gear(?=$|[:,]))")


def read_result(path: Path) -> dict[str, Any]:
    """Read the JSON of a result; caches of older results get their present names."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no result, which is a JSON object")
    return _rename(content) if content.get("date", "") < RENAMED_AT else content


def rename_cache(spec: str) -> str:
    """Return the present name of a cache that was measured before `RENAMED_AT`."""

    def new_name(match: re.Match[str]) -> str:
        old = match[1]
        if old == "gear":
            return "transform"
        # Presets that were removed keep their numbers
        return RENAMED_CACHES.get(old) or old.replace("gear-t", "transform-").replace("gear-c", "calibrated-")

    return _OLD_NAME.sub(new_name, spec)


def _rename(value: Any) -> Any:
    if isinstance(value, dict):
        return {rename_cache(key): _rename(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rename(each) for each in value]
    return rename_cache(value) if isinstance(value, str) else value
