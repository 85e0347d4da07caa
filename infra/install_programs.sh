#!/bin/sh
# Installs from the distribution, once: bubblewrap (the sandbox) and OpenSSH's client (signatures). Exit 1: one is missing.
missing() {
  command -v bwrap >/dev/null 2>&1 || echo bubblewrap
  command -v ssh-keygen >/dev/null 2>&1 || echo openssh-client
}
packages=$(missing)
[ -z "$packages" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing" $packages
  install() { apt-get install -y -qq --no-install-recommends $packages; }
  { install || { apt-get update -qq && install; }; } >/dev/null 2>&1
  packages=$(missing)
  [ -z "$packages" ] && exit 0
fi
echo "missing:" $packages >&2
echo "  without bubblewrap untrusted programs cannot be run (reward 'code', Python tool); without ssh-keygen nothing is signed" >&2
echo "  fix: as root, apt-get install" $packages >&2
exit 1
