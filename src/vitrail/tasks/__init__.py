"""Tasks: what a model is asked. One module per task, behind the interface in `task.py`."""
