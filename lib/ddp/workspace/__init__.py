"""The folders on the shared filesystem: owners, contents, and access with a deadline."""
