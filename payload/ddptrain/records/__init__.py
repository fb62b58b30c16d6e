"""What a run writes for people: metrics.jsonl, summary.json, loss.png, and the trackers beside them."""
