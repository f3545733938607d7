#!/usr/bin/env bash
# Builds stand-ins for the base images where no image registry can be reached, and tags them with the names that
# Dockerfile and compose.yaml use. Needs a running Docker engine, debootstrap, root and a Debian mirror.
set -euo pipefail

python_image=python:3.11-slim-bookworm
redis_image=redis:7-bookworm
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

have() { docker image inspect "$1" >/dev/null 2>&1 || docker pull -q "$1" >/dev/null 2>&1; }

if have "$python_image" && have "$redis_image"; then
  echo "base images are at hand"
  exit 0
fi

echo "making stand-ins for $python_image and $redis_image"
debootstrap --variant=minbase --include=ca-certificates,python3,python3-pip,python3-venv,redis-server bookworm "$work/root" >"$work/log" 2>&1 \
  || { tail -n 20 "$work/log" >&2; exit 1; }
ln -sf python3 "$work/root/usr/bin/python"
rm -f "$work"/root/usr/lib/python3*/EXTERNALLY-MANAGED
rm -rf "$work"/root/var/cache/apt/archives/*.deb

# This machine's package settings: certificates, the configuration of pip, and local folders of wheels.
cp -L /etc/ssl/certs/ca-certificates.crt "$work/root/etc/ssl/certs/"
for folder in ${PIP_FIND_LINKS:-}; do
  [ -d "$folder" ] && cp -a --parents "$folder" "$work/root"
done
{ echo "[global]"; echo "find-links = ${PIP_FIND_LINKS:-}"; echo "timeout = 180"; } >"$work/root/etc/pip.conf"

tar -C "$work/root" -c . | docker import - weir-stand-in >/dev/null
printf 'FROM weir-stand-in\nENV LANG=C.UTF-8\n' | DOCKER_BUILDKIT=0 docker build -q -t "$python_image" - >/dev/null
printf 'FROM weir-stand-in\nENTRYPOINT []\nEXPOSE 6379\nCMD ["redis-server", "--protected-mode", "no"]\n' | DOCKER_BUILDKIT=0 docker build -q -t "$redis_image" - >/dev/null
docker image ls --format '{{.Repository}}:{{.Tag}} {{.Size}}'
