"""Run tests with several gloo ranks on the CPU of one machine."""
