#!/usr/bin/env bash
# OpenSSH's sshd, a real SFTP server, into FOLDER/openssh: Debian packages, unpacked and not installed, so that no root is
# needed and nothing else on this machine changes. About 1.5 MB to fetch, 8 MB on disk. Done once; then offline.
set -euo pipefail
folder=$1/openssh
[ -x "$folder/usr/sbin/sshd" ] && { echo "openssh: there already"; exit 0; }
[ -x /usr/sbin/sshd ] && { echo "openssh: installed on this host"; exit 0; }
command -v apt-get dpkg >/dev/null || { echo "openssh: this host has no apt-get" >&2; exit 1; }

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
chmod 755 "$scratch"
wanted=(openssh-server openssh-client)
simulate() { apt-get install --simulate --no-install-recommends "${wanted[@]}" 2>/dev/null | awk '/^Inst/ {print $2}'; }
[ -n "$(simulate)" ] || [ "$(id -u)" != 0 ] || apt-get update -qq
packages=$(simulate)
[ -n "$packages" ] || { echo "openssh: no such package here (is it Debian, and is there a network?)" >&2; exit 1; }
# shellcheck disable=SC2086 - a list of words
(cd "$scratch" && apt-get download -qq $packages 2>&1 | { grep -v 'unsandboxed as root' || true; })
mkdir -p "$scratch/openssh" "$1"
for package in "$scratch"/*.deb; do dpkg -x "$package" "$scratch/openssh"; done
rm -rf "$folder"
mv "$scratch/openssh" "$folder"
echo "openssh: unpacked into $folder"
