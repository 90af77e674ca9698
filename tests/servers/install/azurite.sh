#!/usr/bin/env bash
# Azurite, Microsoft's emulator of Azure Blob Storage, into FOLDER/azurite: a package of npm and what it depends on. Needs
# node and npm. About 370 MB on disk. No root is needed, nothing else on this machine changes. Done once; then offline.
set -euo pipefail
version=3.37.0
folder=$1/azurite
[ -x "$folder/node_modules/.bin/azurite-blob" ] && { echo "azurite: there already"; exit 0; }
{ command -v node && command -v npm; } >/dev/null || { echo "azurite: this host has no node and npm" >&2; exit 1; }

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
chmod 755 "$scratch"
npm install --prefix "$scratch/azurite" --cache "$scratch/cache" --no-audit --no-fund --ignore-scripts \
    --loglevel error "azurite@$version" >/dev/null
"$scratch/azurite/node_modules/.bin/azurite-blob" --version >/dev/null  # where node is too old, this fails
mkdir -p "$1"
rm -rf "$folder"
mv "$scratch/azurite" "$folder"
echo "azurite: $version installed into $folder"
