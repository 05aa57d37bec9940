"""Recorded trajectories in; drafters, their calibration and their figures out."""
