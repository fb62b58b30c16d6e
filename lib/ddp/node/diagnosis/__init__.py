"""Why an attempt failed: evidence is gathered from its files, then rules judge it."""
