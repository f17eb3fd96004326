"""Everything that speaks SQL. Plain functions of a connection; the caller owns the transaction."""
