#!/usr/bin/env bash
# MooseFS, a real distributed file system, into FOLDER/moosefs: Debian packages, unpacked and not installed, so that no root
# is needed and nothing else on this machine changes. About 1 MB to fetch, 3 MB on disk. Done once; then offline.
set -euo pipefail
folder=$1/moosefs
[ -x "$folder/usr/bin/mfsmount" ] && { echo "moosefs: there already"; exit 0; }
command -v apt-get dpkg >/dev/null || { echo "moosefs: this host has no apt-get" >&2; exit 1; }

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
chmod 755 "$scratch"
wanted=(moosefs-master moosefs-chunkserver moosefs-client libmfsio1 libfuse3-3)
fetch() { (cd "$scratch" && apt-get download -qq "${wanted[@]}" 2>&1 | { grep -v 'unsandboxed as root' || true; }); }
have() { compgen -G "$scratch/moosefs-client_*.deb" >/dev/null; }
fetch || true
have || { [ "$(id -u)" != 0 ] || apt-get update -qq; fetch; }
have || { echo "moosefs: no such package here (is it Debian 12, and is there a network?)" >&2; exit 1; }
mkdir -p "$scratch/moosefs" "$1"
for package in "$scratch"/*.deb; do dpkg -x "$package" "$scratch/moosefs"; done
rm -rf "$folder"
mv "$scratch/moosefs" "$folder"
echo "moosefs: unpacked into $folder"
