"""Sizes in bytes, parsed from and shown as text: `8GiB`, `500MB`."""

import re


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(name: str, size: int | str) -> int:
    """
    Parse a number of bytes, or a text such as `8GiB` (units of 1024) or `500MB` (1000). `name` is the option's, for
    the `ValueError`.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = None if match is None else _UNITS.get(match[2].lower())
    if isinstance(size, bool) or not isinstance(size, (int, str)) or match is None or unit is None:
        raise ValueError(
            f"`{name}` has to be a number of bytes, or one with a unit, B, kB, MB, GB, TB, KiB, MiB, GiB or TiB, such "
            f"as `8GiB`, but got {size!r}"
        )
    parsed = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if parsed < 1:
        raise ValueError(f"`{name}` has to be at least a byte but got {size!r}")
    return parsed


def in_thousands(size: int | str) -> bool:
    """Return true if the text of a size has a unit of 1000, such as `MB`."""
    return re.search(r"[kmgt]b\s*$", str(size).lower()) is not None


def show_bytes(size: int, in_thousands: bool = False) -> str:
    """Show a size in units of 1024, or of 1000."""
    units = ("TB", "GB", "MB", "kB") if in_thousands else ("TiB", "GiB", "MiB", "KiB")
    for unit in units:
        step = _UNITS[unit.lower()]
        if size >= step:
            return f"{size / step:.2f} {unit}"
    return f"{size} B"
