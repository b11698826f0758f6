"""One HTML page on the data of a run: a module for each section, their charts, and the page that holds them."""

from dali_pipes.tools.reports.page.data_page import DataPage, make_page

__all__ = ["DataPage", "make_page"]
