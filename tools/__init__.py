"""What serves our own tables and models, run from a clone as `python -m tools`; it is not in the wheel."""
