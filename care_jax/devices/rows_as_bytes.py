"""Rows as bytes, for another process of the run.

A row is pickled, but only arrays, images, paths and records of this project are built from the
bytes: no code that they name is run.
"""

from __future__ import annotations

import dataclasses
import io
import pathlib
import pickle
import zipfile
from typing import Any

import ml_dtypes
import numpy as np
from PIL import Image, ImageOps

# Modules that may be imported to look for a type, and all else that rebuilds an array or a path.
_MODULES = ("care_jax", "PIL", "numpy", "ml_dtypes", "pathlib", "builtins")
_ARRAY = np.zeros(1)
_BUILT = (
    *(np.ndarray, np.dtype, _ARRAY.__reduce__()[0], _ARRAY[0].__reduce__()[0]),
    *(_ARRAY.__reduce_ex__(5)[0], bytes, bytearray, type(pathlib.Path())),
    Image.Image,
    ml_dtypes.bfloat16,  # of a model that computes in it, the patches
)


def to_bytes(row: Any) -> bytes:
    """Any arrays, objects of JSON types, and records with them."""
    stream = io.BytesIO()
    _Writer(stream).dump(row)
    return stream.getvalue()


def from_bytes(data: bytes | bytearray) -> Any:
    """The row; ValueError if it names anything else than arrays, images, paths and records."""
    return _Reader(io.BytesIO(data)).load()


class _Writer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, zipfile.Path):  # an open archive cannot be sent, its image can
            return bytes, (value.read_bytes(),)
        if isinstance(value, Image.Image):
            # Its metadata may have values of any type; of an upright image only this one is used,
            # but of a TIFF with 16 bits also its tags, without which these are the usual ones.
            image = ImageOps.exif_transpose(value) if value.format else value.copy()
            image.info = {key: x for key, x in image.info.items() if key == "transparency"}
            return Image.Image, (), image.__getstate__()
        return NotImplemented


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in _MODULES:
            found = super().find_class(module, name)
            if any(found is each for each in _BUILT) or _is_data(found):
                return found
        raise ValueError(
            f"expected a row of arrays, images, paths and records from another process, got "
            f"{module}.{name}; run the same code on all hosts, on a network of their own"
        )


def _is_data(found: Any) -> bool:
    """Whether it is a type of frozen records of this project."""
    if not isinstance(found, type):
        return False
    is_own = found.__module__.startswith("care_jax.") and dataclasses.is_dataclass(found)
    return is_own and vars(found)["__dataclass_params__"].frozen
