"""Malformed input of every kind: accepted and right, or refused by an error of our own that says what to do."""
