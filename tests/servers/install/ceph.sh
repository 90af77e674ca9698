#!/usr/bin/env bash
# Ceph's radosgw, a real S3 server, into FOLDER/ceph: Debian packages, unpacked and not installed, so that no
# root is needed and nothing else on this machine changes. About 75 MB to fetch, 270 MB on disk. Done once; then offline.
set -euo pipefail
folder=$1/ceph
[ -x "$folder/usr/bin/radosgw" ] && { echo "radosgw: there already"; exit 0; }
[ -x /usr/bin/radosgw ] && [ -x /usr/bin/ceph-osd ] && { echo "radosgw: installed on this host"; exit 0; }
command -v apt-get dpkg >/dev/null || { echo "radosgw: this host has no apt-get" >&2; exit 1; }

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
chmod 755 "$scratch"
wanted=(radosgw ceph-mon ceph-osd ceph-common)
simulate() { apt-get install --simulate --no-install-recommends "${wanted[@]}" 2>/dev/null | awk '/^Inst/ {print $2}'; }
[ -n "$(simulate)" ] || [ "$(id -u)" != 0 ] || apt-get update -qq
packages=$(simulate)
[ -n "$packages" ] || { echo "radosgw: no such package here (is it Debian, and is there a network?)" >&2; exit 1; }
# shellcheck disable=SC2086 - a list of words
(cd "$scratch" && apt-get download -qq $packages 2>&1 | { grep -v 'unsandboxed as root' || true; })
mkdir -p "$scratch/ceph" "$1"
for package in "$scratch"/*.deb; do dpkg -x "$package" "$scratch/ceph"; done
rm -rf "$folder"
mv "$scratch/ceph" "$folder"
echo "radosgw: unpacked into $folder"
