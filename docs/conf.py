"""Sphinx's settings: python -m tools.docs builds the pages of this folder."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # figures.py; jaxfuse of this clone, and benchmarks

import jaxfuse  # noqa: E402

project = "jaxfuse"
author = "the authors of jaxfuse"
version = release = jaxfuse.__version__
copyright = author

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "figures"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "fieldlist"]
myst_heading_anchors = 3
default_role = "code"  # docstrings name arguments and shapes in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_use_rtype = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"jaxfuse {version}"
html_static_path = ["static"]
html_css_files = ["tables.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}


def setup(app):
    app.connect("autodoc-process-docstring", _as_restructured_text, priority=400)  # before napoleon


def _as_restructured_text(app, what, name, obj, options, lines):
    """Our docstrings write `site`s, and begin a paragraph with "Returns: "."""
    for i, line in enumerate(lines):
        line = re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", line)
        lines[i] = re.sub(r"^(Returns|Raises):(?= )", r"**\1.**", line)
