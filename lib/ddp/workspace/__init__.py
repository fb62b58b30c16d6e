"""The folders on the shared filesystem: who owns them, what is in them, and access that ends when the server hangs."""
