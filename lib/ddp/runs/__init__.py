"""Runs and their jobs: list, show, follow, explain, compare, resume, cancel."""
