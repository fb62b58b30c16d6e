"""The filesystems: for each kind how a mount of it is planned and what the machine needs for it."""
