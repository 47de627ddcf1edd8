"""Frozen functions as files: an exported program and its constants.

    magic, 8 bytes | length of the header, 8 bytes, little endian | header, JSON | program | constants, each at a multiple of 64 bytes

The header has the format's version, the SHA-256 of all that follows it, and where each part lies. Nothing in the file is run as Python.
"""

import enum
import hashlib
import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jaxfuse.frozen.constants import bind
from jaxfuse.frozen.leaves import as_array, is_array
from jaxfuse.runtime import dispatch, near

MAGIC, FORMAT, ALIGNED = b"JAXFUSE\n", 2, 64


class ArtefactError(ValueError):
    """A file is no frozen function, or cannot be read here; the message says why."""


def save(run: Callable, constants: list, path: str | os.PathLike, name: str, args: tuple, kwargs: dict) -> None:
    """Writes `run(constants, args, kwargs)` for arguments of these types."""
    (args, kwargs), fixed = _parted((args, kwargs))
    types = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), constants)
    program = dispatch.waiting(jax.export.export(jax.jit(run)), types, args, kwargs).serialize()
    parts, offset = [bytes(program)], _aligned(len(program))
    rows = []
    for constant in constants:
        key = str(jax.random.key_impl(constant)) if jnp.issubdtype(constant.dtype, jax.dtypes.prng_key) else ""
        constant = jax.random.key_data(constant) if key else constant
        data = np.asarray(constant).tobytes()
        rows.append(dict(key=key, dtype=str(constant.dtype), shape=list(constant.shape), offset=offset, bytes=len(data)))
        parts.append(data)
        offset += _aligned(len(data))
    body = b"".join(part + bytes(_aligned(len(part)) - len(part)) for part in parts)
    fields = dict(format=FORMAT, name=name, program=len(program), constants=rows, fixed=fixed)
    header = json.dumps(fields | dict(sha256=_digest(fields, body))).encode()
    Path(path).write_bytes(MAGIC + struct.pack("<Q", len(header)) + header + body)


def load(path: str | os.PathLike):
    """Reads a frozen function that `save` wrote. The code that made it is not needed.

    Args:
      path: the file.

    Returns: a function of the arguments that it was saved for, jitted. `jax.export` has no rules to map or differentiate it.

    Raises: ArtefactError, a ValueError, for what is no such file, is truncated or altered, or is of a newer format; what `open` raises.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"there is no file {os.fspath(path)}{near.files(os.fspath(path))}")
    data = Path(path).read_bytes()
    header, body = _opened(data, os.fspath(path))
    program = jax.export.deserialize(bytearray(body[: header["program"]]))
    constants = [_constant(body, row, os.fspath(path)) for row in header["constants"]]
    run = bind(program.call, constants)

    def loaded(*args, **kwargs):
        (args, kwargs), fixed = _parted((args, kwargs))
        if fixed != header["fixed"]:
            raise ArtefactError(f"{os.fspath(path)} was saved for {header['fixed']}, and is called with {fixed}; save it for these too")
        try:
            return run(args, kwargs)
        except ValueError as error:
            types = ", ".join(f"{aval.dtype}{list(aval.shape)}" for aval in program.in_avals[len(constants) :])
            error.add_note(f"jaxfuse: {os.fspath(path)} was saved for {types}; save it for a jax.export.symbolic_shape to take any batch")
            raise

    loaded.__name__ = header["name"]
    return loaded


def _opened(data: bytes, path: str) -> tuple[dict, memoryview]:
    if data[: len(MAGIC)] != MAGIC:
        raise ArtefactError(f"{path} is no frozen function of jaxfuse: it does not begin with {MAGIC!r}")
    begin = len(MAGIC) + 8
    length = struct.unpack("<Q", data[len(MAGIC) : begin])[0] if len(data) >= begin else len(data)
    try:
        header = json.loads(data[begin : begin + length])
        version, digest = header["format"], header["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtefactError(f"{path} is truncated or altered: its header cannot be read; copy or save it again") from error
    if version != FORMAT:
        raise ArtefactError(f"{path} is of format {version}, and this version of jaxfuse reads {FORMAT}: "
                            + ("save it again" if version == 1 else "a newer jaxfuse may read it"))
    body = memoryview(data)[begin + length :]
    if _digest(header, body) != digest:
        raise ArtefactError(f"{path} is truncated or altered: its SHA-256 is another than its header says; copy or save it again")
    return header, body


def _constant(body: memoryview, row: dict, path: str) -> jax.Array:
    dtype = jnp.dtype(row["dtype"])
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ArtefactError(f"{path} has constants of {dtype}, which JAX has only with 64 bits; load it in jax.enable_x64(True)")
    array = jax.device_put(np.frombuffer(body, dtype, _count(row), row["offset"]).reshape(row["shape"]))
    return jax.random.wrap_key_data(array, impl=row["key"]) if row.get("key") else array


def _parted(tree) -> tuple:
    """The tree with None for what is no array, and those leaves in words: they are part of the program."""
    tree = jax.tree.map(as_array, tree)
    fixed = [_in_words(leaf) for leaf in jax.tree.leaves(tree) if not is_array(leaf)]
    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, tree), fixed


def _in_words(leaf) -> str:
    """What is the same, and in every process, for what is the same. Raises ArtefactError for what no words tell apart."""
    if isinstance(leaf, (bool, str, bytes, np.dtype)):
        return repr(leaf)
    place = leaf if hasattr(leaf, "__qualname__") else type(leaf)
    words = f"{place.__module__}.{place.__qualname__}"
    if isinstance(leaf, enum.Enum):
        return f"{words}.{leaf.name}"
    if place is leaf and _found(leaf) is leaf:
        return words
    raise ArtefactError(f"a saved function is given an argument of type {type(leaf).__name__} that is no array, and that no file can "
                        "tell from another: bind it before, jaxfuse.freeze(functools.partial(fn, name=value), variables)")


def _found(named) -> object:
    """What stands under the name of a function or a class, in its module."""
    found: Any = sys.modules.get(named.__module__)
    for name in named.__qualname__.split("."):
        found = getattr(found, name, None)
    return found


def _digest(header: dict, body) -> str:
    """Of all but itself."""
    fields = {name: value for name, value in header.items() if name != "sha256"}
    found = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    found.update(body)
    return found.hexdigest()


def _count(row: dict) -> int:
    return int(np.prod(row["shape"], dtype=np.int64))


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
