"""Real trainings of several sorts, of many seeds each: what spread there is, and what is found."""
