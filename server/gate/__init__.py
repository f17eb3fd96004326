"""`rankscope gate`: a verdict as an exit code, and in the formats of CI systems."""
