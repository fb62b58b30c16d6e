"""`ddp report`: one page of HTML about runs: `facts` reads a run's files, `page` writes the page."""
