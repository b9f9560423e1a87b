"""How Sphinx builds the site: `make docs` writes it to docs/_build/html, without network, and warnings are errors."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx_gallery.sorting import ExplicitOrder

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import fxgrad  # noqa: E402 - from this checkout

project = "fxgrad"
author = "the fxgrad authors"
copyright = author
version = release = fxgrad.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "**/GALLERY_HEADER.rst"]
nitpicky = True
nitpick_ignore_regex = [  # names of other libraries, and fxgrad's own that are not public
    (r"py:.*", r"(?!fxgrad\.).*"),
    (r"py:class", r"fxgrad\.(\w+\.)+(Call|Context|F|M|Packed|R|Use)"),
]

# -- pages ----------------------------------------------------------------------------------------------------------
myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline"]

# -- docstrings -----------------------------------------------------------------------------------------------------
default_role = "py:obj"  # docstrings write `fxgrad.transform`
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Delivers", "Guarantees"]
napoleon_use_ivar = True

# -- examples -------------------------------------------------------------------------------------------------------
sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "gallery",
    "filename_pattern": "/",
    "within_subsection_order": ExplicitOrder(
        [
            "per_sample_norms.py",
            "noise_scale.py",
            "influence.py",
            "curvature.py",
            "private_training.py",
            "people.py",
            "clipping_schedule.py",
            "sequences.py",
            "strategies.py",
            "own_quantity.py",
            "own_operator.py",
            "*",
        ]
    ),
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
    "run_stale_examples": True,
    "min_reported_time": 20,
    "abort_on_example_error": True,
}

# -- theme ----------------------------------------------------------------------------------------------------------
pygments_dark_style = "github-dark"
html_theme = "furo"
html_title = f"fxgrad {release}"
html_copy_source = False
html_show_sourcelink = False
copybutton_exclude = ".linenos, .gp, .go"
html_static_path = ["_static"]
html_favicon = "_static/icon.svg"
html_css_files = ["site.css"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6e4f", "color-brand-content": "#0b6e4f"},
    "dark_css_variables": {"color-brand-primary": "#5fd3a6", "color-brand-content": "#5fd3a6"},
}

# A link to a page outside docs/ works in the repository; on the site it leads to the page that shows the same text.
SHOWN = {
    "../README.md": "readme.md",
    "../CONTRIBUTING.md": "contributing.md",
    "../CHANGELOG.md": "changelog.md",
    "../SECURITY.md": "security.md",
    "../examples/gallery": "gallery/index.rst",
}


def lead_to_the_site(app: Sphinx, docname: str, source: list[str]) -> None:
    """Let links to files that have a page of the site lead to that page."""
    for outside, page in SHOWN.items():
        source[0] = source[0].replace(f"]({outside}", f"]({page}")
    source[0] = re.sub(r"\[([^\]]*)\]\((\.\./benchmarks/\w+\.md)\)", r"{download}`\1 <\2>`", source[0])
    source[0] = re.sub(r"\]\(\.\./examples/(\w+)\.py\)", r"](programs.md#\1py)", source[0])


def lead_from_included(app: Sphinx, path: Path, docname: str, content: list[str]) -> None:
    """Do the same in files that a page includes, which lie one folder up."""
    for outside, page in SHOWN.items():
        content[0] = content[0].replace(f"]({outside.removeprefix('../')}", f"]({page}")


def without_links_back(app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Take the links back from sources: viewcode knows one public name per file, and some files have several."""
    if pagename.startswith("_modules/"):
        context["body"] = re.sub(r'<a class="viewcode-back".*?</a>', "", context["body"])


def without_colours(app: Sphinx, doctree: nodes.document) -> None:
    """Let a block of a Markdown page that names no language have no colours: it is an error, or printed."""
    if Path(app.env.doc2path(app.env.docname)).suffix == ".md":
        for block in doctree.findall(nodes.literal_block):
            if block.get("language", "default") == "default":
                block["language"] = "none"


def setup(app: Sphinx) -> None:
    app.connect("source-read", lead_to_the_site)
    app.connect("doctree-read", without_colours)
    app.connect("include-read", lead_from_included)
    app.connect("html-page-context", without_links_back)
