"""Where the weights of a stage come from, and the adapters beside them."""
