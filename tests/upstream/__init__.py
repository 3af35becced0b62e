"""Other projects' tests and programs, run from unchanged checkouts with our engine (`make upstream-tests`)."""
