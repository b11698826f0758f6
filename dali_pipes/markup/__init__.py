"""HTML from templates, in which everything that is not markup is escaped: `rendered`.

The templates are files beside this module, with the style sheet and the script of the report's page.
"""

from dali_pipes.markup.render import number, rendered, source_of

__all__ = ["number", "rendered", "source_of"]
