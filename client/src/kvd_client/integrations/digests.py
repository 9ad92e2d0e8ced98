"""Digests of configurations, the same in every process."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping
from typing import Any

# Left out of the Hugging Face configuration, at every depth; all else is taken to shape KV. They
# name where the model lies, who wrote its file, and the dtype its weights are stored in: an
# engine computes in its own dtype, which is a part of the digest.
NOT_SHAPING = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
STORED_DTYPE = frozenset({"dtype", "torch_dtype"})

# Variables of the environment by which libraries, whatever engine calls them, round the factors of
# products otherwise.
LIBRARY_VARIABLES = (
    "DNNL_DEFAULT_FPMATH_MODE",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRITON_F32_DEFAULT",
)


def digest_of(value: Any) -> str:
    """Hex digest of a value made of plain parts, data classes, enums and dtypes."""
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def canonical(value: Any) -> Any:
    """The value as JSON can write it, in one way only. Names of types are kept, addresses not."""
    match value:
        case None | bool() | int() | float() | str() if not isinstance(value, enum.Enum):
            return value
        case enum.Enum():
            return f"{type(value).__name__}.{value.name}"
        case Mapping():
            return {str(key): canonical(each) for key, each in value.items()}
        case list() | tuple():
            return [canonical(each) for each in value]
        case set() | frozenset():
            return sorted(json.dumps(canonical(each), sort_keys=True) for each in value)
    if dataclasses.is_dataclass(value):
        parts = {
            f.name: getattr(value, f.name, None) for f in dataclasses.fields(value) if f.compare
        }
        return {"": type(value).__name__, **canonical(parts)}
    if isinstance(value, type) or callable(value):
        return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else ""
    if hasattr(value, "__dict__") and vars(value):
        return {"": type(value).__name__, **canonical(vars(value))}
    return str(value)


def shaping_fields(hf_config: Any) -> dict[str, Any]:
    """The Hugging Face configuration without what does not shape KV."""
    written = hf_config.to_dict() if hasattr(hf_config, "to_dict") else vars(hf_config)
    return _without(canonical(written))


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        dropped = NOT_SHAPING | STORED_DTYPE
        return {name: _without(each) for name, each in value.items() if name not in dropped}
    return [_without(each) for each in value] if isinstance(value, list) else value
