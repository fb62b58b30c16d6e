"""The documentation as a site: `make docs` builds it into build/site with every warning an error."""

project = "slurm-ddp"
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["README.md"]  # index.md includes it
html_theme = "furo"
html_title = project
html_copy_source = html_show_sourcelink = False
myst_heading_anchors = 3  # levels of headings that pages link to
nitpicky = True
