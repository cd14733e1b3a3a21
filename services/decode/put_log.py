"""What a decode worker's log says of transfers that failed. Those that succeeded are in their request's line."""

from __future__ import annotations

import structlog

from shared.errors import ServingError
from shared.kv.put import PutReport

log = structlog.get_logger()


def log_put(report: PutReport) -> None:
    """A line for a PUT that was not committed; a bug of ours with its traceback.

    None for who has not even named a hand-off: port scanners would fill the log.
    """
    error = report.error
    is_bug = report.status == ServingError.http_status
    if error is None or (report.handoff_id is None and not is_bug):
        return
    facts = {
        "status": report.status,
        "transport": report.transport,
        "handoff_id": report.handoff_id,
        "request_id": report.request_id,
        "duration_s": report.duration_s,
    }
    if is_bug:
        log.error("kv_put_failed", exc_info=error, **facts)
    else:
        log.info("kv_put_ended", reason=str(error) or type(error).__name__, **facts)
