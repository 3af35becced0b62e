"""Provide the weights of a stage, and the adapters beside them."""
