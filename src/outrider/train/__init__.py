"""Training: the reference models that come with the package."""
