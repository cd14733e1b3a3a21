"""schemathesis against the OpenAPI page of router, prefill and decode: whatever comes in, no answer is a surprise.

Its own pytest plugin does not work under this pytest, so its strategies are driven from here.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.support.cluster import AUTH, Cluster

schemathesis = pytest.importorskip("schemathesis")
pytestmark = pytest.mark.filterwarnings("ignore")

EXAMPLES = settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("process", ["router", "prefill", "decode"])
def test_every_route_answers_as_documented(pd: Cluster, process: str) -> None:
    """No 5xx, and no status that the page does not tell, with the key that the workers want.

    But for work whose time is over, which a worker says by a 504.
    """
    workers = {"prefill": pd.prefill[0].url, "decode": pd.decode[0].url}
    page = schemathesis.openapi.from_url(f"{workers.get(process, pd.url)}/openapi.json", headers=AUTH)
    checks = [
        schemathesis.checks.not_a_server_error,
        schemathesis.specs.openapi.checks.status_code_conformance,
    ]
    operations = [result.ok() for result in page.get_all_operations()]
    assert len(operations) > 4

    for operation in operations:

        @EXAMPLES
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            is_work = process != "router" and isinstance(case.body, dict)
            if is_work and "timeout_s" in case.body:
                case.body["timeout_s"] = 0.2  # else a decode worker waits as long as that for KV
            response = case.call(headers=AUTH, timeout=60)
            if not (is_work and response.status_code == 504):
                case.validate_response(response, checks=checks)

        check()
    pd.check_nothing_left()
