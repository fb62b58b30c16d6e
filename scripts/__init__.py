"""What `make` and tox run: set-up, test lanes, packing, generated reference pages."""
