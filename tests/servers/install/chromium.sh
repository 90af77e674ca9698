#!/usr/bin/env bash
# Chromium without windows, which opens the pages that the command line writes, into FOLDER/chromium: a package of npm that
# holds it compressed, unpacked here with the libraries and the font that it brings. Needs node and npm, on x86-64. About
# 210 MB on disk. No root is needed, nothing else on this machine changes. Done once; then offline.
set -euo pipefail
version=153.0.0
folder=$1/chromium
[ -x "$folder/chromium" ] && { echo "chromium: there already"; exit 0; }
[ "$(uname -m)" = x86_64 ] || { echo "chromium: the package has none for $(uname -m)" >&2; exit 1; }
{ command -v node && command -v npm; } >/dev/null || { echo "chromium: this host has no node and npm" >&2; exit 1; }

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
chmod 755 "$scratch"
npm install --prefix "$scratch" --cache "$scratch/cache" --no-audit --no-fund --ignore-scripts \
    --loglevel error "@sparticuz/chromium@$version" >/dev/null
mkdir "$scratch/out"
cat > "$scratch/unpack.mjs" <<'UNPACK'
import { createReadStream, createWriteStream } from 'node:fs';
import { pipeline } from 'node:stream/promises';
import { createBrotliDecompress } from 'node:zlib';
import { extract } from 'tar-fs';
const from = 'node_modules/@sparticuz/chromium/bin/';
const unpacked = (name, to) => pipeline(createReadStream(from + name), createBrotliDecompress(), to);
await unpacked('chromium.br', createWriteStream('out/chromium', { mode: 0o755 }));
for (const name of ['al2023', 'fonts', 'swiftshader']) await unpacked(name + '.tar.br', extract('out/' + name));
UNPACK
( cd "$scratch" && node unpack.mjs )
cat > "$scratch/out/fonts/fonts.conf" <<'FONTS'
<?xml version="1.0"?>
<fontconfig>
  <dir prefix="relative">fonts</dir>
  <cachedir prefix="xdg">fontconfig</cachedir>
</fontconfig>
FONTS
mv "$scratch"/out/swiftshader/* "$scratch/out"  # it looks for them beside itself
LD_LIBRARY_PATH=$scratch/out/al2023/lib "$scratch/out/chromium" --version --no-sandbox >/dev/null
mkdir -p "$1"
rm -rf "$folder"
mv "$scratch/out" "$folder"
echo "chromium: $version installed into $folder"
