#!/bin/sh
# Run once by the image of PostgreSQL on an empty volume: a role and a database each for Prefect and MLflow.
set -eu
create() {
  # The password goes through psql's quoting, so it may have any character, and is in no command line.
  ROLE=$1 ROLE_PASSWORD=$2 psql --set ON_ERROR_STOP=1 --quiet --username "${POSTGRES_USER:-postgres}" --dbname postgres <<'SQL'
\getenv role ROLE
\getenv password ROLE_PASSWORD
CREATE ROLE :"role" LOGIN PASSWORD :'password';
CREATE DATABASE :"role" OWNER :"role";
REVOKE CONNECT ON DATABASE :"role" FROM PUBLIC;
SQL
}
create prefect "$PREFECT_DB_PASSWORD"
create mlflow "$MLFLOW_DB_PASSWORD"
