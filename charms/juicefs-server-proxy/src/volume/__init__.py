"""The volume: what it should be, that it is formatted once and by nobody else, and what actions do to it."""
