#!/bin/sh
# Installs PostgreSQL's server from the distribution, once, without the default cluster, which would start by itself.
# Exit 0: installed. Exit 1: not installed, with a fix.
found() { command -v postgres >/dev/null 2>&1 || ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1; }
found && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing PostgreSQL (the database of the Prefect and MLflow servers)"
  if [ ! -e /etc/postgresql-common/createcluster.conf ]; then
    mkdir -p /etc/postgresql-common && echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.conf
  fi
  install() { DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends -o Dpkg::Options::=--force-confold postgresql; }
  { install || { apt-get update -qq && install; }; } >/dev/null 2>&1
  found && exit 0
fi
echo "PostgreSQL is missing: the servers keep their records in it." >&2
echo "  fix: as root, apt-get install postgresql (Fedora: dnf install postgresql-server), or use the embedded servers (make demo)" >&2
exit 1
