#!/usr/bin/env bash
# moto, an S3 server in pure Python, into FOLDER/moto: a virtual environment of its own, since it brings a botocore of its own.
# Needs a Python with venv and pip. About 140 MB on disk. No root is needed, nothing else on this machine changes. Done once;
# then offline.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$1/moto
[ -f "$folder/.ready" ] && { echo "moto: there already"; exit 0; }
python=$here/../../../.venv/bin/python
[ -x "$python" ] || python=python3

mkdir -p "$1"
rm -rf "$folder"  # what an interrupted run has left
"$python" -m venv --without-pip "$folder"
"$python" -m pip --python "$folder/bin/python" install --quiet --no-deps --only-binary :all: -r "$here/moto.txt"
"$folder/bin/python" -c 'import moto.server'
touch "$folder/.ready"
echo "moto: installed into $folder"
