"""python private_copy.py libdnnl.so OUT: a copy of oneDNN that neither meets nor needs another library of the process.

Run by CMakeLists.txt. What the copy differs in:

- Its SONAME. The dynamic linker serves a name once: whoever asks for libdnnl.so.3 later would get this one.
- It looks for its own functions in itself first (DT_SYMBOLIC). Another libdnnl with global symbols would serve them else.
- It leaves its static objects alone when the process ends: XLA's threads may still be in a kernel then.
- It does not need libgomp, which slim images lack. Its OpenMP entry points are weak, so they stay null until
  threads.cc points them at our threads.
"""

import struct
import sys
from pathlib import Path

GOMP = b"libgomp.so.1"
SONAME = b"jaxfuse_dnnl"
ENTRY_POINTS = (b"GOMP_", b"omp_")

DT_NEEDED, DT_STRTAB, DT_SYMTAB, DT_SONAME, DT_SYMBOLIC = 1, 5, 6, 14, 16
DT_VERSYM, DT_VERNEED, DT_VERNEEDNUM = 0x6FFFFFF0, 0x6FFFFFFE, 0x6FFFFFFF
WEAK, ANY_VERSION = 2, 1
SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
VERNEED = struct.Struct("<HHIII")  # version, count, file, aux, next


class Elf:
    """A 64-bit little-endian shared library. Addresses below the first writable segment are offsets in the file."""

    def __init__(self, data: bytes):
        self.data = bytearray(data)
        if self.data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        start, entry_size, count = self._at("<Q", 32), self._at("<H", 54), self._at("<H", 56)
        headers = [struct.unpack_from("<IIQQQQ", self.data, start + i * entry_size) for i in range(count)]
        self.dynamic, size = next((offset, size) for kind, _, offset, _, _, size in headers if kind == 2)
        self.tags = [struct.unpack_from("<QQ", self.data, self.dynamic + i) for i in range(0, size, 16)]
        self.strings = self.value(DT_STRTAB)

    def _at(self, layout: str, offset: int) -> int:
        return struct.unpack_from(layout, self.data, offset)[0]

    def value(self, tag: int) -> int:
        return next(value for found, value in self.tags if found == tag)

    def text(self, at: int) -> bytes:
        start = self.strings + at
        return bytes(self.data[start : self.data.index(b"\0", start)])

    def set_tag(self, old: tuple[int, int], tag: int, value: int) -> None:
        struct.pack_into("<QQ", self.data, self.dynamic + 16 * self.tags.index(old), tag, value)

    def drop_versions_of(self, file: bytes) -> None:
        """Takes the library out of the list of libraries whose versions the linker checks."""
        at, before, count = self.value(DT_VERNEED), None, self.value(DT_VERNEEDNUM)
        for _ in range(count):
            version, names, name, aux, following = VERNEED.unpack_from(self.data, at)
            if self.text(name) == file:
                if before is None:
                    raise ValueError(f"{file.decode()} is the first library in the list of versions, which is not provided for")
                link = self._at("<I", before + 12)
                struct.pack_into("<I", self.data, before + 12, link + following if following else 0)
                return self.set_tag((DT_VERNEEDNUM, count), DT_VERNEEDNUM, count - 1)
            before, at = at, at + following
        raise ValueError(f"no versions of {file.decode()} in this library")

    def replace_function(self, old: bytes, new: bytes) -> None:
        """Calls of one undefined function go to another one that the library uses too."""
        symbols = {self.text(name): at for at, name, section in self.symbols() if section == 0}
        name = self._at("<I", symbols[new])
        struct.pack_into("<I", self.data, symbols[old], name)

    def symbols(self):
        """(place in the file, place of the name, section) of each; section 0: another library defines it."""
        start = self.value(DT_SYMTAB)
        for at in range(start, self.strings - (self.strings - start) % SYMBOL.size, SYMBOL.size):  # the names follow the symbols
            name, _, _, section, _, _ = SYMBOL.unpack_from(self.data, at)
            yield at, name, section

    def weaken(self, prefixes: tuple[bytes, ...]) -> int:
        """Lets undefined functions with such names be null, of whatever version. Returns how many there are."""
        versions, found = self.value(DT_VERSYM), 0
        for i, (at, name, section) in enumerate(self.symbols()):
            if section == 0 and self.text(name).startswith(prefixes):
                self.data[at + 4] = WEAK << 4 | self.data[at + 4] & 15
                struct.pack_into("<H", self.data, versions + 2 * i, ANY_VERSION)
                found += 1
        return found


def private(data: bytes) -> bytearray:
    """The copy. Raises ValueError or StopIteration where the library is not the build that this was made for."""
    elf = Elf(data)
    gomp = next(tag for tag in elf.tags if tag[0] == DT_NEEDED and elf.text(tag[1]) == GOMP)
    elf.drop_versions_of(GOMP)
    if elf.weaken(ENTRY_POINTS) == 0:
        raise ValueError("the library uses no OpenMP")
    elf.replace_function(b"__cxa_atexit", b"sched_yield")  # which returns 0 too, and reads no argument
    at = elf.strings + gomp[1]
    elf.data[at : at + len(SONAME)] = SONAME  # in place of libgomp's name, which nothing refers to any more
    elf.set_tag((DT_SONAME, elf.value(DT_SONAME)), DT_SONAME, gomp[1])
    elf.set_tag(gomp, DT_SYMBOLIC, 0)
    return elf.data


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(private(Path(sys.argv[1]).read_bytes()))
