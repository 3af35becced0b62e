"""Run other projects' tests and programs from unchanged checkouts with our engine (`make upstream-tests`)."""
