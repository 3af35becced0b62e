"""Make the HTML report of a benchmark: `data` reads it, `text` and `plots` show it, `page` fills `page.html`."""

from terapipe_ds.bench.report.data import ReportError
from terapipe_ds.bench.report.page import check_packages, load_result, render_page, write_report

__all__ = ["ReportError", "check_packages", "load_result", "render_page", "write_report"]
