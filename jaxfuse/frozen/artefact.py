"""Frozen functions as files: an exported program and its constants.

    magic, 8 bytes | length of the header, 8 bytes, little endian | header, JSON | program | constants, each at a multiple of 64 bytes

The header has the format's version, the SHA-256 of all that follows it, and where each part lies. Nothing in the file is run as Python.
"""

import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jaxfuse.runtime import near

MAGIC, FORMAT, ALIGNED = b"JAXFUSE\n", 1, 64


class ArtefactError(ValueError):
    """A file is no frozen function, or cannot be read here; the message says why."""


def save(run: Callable, constants: list, path: str | os.PathLike, name: str, args: tuple, kwargs: dict) -> None:
    """Writes `run(constants, args, kwargs)` for arguments of these types."""
    types = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), constants)
    program = jax.export.export(jax.jit(run))(types, args, kwargs).serialize()
    parts, offset = [bytes(program)], _aligned(len(program))
    rows = []
    for constant in constants:
        data = np.asarray(constant).tobytes()
        rows.append(dict(dtype=str(constant.dtype), shape=list(constant.shape), offset=offset, bytes=len(data)))
        parts.append(data)
        offset += _aligned(len(data))
    body = b"".join(part + bytes(_aligned(len(part)) - len(part)) for part in parts)
    header = json.dumps(dict(format=FORMAT, name=name, program=len(program), constants=rows,
                             sha256=hashlib.sha256(body).hexdigest())).encode()
    Path(path).write_bytes(MAGIC + struct.pack("<Q", len(header)) + header + body)


def load(path: str | os.PathLike):
    """Reads a frozen function that `save` wrote. The code that made it is not needed.

    Args:
      path: the file.

    Returns: a function of the arguments that it was saved for, jitted.

    Raises: ArtefactError, a ValueError, for what is no such file, is truncated or altered, or is of a newer format; what `open` raises.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"there is no file {os.fspath(path)}{near.files(os.fspath(path))}")
    data = Path(path).read_bytes()
    header, body = _opened(data, os.fspath(path))
    program = jax.export.deserialize(bytearray(body[: header["program"]]))
    constants = [jnp.asarray(np.frombuffer(body, jnp.dtype(row["dtype"]), _count(row), row["offset"]).reshape(row["shape"]))
                 for row in header["constants"]]

    @jax.jit
    def run(constants, args, kwargs):
        return program.call(constants, args, kwargs)

    def loaded(*args, **kwargs):
        return run(constants, args, kwargs)

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
    except (ValueError, KeyError, TypeError) as error:
        raise ArtefactError(f"{path} is truncated or altered: its header cannot be read; copy or save it again") from error
    if version != FORMAT:
        raise ArtefactError(f"{path} is of format {version}, and this version of jaxfuse reads {FORMAT}; a newer jaxfuse may read it")
    body = memoryview(data)[begin + length :]
    if hashlib.sha256(body).hexdigest() != digest:
        raise ArtefactError(f"{path} is truncated or altered: its SHA-256 is another than its header says; copy or save it again")
    return header, body


def _count(row: dict) -> int:
    return int(np.prod(row["shape"], dtype=np.int64))


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
