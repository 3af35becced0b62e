"""Tests that run several gloo ranks on the CPU of one machine."""
