"""Training: heads that draft for a model, and the conversations that they learn from."""
