"""Writes the pages that are built and not kept: ``python -m docs.generate FOLDER``.

``make docs-site`` gives them to mkdocs beside the pages that people wrote. They are the program's
own words: parsers, schema, registry, docstrings, policies, an engine's answers, and results.
"""
