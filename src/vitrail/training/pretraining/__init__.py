"""Pretraining without labels: methods, their draws and defaults, and how a run is watched."""
