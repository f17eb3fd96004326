"""The lab that draws its trainings and its faults from a grammar."""
