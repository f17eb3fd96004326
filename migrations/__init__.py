"""The history of the database schema, as Alembic revisions."""
