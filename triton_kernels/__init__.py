"""Triton kernels of compressed KV caches, which need nothing but PyTorch and Triton.

They are imported as `kvcache_plugins.triton_kernels`, or loaded under another name from any folder. `prepare_...`
returns a `Launch`: attention over compressed tokens, its combination with exact ones, or coding.
"""

from importlib import import_module


if __name__ == "triton_kernels":
    raise ImportError(
        "The top-level name `triton_kernels` belongs to another project: import `kvcache_plugins.triton_kernels`, and "
        "do not run Python with the repository's root on `sys.path`."
    )
_MODULES = {
    "arithmetic": ("has_pairs",),
    "launch": ("KeptLaunch", "Launch"),
    "scores": ("score_codes",),
    "stored_format": ("RowBasis", "RowLayout", "StoredGroups"),
    "gather": ("gather_rows", "page_addresses", "write_rows"),
    "attention.attend": ("prepare_groups",),
    "attention.combine": ("prepare_combination",),
    "attention.dense_part": ("DensePart",),
    "attention.partials": ("Partials",),
    "group_packing.launches": ("GroupPushState",),
    "group_packing.push": ("prepare_group_push",),
    "transform_coding.attend": ("prepare_rows",),
    "transform_coding.code_rows": ("prepare_coding",),
    "transform_coding.launches": ("Codebook", "CodedRows", "PushState", "RotaryAngles"),
    "transform_coding.push": ("prepare_push",),
    "transform_coding.step": ("RowSegment", "prepare_step"),
}
__all__ = [name for names in _MODULES.values() for name in names]


def __getattr__(name: str) -> object:
    """Import on demand: constants of the stored format are for machines without Triton too."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
