"""Wires the parts of a run and drives them: the controller's loops, batching, placement, start-up checks."""
