"""The same points written by Rankscope and by other trackers, in turns, on one machine."""
