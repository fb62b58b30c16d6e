"""Runs and their jobs: listed, shown, followed, explained, compared, resumed, cancelled."""
