#!/bin/sh
# Installs bubblewrap from the distribution, once. Exit 0: installed. Exit 1: not installed, with a fix.
command -v bwrap >/dev/null 2>&1 && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing bubblewrap (the sandbox for untrusted programs)"
  { apt-get install -y -qq --no-install-recommends bubblewrap || { apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap; }; } >/dev/null 2>&1
  command -v bwrap >/dev/null 2>&1 && exit 0
fi
echo "bubblewrap is missing: untrusted programs cannot be run (reward 'code', Python tool), and their tests are skipped." >&2
echo "  fix: as root, apt-get install bubblewrap (Fedora: dnf install bubblewrap)" >&2
exit 1
