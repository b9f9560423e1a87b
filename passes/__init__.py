"""The graph passes, one file each. See fxgrad.compile.pipeline for their order."""

if __name__ != "fxgrad.passes":  # imported a second time under another name, every rule would load twice
    raise ImportError("the passes are the package fxgrad.passes; import them under that name")
