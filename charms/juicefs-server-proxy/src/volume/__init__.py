"""The volume: what it should be (spec), that it is formatted once (formatting), and what actions do to it."""
