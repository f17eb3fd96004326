"""Real small trainings, healthy and broken, on which the detectors are calibrated."""
