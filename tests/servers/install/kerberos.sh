#!/usr/bin/env bash
# MIT Kerberos: a KDC and kinit, into FOLDER/kerberos: Debian packages, unpacked and not installed, so that no root is
# needed and nothing else on this machine changes. About 2 MB to fetch, 4 MB on disk. Done once; then offline.
set -euo pipefail
folder=$1/kerberos
[ -x "$folder/usr/sbin/krb5kdc" ] && { echo "kerberos: there already"; exit 0; }
command -v apt-get dpkg >/dev/null || { echo "kerberos: this host has no apt-get" >&2; exit 1; }

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
chmod 755 "$scratch"
wanted=(krb5-kdc krb5-admin-server krb5-user libgssapi-krb5-2 libgssrpc4 libk5crypto3 libkadm5clnt-mit12
    libkadm5srv-mit12 libkdb5-10 libkrb5-3 libkrb5support0 libverto1 libverto-libev1 libev4)
fetch() { (cd "$scratch" && apt-get download -qq "${wanted[@]}" 2>&1 | { grep -v 'unsandboxed as root' || true; }); }
have() { compgen -G "$scratch/krb5-kdc_*.deb" >/dev/null; }
fetch || true
have || { [ "$(id -u)" != 0 ] || apt-get update -qq; fetch; }
have || { echo "kerberos: no such package here (is it Debian 12, and is there a network?)" >&2; exit 1; }
mkdir -p "$scratch/kerberos" "$1"
for package in "$scratch"/*.deb; do dpkg -x "$package" "$scratch/kerberos"; done
rm -rf "$folder"
mv "$scratch/kerberos" "$folder"
echo "kerberos: unpacked into $folder"
