"""What the patches of third-party training code call (see `patches/`). Nothing else of the package imports from here,
but for `insertions`, by which the engine tells a patched model from an unpatched one."""
