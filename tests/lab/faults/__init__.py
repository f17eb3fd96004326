"""The fault lab: every fault of the catalogue, injected into real jobs, judged over REST."""
