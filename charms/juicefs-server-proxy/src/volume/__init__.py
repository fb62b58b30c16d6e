"""The volume: its specification (spec), its one format (formatting), and its actions' work."""
