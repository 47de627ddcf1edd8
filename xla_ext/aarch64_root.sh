#!/bin/bash
# Makes a folder with Debian's Python for aarch64 and what the tests need of PyPI, for `xla_ext/sanitize.sh aarch64` (500 MB):
#     xla_ext/aarch64_root.sh FOLDER                   # Debian 13, Python 3.13; as root, for debootstrap
# Nothing of it runs on this processor but through qemu, which Debian's qemu-user-binfmt registers.
set -euo pipefail
root=$1
debootstrap --foreign --arch=arm64 --variant=minbase --include=python3 trixie "$root"
for package in "$root"/var/cache/apt/archives/*.deb; do dpkg -x "$package" "$root"; done
platforms=(manylinux_2_17_aarch64 manylinux2014_aarch64 manylinux_2_27_aarch64 manylinux_2_28_aarch64)
python -m pip install -q --target "$root/usr/lib/python3/dist-packages" --python-version 3.13 --only-binary=:all: "${platforms[@]/#/--platform=}" \
  jax flax optax pytest pytest-xdist rich
