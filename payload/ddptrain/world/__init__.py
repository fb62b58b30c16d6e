"""The ranks that train together: how they meet, agree and end, and what their machines can do."""
