"""From text to batches.

Text becomes a dataset: `prepare` runs it, `sources` finds files, `members` opens them, `documents`
takes the `texts` out of them, `tokenizers` makes ids of these, and `parts` writes `shards`.
Training reads them back: `sampler` says which rows a step takes, `batches` fetches them.
"""
