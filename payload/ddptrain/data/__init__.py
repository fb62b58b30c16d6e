"""From text to batches.

Text becomes a dataset: `sources` finds files, `members` opens them, `documents` takes the `records` out of them,
`tokenizers` makes ids of these, and `parts` writes `shards`. Training reads them back: `sampler` says which rows a
step takes, `reader` fetches them.
"""
