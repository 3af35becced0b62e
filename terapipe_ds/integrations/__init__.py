"""Help the patches of third-party training code (see `patches/`); nothing else of the package imports from here."""
