"""The files of a run for people: metrics.jsonl, summary.json, loss.png; and the trackers."""
