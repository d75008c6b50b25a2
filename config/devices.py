"""What settings default to on each device.

Owns the defaults that differ from those of `schema`, which are the CPU's. Does not own the choice of a device.
Surprising rule: they are known only once "auto" has been decided, so settings are loaded a second time over them.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import FieldInfo

from .convert import default_text

DEVICE_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "cpu": {},
    "cuda": {
        "max_num_seqs": 64,
        "kv_memory": None,
        "recipe": "cuda",
        "max_prefill_tokens": 2048,
        "mixed_prefill": True,
    },
    "sim": {
        "max_num_seqs": 64,
        "kv_memory": 16 << 30,
        "recipe": "sim",
        "max_prefill_tokens": 512,
        "mixed_prefill": True,
        "speculative": "off",
    },
}
"""By device and settings key."""


def default_texts(field: FieldInfo) -> str:
    """The field's default, and where another device has another, that too."""
    texts = [default_text(field) or "unset"]
    for device, defaults in DEVICE_DEFAULTS.items():
        if field.encode_name in defaults:
            texts.append(f"{device}: {default_text(field, defaults[field.encode_name]) or 'unset'}")
    return "; ".join(texts)
