"""PostgreSQL, Prefect, MLflow and a worker on one machine, without containers, kept up by a supervisor."""
