"""What `make bench` measures: each figure beside a peer's, or a limit's, in the same run on the same machine."""

# pyright: basic, reportPrivateImportUsage=false
